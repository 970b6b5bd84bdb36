// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The view of the graph: draw, pan, zoom, go from node to node, choose.

/** Drawings of more boxes hold elements for those in view alone, and are pixels where their text cannot be read. */
const ALL_ELEMENTS = 1000;
const NEAR = 0.9;
/** Below these, text is too small to be read and is left out: the name, then all of it. */
const MIDDLE = 0.55;
const FAR = 0.4;
/** Pixels around the view in which elements are kept. */
const MARGIN = 200;
/** Dashes of longer lines would be slow to draw. */
const LONGEST_DASHED = 2000;
const HINT = "Drag to move. The wheel zooms while the drawing has the focus, Ctrl and the wheel always. Keys: / searches, arrows "
  + "go along the edges, Enter chooses, Enter again opens a group or goes to the card, + and − zoom, 0 shows all.";
/** Edges of one path: small enough that those out of view cost nothing. */
const BUNDLE = 40;

class GraphView {
  constructor(body) {
    this.groups = new Groups();
    this.level = this.groups.firstLevel();
    this.colouring = "placement";
    this.view = { x: 0, y: 0, k: 1 };
    this.at = -1;
    this.turn = 0;
    this.hits = [];
    this.canvas = make("div", { class: "canvas" });
    this.legend = make("ul", { class: "legend boxes" });
    this.says = make("span", { class: "count", role: "status" });
    this.colours = Object.entries(COLOURINGS).map(([name, { title }]) =>
      make("button", {
        type: "button", "data-colour": name, "aria-pressed": String(name === this.colouring), text: title,
        onclick: () => this.recolour(name),
      }));
    body.append(
      make("div", { class: "row" },
        make("div", { class: "group", role: "group", "aria-label": "Colour the graph by" }, this.colours),
        this.detail(), this.searchField(), this.says),
      this.canvas, this.legend,
      make("p", { class: "hint", text: HINT }));
    listeners.push((what) => this.light(what));
    new ResizeObserver(() => this.elements && this.look(this.view)).observe(this.canvas);
    onThemeChange(() => this.elements && this.repaint());
    this.redraw();
  }

