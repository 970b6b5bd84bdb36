// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// A graph as pixels: large ones from afar, and the small map that says where the view is.

const MAP_WIDE = 170;
const MAP_HIGH = 120;
/** Milliseconds of work between two turns of the page. */
const SLICE = 40;

/** Run a generator in slices, between which the page answers, as long as its result is wanted. */
function inSlices(work, wanted, done) {
  const slice = () => {
    if (!wanted()) return;
    const end = performance.now() + SLICE;
    do if (work.next().done) return done(); while (performance.now() < end);
    setTimeout(slice, 0);
  };
  setTimeout(slice, 0);
}

function onThemeChange(changed) {
  new MutationObserver(changed).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

class Pixels {
  constructor(graph, few) {
    this.graph = graph;
    this.few = few;
    this.sheet = make("canvas", { class: "sheet", "aria-hidden": "true" });
    this.map = make("canvas", { class: "minimap", "aria-hidden": "true" });
    this.listen();
  }

  /** Fill and border of each look, as the style has them. */
  colours() {
    const { graph } = this, probe = draw("g", { class: "box" }), rect = draw("rect"), wire = draw("path", { class: "wires" });
    probe.append(rect, wire);
    graph.svg.classList.add("far");
    graph.svg.append(probe);
    const found = new Map();
    for (const look of new Set(graph.looks.map((each) => each.look))) {
      rect.setAttribute("class", look);
      const { fill: inside, stroke } = getComputedStyle(rect);
      found.set(look, [inside, stroke]);
    }
    const wires = getComputedStyle(wire).stroke;
    probe.remove();
    graph.svg.classList.toggle("far", graph.view.k < FAR);
    const style = getComputedStyle(graph.canvas);
    const named = (name) => style.getPropertyValue(name).trim();
    return { looks: found, wires, accent: named("--accent"), ink: getComputedStyle(graph.says).color, bad: named("--bad") };
  }

  /** Paint the graph, if it is to be seen as pixels, and the map, in the next frame. `moved`: as before, elsewhere. */
  paint(whole, moved) {
    const { view, plan, boxes } = this.graph, [wide, high] = this.graph.size();
    const inView = view.k * plan.width <= wide && view.k * plan.height <= high && view.x >= 0 && view.y >= 0;
    this.sheet.hidden = !whole;
    this.map.hidden = inView || !boxes.length;
    if (!moved) this.painted = null;
    if ((this.sheet.hidden && this.map.hidden) || this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      if (!this.sheet.isConnected) return;
      this.painted ||= { colours: this.colours(), boxes: null };
      if (!this.sheet.hidden) this.paintGraph();
      if (!this.map.hidden) this.paintMap();
    });
  }

  paintGraph() {
    const { view } = this.graph, [wide, high] = this.graph.size();
    const context = this.context(this.sheet, wide, high);
    context.translate(view.x, view.y);
    context.scale(view.k, view.k);
    this.drawWires(context, view, wide, high);
    this.drawBoxes(context, view.k);
  }

  context(canvas, wide, high) {
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(high * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    return context;
  }

  drawWires(context, view, wide, high) {
    const { plan, edges } = this.graph;
    const left = -view.x / view.k, right = (wide - view.x) / view.k, top = -view.y / view.k, bottom = (high - view.y) / view.k;
    context.strokeStyle = this.painted.colours.wires;
    context.lineWidth = Math.max(1.2, 0.5 / view.k);
    context.beginPath();
    edges.forEach(([a, b]) => {
      const x1 = plan.x[a], y1 = plan.y[a] + BOX_HIGH, x2 = plan.x[b], y2 = plan.y[b];
      if (Math.max(x1, x2) < left || Math.min(x1, x2) > right || Math.max(y1, y2) < top || Math.min(y1, y2) > bottom) return;
      context.moveTo(x1, y1);
      context.lineTo(x2, y2);
    });
    context.stroke();
  }

  drawBoxes(context, k) {
    const { boxes, plan, wide, looks, hitBoxes } = this.graph, { colours } = this.painted;
    const chosenBoxes = this.graph.chosenBoxes || new Set();
    for (let i = 0; i < boxes.length; i += 1) {
      const [inside, border] = colours.looks.get(looks[i].look);
      context.fillStyle = inside === "none" ? border : inside;
      context.fillRect(plan.x[i] - wide[i] / 2, plan.y[i], wide[i], BOX_HIGH);
    }
    const outline = (i, colour) => {
      context.strokeStyle = colour;
      context.lineWidth = 2.5 / k;
      context.strokeRect(plan.x[i] - wide[i] / 2, plan.y[i], wide[i], BOX_HIGH);
    };
    boxes.forEach((box, i) => { if (deviates(box)) outline(i, colours.bad); });
    for (const i of hitBoxes) outline(i, colours.accent);
    for (const i of chosenBoxes) outline(i, colours.ink);
  }

  paintMap() {
    const { plan, view } = this.graph, [wide, high] = this.graph.size();
    const k = Math.min(MAP_WIDE / Math.max(1, plan.width), MAP_HIGH / Math.max(1, plan.height));
    const mapWide = Math.max(30, plan.width * k), mapHigh = Math.max(30, plan.height * k);
    this.scale = k;
    this.map.style.width = `${mapWide}px`;
    this.map.style.height = `${mapHigh}px`;
    if (!this.painted.boxes) {
      this.painted.boxes = make("canvas");
      const still = this.context(this.painted.boxes, mapWide, mapHigh);
      still.scale(k, k);
      this.drawBoxes(still, k);
    }
    const context = this.context(this.map, mapWide, mapHigh);
    context.drawImage(this.painted.boxes, 0, 0, mapWide, mapHigh);
    context.strokeStyle = this.painted.colours.ink;
    context.lineWidth = 2;
    context.strokeRect((-view.x / view.k) * k, (-view.y / view.k) * k, (wide / view.k) * k, (high / view.k) * k);
  }

  /** A press on the map brings that place into the middle of the view. */
  listen() {
    const go = (event) => {
      const { graph } = this, edge = this.map.getBoundingClientRect(), [wide, high] = graph.size();
      const x = (event.clientX - edge.left) / this.scale, y = (event.clientY - edge.top) / this.scale;
      graph.look({ k: graph.view.k, x: wide / 2 - x * graph.view.k, y: high / 2 - y * graph.view.k });
    };
    this.map.addEventListener("pointerdown", (event) => {
      this.map.setPointerCapture(event.pointerId);
      go(event);
    });
    this.map.addEventListener("pointermove", (event) => { if (event.buttons) go(event); });
  }
}
