// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The timeline: durations end to end, a row for each device, apart for each kind of time.

const LANE = 30;
const GUTTER = 96;

function showTimeline() {
  const body = bodyOf("timeline");
  if (!KINDS.length) {
    body.append(nothing("No unit has a time."));
    return;
  }
  for (const kind of KINDS) body.append(new Timeline(kind).element);
  const named = [...OP_COLOURS].map(([op, colour]) => legendItem(colour, op));
  const others = new Set(UNITS.filter((u) => u.kind && !OP_COLOURS.has(u.op)).map((u) => u.op));
  if (others.size) named.push(legendItem("k7", count(others.size, "other operator")));
  body.append(make("ul", { class: "legend" }, named));
}

function legendItem(colour, text, more = "") {
  return make("li", {}, make("span", { class: `swatch ${colour}`, "aria-hidden": "true" }), more ? `${text} (${more})` : text);
}

class Timeline {
  constructor(kind) {
    this.kind = kind;
    this.zoom = 1;
    this.at = 0;
    this.devices = [...new Set(kind.units.map((unit) => unit.device))];
    let start = 0;
    this.starts = kind.units.map((unit) => {
      start += unit.time;
      return start - unit.time;
    });
    this.lanes = make("div", { class: "lanes" });
    this.says = make("span", { class: "count", role: "status" });
    const zoom = (by) => () => this.setZoom(this.zoom * by);
    this.element = make("div", {},
      make("div", { class: "row" },
        make("h3", { text: kind.label }),
        make("div", { class: "group", role: "group", "aria-label": "Scale of the timeline" },
          make("button", { type: "button", onclick: zoom(0.5), "aria-label": "Narrower", text: "−" }),
          make("button", { type: "button", onclick: zoom(2), "aria-label": "Wider", text: "+" })),
        this.says),
      this.lanes);
    this.render();
    listeners.push(({ unit }) => this.light(unit));
    new ResizeObserver(() => this.lanes.clientWidth !== this.width && this.render()).observe(this.lanes);
  }

  setZoom(zoom) {
    this.zoom = Math.min(64, Math.max(1, zoom));
    this.render();
  }

  render() {
    this.width = this.lanes.clientWidth;
    const wide = Math.max(320, this.width || 1100) * this.zoom - GUTTER - 12;
    const { units, total } = this.kind;
    const scale = total > 0 ? wide / total : 0;
    const high = this.devices.length * LANE + 24;
    const svg = draw("svg", {
      width: wide + GUTTER + 12, height: high, tabindex: "0", role: "listbox", "aria-orientation": "horizontal",
      "aria-label": `Timeline of ${count(units.length, "unit")}, ${this.kind.label}. Arrow keys go from unit to unit.`,
      onkeydown: (event) => this.key(event),
    });
    this.devices.forEach((device, lane) => svg.append(
      draw("text", { x: 0, y: lane * LANE + 17, text: device.length > 14 ? `${device.slice(0, 13)}…` : device },
        draw("title", { text: device })),
      draw("rect", { class: "base", x: GUTTER, y: lane * LANE + 3, width: wide, height: LANE - 8, rx: 3 })));
    for (const value of ticks(total, Math.max(4, Math.round(wide / 160)))) {
      const x = GUTTER + value * scale;
      svg.append(draw("line", { class: "tick", x1: x, x2: x, y1: 0, y2: high - 20 }),
        draw("text", { x, y: high - 6, "text-anchor": "middle", text: `${amount(value)} ${this.kind.measure}` }));
    }
    this.rects = units.map((unit, i) => draw("rect", {
      class: `unit ${colourOfOp(unit.op)}${unit.time * scale < 4 ? " thin" : ""}`,
      id: `t${this.kind.index}-${i}`, role: "option", "aria-label": this.words(unit),
      x: GUTTER + this.starts[i] * scale, width: Math.max(0.4, unit.time * scale),
      y: this.devices.indexOf(unit.device) * LANE + 3, height: LANE - 8,
      onclick: () => { this.at = i; choose({ unit }); },
    }, draw("title", { text: this.words(unit) })));
    svg.append(...this.rects);
    this.lanes.replaceChildren(svg);
    this.svg = svg;
    this.light(chosen.unit);
  }

  words(unit) {
    return `${unit.id}, ${unit.op} on ${unit.device}, ${timeOf(unit)}, ${share(unit.share)}`;
  }

  light(unit) {
    if (this.lit) this.lit.classList.remove("on");
    const at = unit ? this.kind.units.indexOf(unit) : -1;
    this.lit = at < 0 ? null : this.rects[at];
    this.says.textContent = at < 0 ? "" : this.words(unit);
    if (at < 0) return;
    this.at = at;
    this.lit.classList.add("on");
    this.svg.append(this.lit);
    this.svg.setAttribute("aria-activedescendant", this.lit.id);
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const { units } = this.kind;
    if (step === undefined || !units.length) return;
    event.preventDefault();
    const from = this.lit ? this.at + step : this.at;
    choose({ unit: units[Math.min(units.length - 1, Math.max(0, from))] });
    const x = Number(this.lit.getAttribute("x"));
    const { scrollLeft, clientWidth } = this.lanes;
    if (x < scrollLeft + GUTTER || x > scrollLeft + clientWidth - 40) this.lanes.scrollLeft = x - clientWidth / 2;
  }
}

/** Round numbers from 0 up to the last one below `total`, about `wanted` of them. */
function ticks(total, wanted) {
  if (!(total > 0)) return [0];
  const rough = total / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  return Array.from({ length: Math.floor(total / step) + 1 }, (_, i) => i * step);
}
