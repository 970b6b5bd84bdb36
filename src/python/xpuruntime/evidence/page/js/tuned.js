// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// A search: its verdict, the candidates that ran as points, and all candidates with their reasons.

const CANDIDATES = DATA.candidates.map((candidate, index) => ({ ...candidate, index }));
const CODE_AS = { winner: "honoured", control: "within", undecided: "inconclusive", not_tried: "inconclusive", duplicate: "rejected", infeasible: "unsupported" };

function codeBadge(code) {
  const status = CODE_AS[code] || "substituted";
  return make("span", { class: `badge ${status}` }, make("i", { "aria-hidden": "true", text: STATUSES[status] || "?" }), code);
}

function showResult() {
  const top = document.getElementById("top"), good = DATA.exit === 0;
  top.classList.add(good ? "is-good" : "is-bad");
  top.append(
    make("h1", {}, make("span", { class: "mark", "aria-hidden": "true", text: good ? "✓" : "✕" }), sentence(DATA.headline)),
    make("p", { text: sentence(DATA.reason) }),
    make("dl", { class: "facts" }, DATA.known.map(([key, value]) => make("div", {}, make("dt", { text: sentence(key) }), make("dd", {}, value)))));
}

const PLOT = { width: 460, height: 240, left: 64, right: 12, top: 12, bottom: 40 };

/** Beyond this ratio of the largest to the least, a scale is one of logarithms. */
const WIDE_RANGE = 4;

/** A scale from values to a range of pixels, with room at both ends; whether it is one of logarithms. */
function scale(values, from, to) {
  const above = values.filter((value) => value > 0), least = Math.min(...above);
  const log = above.length > 0 && Math.max(...above) / least > WIDE_RANGE;
  const on = (value) => (log ? Math.log10(Math.max(value, least / 10)) : value); // zero is a decade below the least
  const low = Math.min(...values.map(on)), high = Math.max(...values.map(on)), room = (high - low || Math.abs(high) || 1) * 0.08;
  return [(value) => from + (to - from) * (on(value) - low + room) / (high - low + 2 * room), log];
}

