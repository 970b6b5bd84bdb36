// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The view of the graph: draw, pan, zoom, go from node to node, choose.

const TOO_MANY = 6000;
const NEAR = 0.9;
/** Below these, text is too small to be read and is left out: the name, then all of it. */
const MIDDLE = 0.55;
const FAR = 0.4;
/** Dashes of longer lines would be slow to draw. */
const LONGEST_DASHED = 2000;
const HINT = "Drag to move. The wheel zooms while the drawing has the focus, Ctrl and the wheel always. Keys: arrows go along "
  + "the edges, Enter chooses, Enter again opens a group or goes to the card, + and − zoom, 0 shows all.";
/** Edges of one path: small enough that those out of view cost nothing. */
const BUNDLE = 40;

class GraphView {
  constructor(body) {
    this.groups = new Groups();
    this.level = this.groups.firstLevel();
    this.colouring = "placement";
    this.view = { x: 0, y: 0, k: 1 };
    this.at = -1;
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
        this.detail(), this.says),
      this.canvas, this.legend,
      make("p", { class: "hint", text: HINT }));
    listeners.push((what) => this.light(what));
    this.redraw();
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

  redraw(centre = null) {
    Object.assign(this, this.groups.cut(this.level));
    this.at = -1;
    this.says.textContent = `${boxCount(this.boxes.length)} for ${count(NODES.length, "node")}`;
    if (this.boxes.length > TOO_MANY && !this.forced) {
      this.elements = null;
      const force = () => {
        this.forced = true;
        this.redraw();
      };
      this.canvas.replaceChildren(make("button", { type: "button", text: `Draw all ${boxCount(this.boxes.length)}`, onclick: force }));
      return;
    }
    this.drawBoxes();
    this.home();
    if (centre !== null) this.show(this.boxOf[centre], false);
    this.light(chosen);
  }

  drawBoxes() {
    const { looks, legend } = paint(this.boxes, this.colouring);
    const widths = this.widths();
    this.plan = layered(widths, this.edges);
    this.svg = draw("svg", { tabindex: "0", role: "listbox", "aria-label": `Graph of the model, ${boxCount(this.boxes.length)}` });
    this.world = draw("g");
    this.lit = draw("path", { class: "wires lit" });
    this.world.append(...this.wires(), this.lit);
    this.elements = this.boxes.map((box, i) => this.element(box, i, widths[i]));
    this.parts = this.elements.map((element) => [...element.children].slice(1)); // without the title
    this.world.append(...this.elements);
    this.svg.append(this.world);
    this.canvas.replaceChildren(this.svg, this.zoomButtons());
    this.dress(looks, legend);
    this.hear();
  }

  /** The width of each box: enough for what it says, however it is coloured. */
  widths() {
    const all = Object.keys(COLOURINGS).map((name) => paint(this.boxes, name).looks);
    return this.boxes.map((box, i) => {
      const wide = all.flatMap((looks) => linesOf(box, looks[i].word).map((text, line) => text.length * (line ? 6.4 : 7.6)));
      return Math.min(210, Math.max(92, Math.max(...wide) + 20));
    });
  }

  element(box, i, width) {
    const x = this.plan.x[i], y = this.plan.y[i];
    const text = (dy, kind) => draw("text", { x: 0, y: dy, "text-anchor": "middle", class: kind });
    return draw("g", { id: `g${i}`, "data-box": i, role: "option", transform: `translate(${x.toFixed(1)} ${y})` },
      draw("title", { text: boxName(box) }),
      draw("rect", { x: -width / 2, y: 0, width, height: BOX_HIGH, rx: box.group ? 12 : 6 }),
      text(15, "op"), text(28, "name"), text(40, "word"));
  }

  /** Paths of ordinary edges, and of those between devices. */
  wires() {
    const deviceOf = this.boxes.map((box) => [...new Set([...unitsOf(box)].map(placement).filter((word) => !PLAIN.includes(word)))]);
    const crosses = ([a, b]) => deviceOf[a].length === 1 && deviceOf[b].length === 1 && deviceOf[a][0] !== deviceOf[b][0];
    const isLong = ([a, b]) => Math.abs(this.plan.x[a] - this.plan.x[b]) > LONGEST_DASHED;
    const plain = [], cross = [], long = [];
    this.edges.forEach((edge, i) => (!crosses(edge) ? plain : isLong(edge) ? long : cross).push(this.plan.paths[i]));
    this.crossing = cross.length + long.length;
    const bundles = (paths, kind) => Array.from({ length: Math.ceil(paths.length / BUNDLE) }, (_, i) =>
      draw("path", { class: kind, d: paths.slice(i * BUNDLE, (i + 1) * BUNDLE).join("") }));
    return [...bundles(plain, "wires"), ...bundles(cross, "wires cross"), ...bundles(long, "wires cross long")];
  }

  recolour(name) {
    this.colouring = name;
    for (const button of this.colours) button.setAttribute("aria-pressed", String(button.dataset.colour === name));
    if (!this.elements) return;
    const { looks, legend } = paint(this.boxes, name);
    this.dress(looks, legend);
  }

  dress(looks, legend) {
    this.boxes.forEach((box, i) => {
      const [rect, ...texts] = this.parts[i];
      const { look, word, strip } = looks[i];
      rect.setAttribute("class", look);
      const kinds = ["box", box.group && "group-box", deviates(box) && "off", look === "s4" && "deep"];
      this.elements[i].setAttribute("class", kinds.filter(Boolean).join(" "));
      this.elements[i].setAttribute("aria-label", `${boxName(box)}: ${word}${deviates(box) ? ", deviates" : ""}`);
      linesOf(box, word).forEach((text, line) => { texts[line].textContent = text; });
      this.paintStrip(this.elements[i], Number(rect.getAttribute("width")), strip || []);
    });
    if (this.boxes.some(deviates)) legend.push(legendItem("dashed", "dashed border: something else ran than was asked"));
    if (this.crossing) legend.push(legendItem("wire", "dashed line: between devices"));
    this.legend.replaceChildren(...legend);
    if (this.at >= 0) this.says.textContent = this.elements[this.at].getAttribute("aria-label");
    this.light(chosen);
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
      const box = event.target.closest("[data-box]");
      if (box) this.pick(Number(box.dataset.box));
    };
    svg.addEventListener("pointerup", up);
    svg.addEventListener("pointercancel", up);
    svg.addEventListener("dblclick", (event) => {
      const box = event.target.closest("[data-box]");
      if (box && this.boxes[box.dataset.box].group) this.open(this.boxes[box.dataset.box].group);
    });
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== svg) return;
      event.preventDefault();
      const edge = svg.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY * 0.0016), event.clientX - edge.left, event.clientY - edge.top);
    }, { passive: false });
    svg.addEventListener("keydown", (event) => this.key(event));
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
    if (this.at >= 0) this.elements[this.at].classList.remove("at");
    this.at = i;
    this.elements[i].classList.add("at");
    this.svg.setAttribute("aria-activedescendant", `g${i}`);
    this.says.textContent = this.elements[i].getAttribute("aria-label");
    this.show(i, false);
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
    this.marked = [...same].map((i) => this.elements[i]);
    for (const i of same) this.elements[i].classList.add(own < 0 || i === own ? "on" : "same");
    const wires = this.edges.map((edge, i) => [edge, i]).filter(([[a, b]]) => same.has(a) || same.has(b));
    this.lit.setAttribute("d", wires.map(([, i]) => this.plan.paths[i]).join(""));
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

  /** Begin with all of it where that can be read, else with the first node at the top. */
  home() {
    if (this.plan.height < 560 && !this.canvas.style.height) this.canvas.style.height = `${Math.max(260, this.plan.height + 44)}px`;
    this.fit();
    if (this.view.k >= MIDDLE || !this.boxes.length) return;
    const [wide] = this.size(), first = this.plan.x[0] * NEAR;
    const x = this.plan.width * NEAR < wide ? (wide - this.plan.width * NEAR) / 2 : first < wide - 100 ? 24 : wide / 2 - first;
    this.look({ k: NEAR, x, y: 20 });
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
