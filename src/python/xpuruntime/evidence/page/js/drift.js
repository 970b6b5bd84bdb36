// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The drift: a plot of the error of each layer, and the table of its points.

const POINTS = DATA.points.row.map((row, index) => {
  const at = (name) => DATA.points[name][index];
  const layer = at("layer");
  return { index, row: ROWS[row], layer, name: DATA.layers.name[layer], op: DATA.strings[DATA.layers.op[layer]],
    place: DATA.layers.place[layer], tensor: DATA.strings[at("tensor")], passed: at("passed") === 1, first: at("first") === 1,
    odd: at("odd"), reason: DATA.strings[at("reason")], rel: at("max_rel"), abs: at("max_abs"), cosine: at("cosine") };
});
const HEAT_LEFT = 190;
const HIGH = 360, LEFT = 74, RIGHT = 24, NONE_Y = 44, TOP_Y = 66, LOW_Y = 272, ZERO_Y = 296, AXIS_Y = 314;
/** Beyond this the log scale is cut: what is smaller is no error that anybody looks for. */
const LEAST = -45;

/** Where a point goes: on the scale, to the line of zeros below it, or to that of what is no number above it. */
function laneOf(point) {
  if (point.odd || typeof point.rel === "string" || (point.rel === 0 && !point.passed)) return "none";
  return point.rel === 0 ? "zero" : "scale";
}

function errorOf(point) {
  const odd = point.odd ? `, ${count(point.odd, "element")} NaN or infinite` : "";
  return `${figure(point.rel)}${odd}`;
}

function titleOf(point) {
  return `${point.name} (${point.op})\n${point.row.label}: relative error ${errorOf(point)}, largest difference ${figure(point.abs)}, ` +
    `cosine ${figure(point.cosine, 6)}\n${point.passed ? "within tolerance" : point.reason}`;
}

function showDrift() {
  const body = bodyOf("drift");
  const rejected = ROWS.filter((row) => row.status === "rejected");
  for (const row of ROWS) {
    if (row.status === "rejected") continue; // the table of engines has the reason
    if (row.why) body.append(make("p", { class: "none missing", text: `No drift of ${row.label}: ${row.why}. To get it: ${row.how}.` }));
    else body.append(make("p", { class: "none", text: `${row.label}: ${firstWords(row)}` }));
  }
  if (rejected.length) body.append(make("p", { class: "none", text: `Not run, for the reasons above: ${rejected.map((row) => row.label).join(", ")}.` }));
  if (!POINTS.length) {
    bodyOf("layers").append(nothing("No layer was measured."));
    return;
  }
  showHeat(body, (point) => plot.pick(point));
  const plot = new Plot(body);
  const layers = new SortedTable(bodyOf("layers"), {
    things: POINTS, columns: POINT_COLUMNS, noun: "point", link: "layer", hint: "Filter by layer, op, tensor…",
    facets: [["candidate", (p) => p.row.label], ["tolerance", (p) => (p.passed ? "within" : "out")], ["op", (p) => p.op]],
    wordsOf: (p) => [p.name, p.op, p.tensor, p.row.label, p.reason],
    pick: (point) => {
      plot.light(point);
      layers.light(point);
    },
  });
  plot.pick = (point) => {
    plot.light(point);
    layers.reveal(point);
  };
}

/** Candidates by layers, the worst of neighbors where there are more layers than columns. */
const HEAT_COLUMNS = 160;
const HEAT_HIGH = 22;

