// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The page of a benchmark: each run as a point, and medians against those of the baseline.

const STRIP_LEFT = 190;
const STRIP_HIGH = 58;

function showBenchmark() {
  document.getElementById("top").append(make("h1", {}, sentence(DATA.headline)), make("p", { class: "lead", text: "Medians of the timed runs." }),
    make("dl", { class: "facts" }, DATA.known.map(([key, value]) => make("div", {}, make("dt", { text: sentence(key) }), make("dd", {}, value)))));
}

/** 1, 2 and 5 of each decade between two times; of times that are close to each other, round ones. */
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const factor of [1, 2, 5]) found.push(factor * 10 ** power);
  }
  const inside = found.filter((value) => value >= low && value <= high);
  if (inside.length > 2) return inside.filter((_, i) => i % Math.ceil(inside.length / 10) === 0);
  const rough = (high - low) / 4, decade = 10 ** Math.floor(Math.log10(rough));
  const step = decade * ([1, 2, 5].find((factor) => factor * decade >= rough) || 10);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.max(0, Math.floor(high / step) - first + 1) }, (_, i) => (first + i) * step);
}

function showRuns() {
  const body = bodyOf("runs"), rows = DATA.rows, width = Math.max(640, body.clientWidth);
  const all = rows.flatMap((row) => row.points), low = Math.min(...all), high = Math.max(...all, low * 1.01);
  const x = (value) => STRIP_LEFT + 6 + (Math.log(value / low) / Math.log(high / low)) * (width - STRIP_LEFT - 40);
  const end = rows.length * STRIP_HIGH, parts = [];
  for (const value of logTicks(low, high)) {
    parts.push(draw("line", { class: "tick", x1: x(value), x2: x(value), y1: 0, y2: end }),
      draw("text", { x: x(value), y: end + 14, "text-anchor": "middle", text: measured(value, "us") }));
  }
  rows.forEach((row, i) => {
    const top = i * STRIP_HIGH + 4, each = (STRIP_HIGH - 10) / row.points.length;
    parts.push(draw("text", { x: 0, y: top + 26, text: short(row.name, 27) }, draw("title", { text: row.name })),
      draw("g", { class: `runs k${i % 7}` }, row.points.map((value, run) =>
        draw("circle", { cx: x(value).toFixed(1), cy: (top + (run + 0.5) * each).toFixed(1), r: 1.8 }))),
      draw("line", { class: "median", x1: x(row.median), x2: x(row.median), y1: top - 2, y2: top + STRIP_HIGH - 8 }));
  });
  body.append(scrolling("Runs", { class: "lanes" }, draw("svg", { width, height: end + 20, role: "img",
    "aria-label": `${count(all.length, "run")} by time; the table of figures has their quantiles` }, parts)));
  if (rows.some((row) => row.points.length < row.runs)) {
    body.append(make("p", { class: "hint", text: `Of many runs, every so many-th is drawn: ${whole.format(all.length)} of ${whole.format(rows.reduce((sum, row) => sum + row.runs, 0))}.` }));
  }
}

function showRatios() {
  const rows = DATA.rows.filter((row) => row.ratio).map((row) =>
    ({ name: row.name, ...row.ratio, text: row.ratioText, mark: null }));
  bodyOf("ratios").append(rows.length ? intervals("Ratios", DATA.baseline, rows) : nothing("There is one call alone."));
}

function showFigures() {
  bodyOf("figures").append(table("Figures", ["call", ">median", ">interval", ">p90", ">p99", ">min", ">runs"], DATA.rows.map((row) =>
    ({ cells: [row.name, measured(row.median, "us"), row.interval ? row.interval.map((one) => measured(one, "us")).join(" to ") : "too few runs",
      measured(row.p90, "us"), measured(row.p99, "us"), measured(row.min, "us"), whole.format(row.runs)] })), { class: "policy" }));
  bodyOf("notes").append(DATA.notes.length ? make("ul", {}, DATA.notes.map((text) => make("li", { text }))) : nothing("There are none."));
}

start(showBenchmark, showRuns, showRatios, showFigures);