/** Candidates as points over two of their figures, with one label at each end of each axis. */
function plot(across, up) {
  const points = CANDIDATES.filter((one) => one.ran && one[across.key] !== null && one[up.key] !== null);
  if (points.length < 2) return nothing(`Fewer than two candidates have a ${up.name}.`);
  const { width, height, left, right, top, bottom } = PLOT;
  const endsOf = ({ interval, [across.key]: figure }) => (interval ? [interval.high, interval.low].map((end) => figure * interval.value / end) : []);
  const xs = points.flatMap((one) => [one[across.key], ...endsOf(one)]), ys = points.map((one) => one[up.key]);
  const [x, logAcross] = scale(xs, left, width - right), [y, logUp] = scale(ys, height - bottom, top);
  const label = (where, anchor, text) => draw("text", { ...where, "text-anchor": anchor, "font-size": 11, fill: "currentColor" }, text);
  const dots = points.map((one) => {
    const shown = `${one.id} ${one.name}: ${across.name} ${one[across.text]}, ${up.name} ${one[up.text]}`;
    const fill = one.front ? "currentColor" : "none", at = y(one[up.key]), ends = endsOf(one).map((end) => x(end).toFixed(1));
    return draw("g", {},
      ends.length ? draw("path", { d: `M${ends[0]} ${at}H${ends[1]}M${ends[0]} ${at - 4}v8M${ends[1]} ${at - 4}v8`, stroke: "currentColor", opacity: 0.6 }) : null,
      draw("circle", { cx: x(one[across.key]), cy: at, r: one.code === "winner" ? 7 : 4.5, fill, stroke: "currentColor", "stroke-width": 1.5 },
        draw("title", {}, shown)));
  });
  const control = points.find((one) => one.code === "control");
  const own = control ? draw("path", { class: "control", d: `M${x(control[across.key])} ${top}V${height - bottom}` },
    draw("title", {}, `the policy given: ${control[across.text]}`)) : null;
  const named = points.filter((one) => one.front).map((one) =>
    label({ x: x(one[across.key]) + 9, y: y(one[up.key]) - 6 }, "start", one.id));
  const ends = (list, key) => [list.reduce((a, b) => (b[key] < a[key] ? b : a)), list.reduce((a, b) => (b[key] > a[key] ? b : a))];
  const [least, most] = ends(points, across.key), [lowest, highest] = ends(points, up.key);
  return make("figure", {},
    draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${up.name} over ${across.name}`, width: "100%" },
      draw("path", { d: `M${left} ${top}V${height - bottom}H${width - right}`, fill: "none", stroke: "currentColor", opacity: 0.4 }),
      label({ x: x(least[across.key]), y: height - bottom + 15 }, "middle", least[across.text]),
      label({ x: x(most[across.key]), y: height - bottom + 15 }, "end", most[across.text]),
      label({ x: left - 4, y: y(lowest[up.key]) + 4 }, "end", lowest[up.text]),
      label({ x: left - 4, y: y(highest[up.key]) + 4 }, "end", highest[up.text]),
      label({ x: (width + left) / 2, y: height - 6 }, "middle", across.name + (logAcross ? ", log scale" : "")), own, ...dots, ...named),
    make("figcaption", { text: `${sentence(up.name)}${logUp ? ", log scale," : ""} over ${across.name}${control ? "; dashed: the policy given" : ""}` }));
}

function showFront() {
  const figure = { key: "figure", text: "figureText", name: DATA.objective };
  const memory = { key: "memory", text: "memoryText", name: "memory" }, error = { key: "error", text: "errorText", name: "max rel error" };
  bodyOf("front").append(make("div", { class: "two" }, plot(figure, memory), plot(figure, error)));
  const gains = CANDIDATES.filter((one) => one.interval).map((one) =>
    ({ name: `${one.id} ${one.name}`, ...one.interval, limit: DATA.least, text: one.gainText, mark: codeBadge(one.code) }));
  bodyOf("gains").append(gains.length ? intervals("Gains", "as good as the other candidate", gains) : nothing("No candidate was raced against another."));
}

const CANDIDATE_COLUMNS = [
  { name: "#", number: true, value: (one) => one.index, show: (one) => one.id },
  { name: "candidate", value: (one) => one.name },
  { name: "figure", number: true, value: (one) => (one.figure === null ? Infinity : one.figure), show: (one) => one.figureText },
  { name: "gain", number: true, value: (one) => one.gain || 0, show: (one) => one.gainText },
  { name: "memory", number: true, value: (one) => one.memory || 0, show: (one) => one.memoryText },
  { name: "max rel error", number: true, value: (one) => one.error || 0, show: (one) => one.errorText },
  { name: "start", number: true, value: (one) => one.start || 0, show: (one) => one.startText },
  { name: "code", value: (one) => one.code, show: (one) => codeBadge(one.code) },
];

function showCandidates() {
  const body = bodyOf("candidates");
  const detail = make("div", { class: "hint", role: "status", text: "Choose a row to see its reason and its keys." });
  const rows = new SortedTable(body, {
    things: CANDIDATES, columns: CANDIDATE_COLUMNS, noun: "candidate", link: "candidate", hint: "Filter by engine, key, code…",
    facets: [["engine", (one) => one.engine], ["code", (one) => one.code]],
    wordsOf: (one) => [one.id, one.name, one.code, one.reason],
    pick: (one) => {
      rows.light(one);
      detail.replaceChildren(make("p", { text: `${one.id}: ${one.code}: ${one.reason}` }));
      if (one.keys.length) detail.append(table("Keys", ["key", "value"], one.keys.map((cells) => ({ cells }))));
    },
  });
  body.append(detail);
}

function showFound() {
  bodyOf("found").append(make("pre", { text: DATA.policy }));
  bodyOf("notes").append(DATA.notes.length ? make("ul", {}, DATA.notes.map((text) => make("li", { text }))) : nothing("There are none."));
}