function showHeat(body, pick) {
  const shown = ROWS.filter((row) => row.measured), layers = DATA.layers.name.length;
  if (shown.length < 2) return;
  const columns = Math.min(layers, HEAT_COLUMNS), width = Math.max(640, body.clientWidth), each = (width - HEAT_LEFT) / columns;
  const cells = new Map();
  for (const point of POINTS) {
    const key = `${shown.indexOf(point.row)} ${Math.floor((point.layer * columns) / layers)}`, other = cells.get(key);
    if (!other || heatOf(point) > heatOf(other)) cells.set(key, point);
  }
  const svg = draw("svg", { width, height: shown.length * HEAT_HIGH + 4, role: "img",
    "aria-label": "Drift of candidates by layers; the table of layers has the same figures",
    onclick: (event) => event.target.dataset.at && pick(POINTS[Number(event.target.dataset.at)]) },
  shown.map((row, i) => draw("text", { x: 0, y: i * HEAT_HIGH + 15, text: short(row.label, 26) }, draw("title", { text: row.label }))),
  [...cells].map(([key, point]) => {
    const [row, column] = key.split(" ").map(Number), step = heatOf(point);
    return draw("rect", { class: step > 4 ? "beyond" : `s${step}`, "data-at": point.index, x: (HEAT_LEFT + column * each).toFixed(1),
      y: row * HEAT_HIGH + 1, width: Math.max(1, each - 0.5).toFixed(1), height: HEAT_HIGH - 3 }, draw("title", { text: titleOf(point) }));
  }));
  const steps = ["no error", "below 1/1000 of the tolerance", "below 1/100", "below 1/10", "within"];
  const swatch = (kind, text) => make("li", {}, make("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text);
  body.append(make("h3", { text: `${count(shown.length, "candidate")} by ${count(layers, "layer")}` }),
    scrolling("Candidates by layers", { class: "lanes heat" }, svg),
    make("ul", { class: "legend" }, steps.map((text, i) => swatch(`s${i}`, text)), swatch("beyond", "out of tolerance")));
}

/** How bad a point is: 0 for no error, 1 to 4 for decades below the relative tolerance, 5 for what is out of it. */
function heatOf(point) {
  if (!point.passed) return 5;
  if (point.rel === 0 || typeof point.rel !== "number") return 0;
  return Math.min(4, Math.max(1, Math.ceil(4 + Math.log10(point.rel / point.row.tolerance.rtol))));
}

function firstWords(row) {
  const first = POINTS.find((point) => point.row === row && point.first);
  const measured = `${count(row.measured, "layer")} measured`;
  const left = row.skipped.length ? `; ${count(row.skipped.length, "layer")} could not be, see the notes${row.how ? `. To get them: ${row.how}` : ""}` : "";
  if (!first) return `${measured}, all within tolerance${left}.`;
  return `${measured}, the first out of tolerance is ${first.name} (${first.op}): ${first.reason}${left}.`;
}

const POINT_COLUMNS = [
  { name: "#", title: "place of the node in the graph", number: true, value: (p) => p.place, show: (p) => String(p.place + 1) },
  { name: "tolerance", value: (p) => (p.passed ? "within" : "out"), show: (p) => badge(p.passed ? "within" : "out") },
  { name: "layer", value: (p) => p.name, show: (p) => short(p.name, 40), full: (p) => p.name },
  { name: "op", value: (p) => p.op, show: (p) => short(p.op, 28), full: (p) => p.op },
  { name: "candidate", value: (p) => p.row.label },
  { name: "rel. error", number: true, value: (p) => (p.odd ? Infinity : weight(p.rel)), show: errorOf },
  { name: "largest difference", number: true, value: (p) => weight(p.abs), show: (p) => figure(p.abs) },
  { name: "cosine", number: true, value: (p) => weight(p.cosine), show: (p) => figure(p.cosine, 6) },
  { name: "tensor", value: (p) => p.tensor, show: (p) => short(p.tensor, 28), full: (p) => p.tensor },
];

class Plot {
  constructor(body) {
    this.width = Math.max(640, body.clientWidth);
    this.scale();
    this.dots = new Map();
    const shown = ROWS.filter((row) => row.measured);
    this.chosen = make("p", { class: "hint", role: "status", text: "Point at a layer to see its error; choose one to find it in the table." });
    const svg = draw("svg", { width: this.width, height: HIGH, viewBox: `0 0 ${this.width} ${HIGH}`, role: "img",
      "aria-label": "Relative error of each layer, on a log scale; the table of layers has the same figures",
      onclick: (event) => event.target.dataset.at && this.pick(POINTS[Number(event.target.dataset.at)]) },
    this.grid(), this.limits(shown), shown.map((row) => this.series(row)), this.marks());
    body.append(this.legend(shown), scrolling("Drift", { class: "lanes plot" }, svg), this.chosen,
      make("p", { class: "hint", text: "Relative error: the largest difference over the largest magnitude of the reference's tensor; of integers the share " +
        "that differs. The dashed line is the relative part of the tolerance; a layer may lie above it and be within the absolute part. Zero has no place on a " +
        "log scale and stands on a line below it; what is NaN, infinite or has no figure stands on one above it." }));
  }

  /** The decades of the scale: from the least error to the largest, the tolerances with them. */
  scale() {
    const values = [...POINTS.filter((p) => laneOf(p) === "scale").map((p) => p.rel), ...ROWS.filter((r) => r.measured).map((r) => r.tolerance.rtol)]
      .filter((value) => value > 0).map((value) => Math.max(LEAST, Math.log10(value)));
    const least = values.reduce((a, b) => Math.min(a, b), values.length ? Infinity : -6);
    const most = values.reduce((a, b) => Math.max(a, b), values.length ? -Infinity : 0);
    this.low = Math.floor(least - 0.05);
    this.high = Math.max(this.low + 1, Math.ceil(most + 0.05));
  }

  x(layer) {
    const last = DATA.layers.name.length - 1;
    return last ? LEFT + (layer / last) * (this.width - LEFT - RIGHT) : (this.width + LEFT - RIGHT) / 2;
  }

  height(value) {
    return LOW_Y - ((Math.max(LEAST, Math.log10(value)) - this.low) / (this.high - this.low)) * (LOW_Y - TOP_Y);
  }

  y(point) {
    return { none: () => NONE_Y, zero: () => ZERO_Y, scale: () => this.height(point.rel) }[laneOf(point)]();
  }

  grid() {
    const parts = [], right = this.width - RIGHT;
    const line = (y, text) => parts.push(draw("line", { class: "tick", x1: LEFT, x2: right, y1: y, y2: y }),
      draw("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end", text }));
    line(NONE_Y, "NaN, ∞");
    const step = Math.max(1, Math.ceil((this.high - this.low) / 8));
    for (let decade = this.low; decade <= this.high; decade += step) line(this.height(10 ** decade), `1e${decade}`);
    line(ZERO_Y, "0");
    const all = DATA.layers.name.length, each = Math.max(1, Math.ceil(all / 10));
    for (let layer = 0; layer < all; layer += each) {
      parts.push(draw("line", { class: "tick", x1: this.x(layer), x2: this.x(layer), y1: ZERO_Y, y2: AXIS_Y }),
        draw("text", { x: this.x(layer), y: AXIS_Y + 14, "text-anchor": "middle", text: DATA.layers.place[layer] + 1 }));
    }
    parts.push(draw("text", { class: "title", x: (LEFT + right) / 2, y: HIGH - 6, "text-anchor": "middle", text: "layer, in the order of execution" }),
      draw("text", { class: "title", x: 8, y: 14, text: "relative error" }));
    return parts;
  }

  limits(shown) {
    const limits = new Map();
    for (const row of shown) limits.set(row.tolerance.rtol, [...(limits.get(row.tolerance.rtol) || []), row.precision]);
    return [...limits].filter(([rtol]) => rtol > 0).flatMap(([rtol, precisions]) => {
      const y = this.height(rtol);
      const name = limits.size > 1 ? ` (${[...new Set(precisions)].join(", ")})` : "";
      return [draw("line", { class: "limit", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }),
        draw("text", { class: "limit", x: this.width - RIGHT, y: y - 5, "text-anchor": "end", text: `tolerance ${rtol}${name}` })];
    });
  }

  series(row) {
    const points = POINTS.filter((point) => point.row === row);
    const way = points.map((p, i) => {
      const joined = i > 0 && points[i - 1].layer === p.layer - 1;
      return `${joined ? "L" : "M"}${this.x(p.layer).toFixed(1)} ${this.y(p).toFixed(1)}`;
    }).join("");
    const size = points.length > 400 ? 1.8 : 3.2;
    const dots = points.map((p) => {
      const kind = `point${p.passed ? "" : " beyond"}${p.first ? " first" : ""}`;
      const dot = draw("circle", { class: kind, "data-at": p.index, r: p.first ? 5.5 : size, cx: this.x(p.layer).toFixed(1), cy: this.y(p).toFixed(1) },
        draw("title", { text: titleOf(p) }));
      this.dots.set(p, dot);
      return dot;
    });
    return draw("g", { class: row.colour, "data-series": row.index }, draw("path", { class: "way", d: way }), dots);
  }

  /** The first layer out of tolerance, for each candidate; those of the same layer share one line. */
  marks() {
    const firsts = new Map();
    for (const point of POINTS) if (point.first && !firsts.has(point.layer)) firsts.set(point.layer, point);
    return [...firsts.values()].flatMap((point, i) => {
      const x = this.x(point.layer), end = x > this.width * 0.6;
      return [draw("line", { class: "mark", x1: x, x2: x, y1: 26, y2: AXIS_Y }),
        draw("text", { class: "mark", x: end ? x - 6 : Math.max(x + 6, 104), y: 14 + 13 * (i % 2), "text-anchor": end ? "end" : "start",
          text: `first out of tolerance: ${short(point.name)} (${short(point.op, 20)})` })];
    });
  }

  legend(shown) {
    const toggle = (row) => (event) => {
      const on = event.currentTarget.getAttribute("aria-pressed") !== "true";
      event.currentTarget.setAttribute("aria-pressed", String(on));
      document.querySelector(`[data-series="${row.index}"]`).style.display = on ? "" : "none";
    };
    return make("div", { class: "row legend" }, shown.map((row) =>
      make("button", { type: "button", class: "quiet", "aria-pressed": "true", title: "Show or hide", onclick: toggle(row) },
        make("span", { class: `swatch ${row.colour}`, "aria-hidden": "true" }), ` ${row.label}`)));
  }

  light(point) {
    for (const dot of document.querySelectorAll(".point.on")) dot.classList.remove("on");
    this.dots.get(point).classList.add("on");
    this.chosen.textContent = titleOf(point).replaceAll("\n", "; ");
  }
}
