// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The timeline: when what ran, a row for each thread and stream; where the report has durations alone, end to end.

const LANE = 30;
const GUTTER = 96;
/** Spans that are narrower than this many pixels, and next to each other, are drawn as one. */
const NARROW = 1;
const NEST = 4;

function showTimeline() {
  const body = bodyOf("timeline"), lead = document.querySelector("#timeline > .lead");
  if (!KINDS.length && !DATA.timeline) {
    lead.remove();
    body.append(nothing("No unit has a time."));
    return;
  }
  if (DATA.timeline) {
    lead.textContent = "The last instrumented run, from its start to its end, as the engine's profiler saw it.";
    body.append(new Timeline(ofOneRun()).element, whereWallTimeGoes());
  } else {
    lead.textContent = "Durations laid end to end, in the order of the report. This engine reports no start times, so neither gaps "
      + "between units nor units that ran at the same time can be seen here.";
    for (const kind of KINDS) body.append(new Timeline(endToEnd(kind)).element);
  }
  const named = [...OP_COLOURS].map(([op, colour]) => legendItem(colour, op));
  const others = new Set(UNITS.filter((u) => u.kind && !OP_COLOURS.has(u.op)).map((u) => u.op));
  if (others.size) named.push(legendItem("k7", count(others.size, "other operator")));
  body.append(make("ul", { class: "legend" }, named));
}

function legendItem(colour, text, more = "") {
  return make("li", {}, make("span", { class: `swatch ${colour}`, "aria-hidden": "true" }), more ? `${text} (${more})` : text);
}

/** Spans of the last instrumented run, with how deep each is inside of others of its lane. */
function ofOneRun() {
  const raw = DATA.timeline, lanes = [...new Set(raw.lane)];
  const open = new Map(lanes.map((lane) => [lane, []]));
  const spans = raw.start.map((start, i) => {
    const holders = open.get(raw.lane[i]);
    while (holders.length && holders[holders.length - 1] <= start) holders.pop();
    const unit = UNITS[raw.unit[i]] || null, name = DATA.strings[raw.name[i]];
    const span = { unit, lane: lanes.indexOf(raw.lane[i]), start, time: raw.us[i], depth: Math.min(2, holders.length),
      words: `${name}${unit && unit.op !== name ? `, ${unit.op}` : ""}, ${measured(raw.us[i], "us")}, from ${measured(start, "us")} on` };
    holders.push(start + raw.us[i]);
    return span;
  });
  const end = spans.reduce((most, span) => Math.max(most, span.start + span.time), raw.run_us); // a device may go on
  return { id: "run", label: `one run of ${measured(raw.run_us, "us")}`, measure: "us", total: end,
    lanes: lanes.map((place) => DATA.strings[place]), spans };
}

/** Durations of one kind, each after the one before. */
function endToEnd(kind) {
  const lanes = [...new Set(kind.units.map((unit) => unit.device))];
  let end = 0;
  const spans = kind.units.map((unit) => {
    end += unit.time;
    return { unit, lane: lanes.indexOf(unit.device), start: end - unit.time, time: unit.time, depth: 0,
      words: `${unit.id}, ${unit.op} on ${unit.device}, ${timeOf(unit)}, ${share(unit.share)}` };
  });
  return { id: kind.index, label: kind.label, measure: kind.measure, total: kind.total, lanes, spans };
}

/** Parts of the run's wall time that add up to it. */
function whereWallTimeGoes() {
  const { run_us: total, start, us, kind } = DATA.timeline;
  const spans = start.map((from, i) => [from, from + us[i], DATA.strings[kind[i]] === "unit"]).sort((a, b) => a[0] - b[0]);
  const covered = (wanted) => {
    let sum = 0, reached = 0, first = null;
    for (const [from, to, host] of spans) {
      if (!wanted(host)) continue;
      first ??= Math.min(total, from);
      sum += Math.max(0, Math.min(total, to) - Math.max(reached, from));
      reached = Math.max(reached, Math.min(total, to));
    }
    return { sum, first: first ?? total, last: reached };
  };
  const host = covered((isHost) => isHost), all = covered(() => true);
  const parts = [
    ["before the first", all.first],
    ["in units, on the host", host.sum],
    ["on a device alone", all.sum - host.sum],
    ["between", Math.max(0, all.last - all.first - all.sum)],
    ["after the last", Math.max(0, total - all.last)],
  ].filter(([name, value]) => value > 0 || name !== "on a device alone");
  const rows = parts.map(([name, value]) => ({ cells: [name, amount(value), share(total ? value / total : 0)] }));
  rows.push({ cells: [make("strong", { text: "the run" }), amount(total), share(1)] });
  return make("div", {}, make("h3", { text: "Where the wall time of this run goes" }),
    table("Where the wall time of this run goes", ["part", ">us", ">share"], rows));
}