  searchField() {
    this.search = make("input", {
      type: "search", placeholder: "Find a node  /", "aria-label": "Find a node by name or operator",
      oninput: () => this.find(),
      onkeydown: (event) => {
        if (event.key !== "Enter") return;
        event.preventDefault();
        this.next(event.shiftKey ? -1 : 1);
      },
    });
    addEventListener("keydown", (event) => {
      const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName);
      if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || typing) return;
      event.preventDefault();
      this.canvas.scrollIntoView({ block: "nearest" });
      this.search.focus();
    });
    return this.search;
  }

  /** Mark the boxes whose nodes have the text in their name or operator. */
  find() {
    const text = this.search.value.trim().toLowerCase();
    this.hits = text ? NODES.filter((n) => n.name.toLowerCase().includes(text) || n.op.toLowerCase() === text).map((n) => n.index) : [];
    this.hit = -1;
    this.markHits();
    this.says.textContent = !text ? this.boxWords() : `${count(this.hits.length, "node")} found${this.hits.length ? ", Enter shows the next" : ""}`;
  }

  next(by) {
    if (!this.hits.length) return;
    this.hit = (this.hit + by + this.hits.length * 2) % this.hits.length;
    if (this.hit < 0) this.hit = this.hits.length - 1;
    const node = NODES[this.hits[this.hit]];
    const closed = this.groups.shownIn(node.index, this.level);
    const shown = () => {
      this.pick(this.boxOf[node.index]);
      this.says.textContent = `${this.hit + 1} of ${whole.format(this.hits.length)}: ${node.name}, ${node.op}`;
    };
    if (!closed) return shown();
    for (let group = this.groups.home[node.index]; group.outer; group = group.outer) {
      this.groups.opened.add(group);
      this.groups.closed.delete(group);
    }
    return this.redraw(null, shown);
  }

  markHits() {
    this.hitBoxes = new Set(this.hits.map((index) => this.boxOf[index]));
    for (const [i, element] of this.shown) element.classList.toggle("hit", this.hitBoxes.has(i));
    this.repaint();
  }

  boxWords() {
    return `${boxCount(this.boxes.length)} for ${count(NODES.length, "node")}`;
  }

  detail() {
    const { depth } = this.groups;
    if (!depth) return null;
    const levels = Array.from({ length: depth }, (_, i) => i + 1);
    const select = make("select", { id: "detail", onchange: (event) => this.setLevel(Number(event.target.value)) },
      levels.map((level) => {
        const boxes = boxCount(this.groups.cut(level).boxes.length);
        return make("option", { value: level, text: `groups of level ${level}: ${boxes}` });
      }),
      make("option", { value: "Infinity", text: `all ${whole.format(NODES.length)} nodes` }));
    select.value = String(this.level);
    return make("label", {}, "detail", select);
  }

  setLevel(level) {
    this.canvas.style.height = "";
    this.level = level;
    this.groups.opened.clear();
    this.groups.closed.clear();
    this.redraw();
  }

  open(group, open = true) {
    this.groups[open ? "opened" : "closed"].add(group);
    this.groups[open ? "closed" : "opened"].delete(group);
    this.redraw(group.nodes[0]);
    choose(open ? {} : { group });
  }

  /** Lay out and draw. A large graph is laid out in slices, between which the page answers. */
  redraw(centre = null, then = null) {
    Object.assign(this, this.groups.cut(this.level));
    this.at = -1;
    this.elements = this.looks = null;
    this.says.textContent = this.boxWords();
    const turn = ++this.turn, work = this.layout();
    const done = () => {
      this.drawBoxes();
      this.home();
      if (centre !== null) this.show(this.boxOf[centre], false);
      this.light(chosen);
      if (then) then();
    };
    if (this.boxes.length <= ALL_ELEMENTS) {
      while (!work.next().done);
      done();
      return;
    }
    const text = `Laying out ${boxCount(this.boxes.length)} …`;
    this.canvas.replaceChildren(make("p", { class: "wait", role: "status", text }));
    inSlices(work, () => turn === this.turn, done);
  }

  * layout() {
    this.wide = yield* this.widths();
    this.plan = yield* layered(this.wide, this.edges);
    this.spans = this.plan.spans;
  }

  drawBoxes() {
    const { looks, legend } = paint(this.boxes, this.colouring);
    const few = this.boxes.length <= ALL_ELEMENTS;
    this.svg = draw("svg", { tabindex: "0", role: "listbox", "aria-label": `Graph of the model, ${boxCount(this.boxes.length)}` });
    this.world = draw("g");
    this.lines = draw("g");
    this.lit = draw("path", { class: "wires lit" });
    this.world.append(this.lines, this.lit);
    this.svg.append(this.world);
    this.farBelow = few ? FAR : MIDDLE;
    this.pixels = new Pixels(this, few);
    this.elements = new Array(this.boxes.length).fill(null);
    this.shown = new Map();
    this.hitBoxes = new Set(this.hits.map((index) => this.boxOf[index]));
    this.canvas.replaceChildren(this.pixels.sheet, this.svg, this.zoomButtons(), this.pixels.map);
    this.sortWires();
    if (few) {
      this.lines.append(...this.wires(this.edges.keys()));
      this.boxes.forEach((_, i) => this.elementOf(i));
      this.world.append(...this.elements);
      this.shown = new Map(this.elements.entries());
    }
    this.dress(looks, legend);
    this.hear();
  }

  /** The element of a box, made when it is first wanted. */
  elementOf(i) {
    if (!this.elements[i]) {
      this.elements[i] = this.element(this.boxes[i], i, this.wide[i]);
      if (this.looks) this.dressBox(i);
    }
    return this.elements[i];
  }

  /** The width of each box: enough for what it says, however it is coloured. */
  * widths() {
    const most = new Array(this.boxes.length).fill(0);
    for (const name of Object.keys(COLOURINGS)) {
      const { looks } = paint(this.boxes, name);
      yield;
      this.boxes.forEach((box, i) => linesOf(box, looks[i].word).forEach((text, line) => {
        most[i] = Math.max(most[i], text.length * (line ? 6.4 : 7.6));
      }));
      yield;
    }
    return most.map((wide) => Math.min(210, Math.max(92, wide + 20)));
  }

  element(box, i, width) {
    const x = this.plan.x[i], y = this.plan.y[i];
    const text = (dy, kind) => draw("text", { x: 0, y: dy, "text-anchor": "middle", class: kind });
    return draw("g", { id: `g${i}`, "data-box": i, role: "option", transform: `translate(${x.toFixed(1)} ${y})` },
      draw("title", { text: boxName(box) }),
      draw("rect", { x: -width / 2, y: 0, width, height: BOX_HIGH, rx: box.group ? 12 : 6 }),
      text(15, "op"), text(28, "name"), text(40, "word"));
  }

  /** Sort the edges: ordinary ones, those between devices, and of these the long ones. */
  sortWires() {
    const deviceOf = this.boxes.map((box) => [...new Set([...unitsOf(box)].map(placement).filter((word) => !PLAIN.includes(word)))]);
    const crosses = ([a, b]) => deviceOf[a].length === 1 && deviceOf[b].length === 1 && deviceOf[a][0] !== deviceOf[b][0];
    const isLong = ([a, b]) => Math.abs(this.plan.x[a] - this.plan.x[b]) > LONGEST_DASHED;
    this.kindOf = this.edges.map((edge) => (!crosses(edge) ? "wires" : isLong(edge) ? "wires cross long" : "wires cross"));
    this.crossing = this.kindOf.some((kind) => kind !== "wires");
  }

  wires(edges) {
    const paths = { wires: [], "wires cross": [], "wires cross long": [] };
    for (const i of edges) paths[this.kindOf[i]].push(this.plan.paths[i]);
    return Object.entries(paths).flatMap(([kind, all]) => Array.from({ length: Math.ceil(all.length / BUNDLE) }, (_, i) =>
      draw("path", { class: kind, d: all.slice(i * BUNDLE, (i + 1) * BUNDLE).join("") })));
  }

  recolour(name) {
    this.colouring = name;
    for (const button of this.colours) button.setAttribute("aria-pressed", String(button.dataset.colour === name));
    if (!this.elements) return;
    const { looks, legend } = paint(this.boxes, name);
    this.dress(looks, legend);
  }

  dress(looks, legend) {
    this.looks = looks;
    for (const i of this.elements.keys()) if (this.elements[i]) this.dressBox(i);
    if (this.boxes.some(deviates)) legend.push(legendItem("dashed", "dashed border: something else ran than was asked"));
    if (this.crossing) legend.push(legendItem("wire", "dashed line: between devices"));
    this.legend.replaceChildren(...legend);
    if (this.at >= 0) this.says.textContent = this.elementOf(this.at).getAttribute("aria-label");
    this.light(chosen);
  }

  dressBox(i) {
    const element = this.elements[i], box = this.boxes[i];
    const [rect, ...texts] = [...element.children].slice(1); // without the title
    const { look, word, strip } = this.looks[i];
    rect.setAttribute("class", look);
    const kinds = ["box", box.group && "group-box", deviates(box) && "off", look === "s4" && "deep", this.hitBoxes.has(i) && "hit"];
    element.setAttribute("class", kinds.filter(Boolean).join(" "));
    element.setAttribute("aria-label", `${boxName(box)}: ${word}${deviates(box) ? ", deviates" : ""}`);
    linesOf(box, word).forEach((text, line) => { texts[line].textContent = text; });
    this.paintStrip(element, this.wide[i], strip || []);
  }

  /** At the foot of a group with several colours: how much of each. */
  paintStrip(element, width, shares) {
    for (const old of element.querySelectorAll(".strip")) old.remove();
    const wide = width - 24;
    let x = -wide / 2;
    for (const [look, part] of shares) {
      element.append(draw("rect", { class: `strip ${look}`, x: x.toFixed(1), y: BOX_HIGH - 5, width: (wide * part).toFixed(1), height: 5 }));
      x += wide * part;
    }
  }

  zoomButtons() {
    const button = (text, label, what) => make("button", { type: "button", "aria-label": label, onclick: what, text });
    return make("div", { class: "zoom" }, button("−", "Zoom out", () => this.zoom(0.7)), button("+", "Zoom in", () => this.zoom(1.4)),
      button("Show all", "Show the whole graph", () => this.fit()));
  }

  hear() {
    const { svg } = this;
    let from = null;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button === 0) from = { x: event.clientX, y: event.clientY, view: { ...this.view }, moved: false };
    });
    svg.addEventListener("pointermove", (event) => {
      if (!from) return;
      const dx = event.clientX - from.x, dy = event.clientY - from.y;
      if (!from.moved && Math.hypot(dx, dy) < 4) return;
      if (!from.moved) svg.setPointerCapture(event.pointerId);
      from.moved = true;
      svg.classList.add("drag");
      this.look({ ...from.view, x: from.view.x + dx, y: from.view.y + dy });
    });
    const up = (event) => {
      const still = from && !from.moved;
      from = null;
      svg.classList.remove("drag");
      if (event.type !== "pointerup" || !still) return;
      const box = this.boxAt(event);
      if (box >= 0) this.pick(box);
    };
    svg.addEventListener("pointerup", up);
    svg.addEventListener("pointercancel", up);
    svg.addEventListener("dblclick", (event) => {
      const box = this.boxAt(event);
      if (box >= 0 && this.boxes[box].group) this.open(this.boxes[box].group);
    });
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== svg) return;
      event.preventDefault();
      const edge = svg.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY * 0.0016), event.clientX - edge.left, event.clientY - edge.top);
    }, { passive: false });
    svg.addEventListener("keydown", (event) => this.key(event));
  }

  /** The box under the pointer: an element, or where the graph is painted. */
  boxAt(event) {
    const element = event.target.closest("[data-box]");
    if (element) return Number(element.dataset.box);
    if (this.pixels.few || this.view.k >= this.farBelow) return -1;
    const edge = this.svg.getBoundingClientRect();
    const x = (event.clientX - edge.left - this.view.x) / this.view.k, y = (event.clientY - edge.top - this.view.y) / this.view.k;
    return this.boxes.findIndex((_, i) => Math.abs(x - this.plan.x[i]) <= this.wide[i] / 2 && y >= this.plan.y[i] && y <= this.plan.y[i] + BOX_HIGH);
  }

  key(event) {
    const go = {
      ArrowDown: () => this.step(1), ArrowUp: () => this.step(-1), ArrowRight: () => this.beside(1), ArrowLeft: () => this.beside(-1),
      "+": () => this.zoom(1.4), "=": () => this.zoom(1.4), "-": () => this.zoom(0.7), 0: () => this.fit(),
      Enter: () => this.enter(),
    }[event.key];
    if (!go || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    go();
  }

  enter() {
    if (this.at < 0) return;
    const { group, node } = this.boxes[this.at];
    if (group && chosen.group === group) this.open(group);
    else if (node && chosen.node === node) enterInspector();
    else this.pick(this.at);
  }

  /** Go along an edge, downwards or upwards. */
  step(by) {
    if (this.at < 0) return this.point(0);
    const [end, other] = by > 0 ? [0, 1] : [1, 0];
    const edge = this.edges.find((e) => e[end] === this.at);
    return edge ? this.point(edge[other]) : undefined;
  }

  beside(by) {
    if (this.at < 0) return this.point(0);
    const { x, y } = this.plan;
    const row = this.boxes.map((_, i) => i).filter((i) => y[i] === y[this.at]).sort((a, b) => x[a] - x[b]);
    const next = row[row.indexOf(this.at) + by];
    return next === undefined ? undefined : this.point(next);
  }

  point(i) {
    if (this.at >= 0) this.elementOf(this.at).classList.remove("at");
    this.at = i;
    const element = this.elementOf(i);
    element.classList.add("at");
    this.show(i, false);
    this.svg.setAttribute("aria-activedescendant", `g${i}`);
    this.says.textContent = element.getAttribute("aria-label");
  }

  pick(i) {
    this.point(i);
    const { node, group } = this.boxes[i];
    choose(group ? { group } : { node, unit: node.unit });
  }

  /** Mark what is chosen: its box, the others of the same unit, its edges. */
  light({ unit, node, group }) {
    if (!this.elements) return;
    for (const element of this.marked || []) element.classList.remove("on", "same");
    const own = group ? this.boxes.findIndex((box) => box.group === group) : node ? this.boxOf[node.index] : -1;
    const same = new Set(NODES.filter((n) => unit && n.unit === unit).map((n) => this.boxOf[n.index]));
    if (own >= 0) same.add(own);
    this.chosenBoxes = same;
    this.marked = [...same].map((i) => this.elementOf(i));
    for (const i of same) this.elementOf(i).classList.add(own < 0 || i === own ? "on" : "same");
    const wires = this.edges.map((edge, i) => [edge, i]).filter(([[a, b]]) => same.has(a) || same.has(b));
    this.lit.setAttribute("d", wires.map(([, i]) => this.plan.paths[i]).join(""));
    this.repaint();
  }

  /** Bring a unit's nodes into view. */
  reveal(unit) {
    const node = NODES.find((n) => n.unit === unit);
    if (node && this.elements) this.show(this.boxOf[node.index]);
  }

  size() {
    return [this.canvas.clientWidth || 1100, this.canvas.clientHeight || 600];
  }

  look(view) {
    this.view = view;
    this.world.setAttribute("transform", `translate(${view.x.toFixed(2)} ${view.y.toFixed(2)}) scale(${view.k.toFixed(4)})`);
    this.svg.classList.toggle("middle", view.k < MIDDLE);
    this.svg.classList.toggle("far", view.k < FAR);
    this.keepInView();
    this.repaint(true);
  }

  /** Of a large graph, hold the elements that are in view, and none where the graph is painted. */
  keepInView() {
    if (this.pixels.few) return;
    const { x, y, k } = this.view, [wide, high] = this.size();
    const far = k < this.farBelow;
    const left = (-x - MARGIN) / k, right = (wide - x + MARGIN) / k, top = (-y - MARGIN) / k, bottom = (high - y + MARGIN) / k;
    const near = (i) => !far && this.plan.x[i] + this.wide[i] / 2 > left && this.plan.x[i] - this.wide[i] / 2 < right
      && this.plan.y[i] + BOX_HIGH > top && this.plan.y[i] < bottom;
    const wanted = this.boxes.map((_, i) => i).filter((i) => near(i) || (i === this.at && !far));
    for (const [i, element] of this.shown) if (!near(i)) element.remove();
    this.shown = new Map(wanted.map((i) => [i, this.elementOf(i)]));
    for (const element of this.shown.values()) if (!element.isConnected) this.world.append(element);
    const crosses = ([x1, y1, x2, y2]) => !far && x2 > left && x1 < right && y2 > top && y1 < bottom;
    this.lines.replaceChildren(...this.wires([...this.spans.keys()].filter((i) => crosses(this.spans[i]))));
  }

  repaint(moved = false) {
    if (this.elements && this.looks) this.pixels.paint(!this.pixels.few && this.view.k < this.farBelow, moved);
  }

  zoom(by, x = this.size()[0] / 2, y = this.size()[1] / 2) {
    const k = Math.min(3, Math.max(0.01, this.view.k * by)), real = k / this.view.k;
    this.look({ k, x: x - (x - this.view.x) * real, y: y - (y - this.view.y) * real });
  }

  fit() {
    const [wide, high] = this.size();
    const k = Math.min(1, (wide - 40) / Math.max(1, this.plan.width), (high - 40) / Math.max(1, this.plan.height));
    this.look({ k, x: (wide - this.plan.width * k) / 2, y: 20 });
  }

  /** Begin with all of it. */
  home() {
    if (this.plan.height < 560 && !this.canvas.style.height) this.canvas.style.height = `${Math.max(260, this.plan.height + 44)}px`;
    this.fit();
  }

  /** Move so that a box is in view; only where it is not, unless `always`. */
  show(i, always = true) {
    const [wide, high] = this.size();
    const k = this.view.k < FAR ? NEAR : this.view.k;
    const x = this.plan.x[i] * this.view.k + this.view.x, y = this.plan.y[i] * this.view.k + this.view.y;
    const inside = k === this.view.k && x > 80 && x < wide - 80 && y > 10 && y < high - 70;
    if (!always && inside) return;
    const within = (wish, room, size) => (size + 40 < room ? (room - size) / 2 : Math.min(20, Math.max(room - size - 20, wish)));
    this.look({ k, x: within(wide / 2 - this.plan.x[i] * k, wide, this.plan.width * k),
      y: within(high / 2 - (this.plan.y[i] + BOX_HIGH / 2) * k, high, this.plan.height * k) });
  }
}

function boxCount(number) {
  return number === 1 ? "1 box" : `${whole.format(number)} boxes`;
}

let graph = null;

function showGraph() {
  const body = bodyOf("graph");
  if (NODES.length) graph = new GraphView(body);
  else {
    body.append(nothing("This report does not hold the model's graph: an earlier version made it, or the model is one whose nodes "
      + "are not known."));
  }
}