class Timeline {
  constructor(facts) {
    Object.assign(this, facts);
    this.zoom = 1;
    this.at = 0;
    this.rows = make("div", { class: "lanes" });
    this.says = make("span", { class: "count", role: "status" });
    const zoom = (by) => () => this.setZoom(this.zoom * by);
    this.element = make("div", {},
      make("div", { class: "row" },
        make("h3", { text: this.label }),
        make("div", { class: "group", role: "group", "aria-label": "Scale of the timeline" },
          make("button", { type: "button", onclick: zoom(0.5), "aria-label": "Narrower", text: "−" }),
          make("button", { type: "button", onclick: zoom(2), "aria-label": "Wider", text: "+" })),
        this.says),
      this.rows);
    this.render();
    listeners.push(({ unit }) => this.light(unit));
    new ResizeObserver(() => this.rows.clientWidth !== this.width && this.render()).observe(this.rows);
  }

  setZoom(zoom) {
    this.zoom = Math.min(64, Math.max(1, zoom));
    this.render();
  }

  render() {
    this.width = this.rows.clientWidth;
    const wide = Math.max(320, this.width || 1100) * this.zoom - GUTTER - 12;
    const scale = this.total > 0 ? wide / this.total : 0;
    const high = this.lanes.length * LANE + 24;
    const svg = draw("svg", {
      width: wide + GUTTER + 12, height: high, tabindex: "0", role: "listbox", "aria-orientation": "horizontal",
      "aria-label": `Timeline of ${count(this.spans.length, "span")}, ${this.label}. Arrow keys go from one to the next.`,
      onkeydown: (event) => this.key(event),
    });
    this.lanes.forEach((lane, i) => svg.append(
      draw("text", { x: 0, y: i * LANE + 17, text: lane.length > 14 ? `${lane.slice(0, 13)}…` : lane }, draw("title", { text: lane })),
      draw("rect", { class: "base", x: GUTTER, y: i * LANE + 3, width: wide, height: LANE - 8, rx: 3 })));
    for (const value of ticks(this.total, Math.max(4, Math.round(wide / 160)))) {
      const x = GUTTER + value * scale;
      svg.append(draw("line", { class: "tick", x1: x, x2: x, y1: 0, y2: high - 20 }),
        draw("text", { x, y: high - 6, "text-anchor": "middle", text: measured(value, this.measure) }));
    }
    this.rects = new Array(this.spans.length).fill(null);
    for (const group of this.merged(scale)) svg.append(this.rect(group, scale));
    this.rows.replaceChildren(svg);
    this.svg = svg;
    this.light(chosen.unit);
  }

  /** Spans, those of a lane that are too narrow to be told apart together. */
  merged(scale) {
    const groups = [], last = new Map();
    this.spans.forEach((span, i) => {
      const narrow = span.time * scale < NARROW, key = `${span.lane} ${span.depth}`, before = last.get(key);
      if (narrow && before && before.narrow && (span.start - before.end) * scale < NARROW && (span.start - before.start) * scale < 4) {
        before.of.push(i);
        before.end = Math.max(before.end, span.start + span.time);
        return;
      }
      const group = { of: [i], start: span.start, end: span.start + span.time, narrow };
      last.set(key, group);
      groups.push(group);
    });
    return groups;
  }

  rect({ of, start, end }, scale) {
    const span = this.spans[of[0]], few = of.length === 1;
    const words = few ? span.words : `${count(of.length, "span")}, ${measured(of.reduce((sum, i) => sum + this.spans[i].time, 0), this.measure)}`;
    const rect = draw("rect", {
      class: `unit ${colourOfOp(span.unit ? span.unit.op : "")}${(end - start) * scale < 4 ? " thin" : ""}`,
      id: `t${this.id}-${of[0]}`, role: "option", "aria-label": words,
      x: GUTTER + start * scale, width: Math.max(0.4, (end - start) * scale),
      y: span.lane * LANE + 3 + span.depth * NEST, height: LANE - 8 - span.depth * NEST,
      onclick: () => { this.at = of[0]; if (span.unit) choose({ unit: span.unit }); },
    }, draw("title", { text: words }));
    for (const i of of) this.rects[i] = rect;
    return rect;
  }

  light(unit) {
    for (const rect of this.lit || []) rect.classList.remove("on");
    const own = unit ? [...this.spans.keys()].filter((i) => this.spans[i].unit === unit) : [];
    this.lit = own.map((i) => this.rects[i]);
    if (own.length && !own.includes(this.at)) [this.at] = own;
    this.says.textContent = own.length ? this.spans[this.at].words : "";
    if (!own.length) return;
    for (const rect of this.lit) rect.classList.add("on");
    this.svg.append(...this.lit);
    this.svg.setAttribute("aria-activedescendant", this.rects[this.at].id);
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    let next = this.lit && this.lit.length ? this.at + step : this.at;
    while (this.spans[next] && !this.spans[next].unit) next += step;
    if (!this.spans[next]) return;
    this.at = next;
    choose({ unit: this.spans[next].unit });
    const x = Number(this.rects[next].getAttribute("x"));
    const { scrollLeft, clientWidth } = this.rows;
    if (x < scrollLeft + GUTTER || x > scrollLeft + clientWidth - 40) this.rows.scrollLeft = x - clientWidth / 2;
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
