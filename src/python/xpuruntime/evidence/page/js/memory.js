// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// Memory: what each owner holds at the end, at the checkpoints of the pass, and what is live between units.

const LIVE_HIGH = 150;
const LIVE_LEFT = 72;
const STRIP_HIGH = 26;
const STRIP_STEP = 14;

function showMemory() {
  const body = bodyOf("memory");
  if (DATA.memory.length) {
    const most = Math.max(...DATA.memory.map(([, held]) => held), 1);
    body.append(make("ul", { class: "bars" }, DATA.memory.map(([owner, held]) => {
      const bar = make("span", { class: "fill k2" });
      bar.style.width = `${(held / most) * 100}%`;
      return make("li", {}, make("span", { class: "name", title: owner, text: owner }),
        make("span", { class: "track", "aria-hidden": "true" }, bar), make("span", { class: "num", text: bytes(held) }), make("span", {}));
    })));
  } else body.append(nothing("The engine does not say what it holds."));
  showCheckpoints(body);
  showLive(body);
}

/** A row for each owner, with a bar for each checkpoint. Each row has a scale of its own, since owners overlap and differ much. */
function showCheckpoints(body) {
  const { moments, at_us: at, owners } = DATA.memory_over_time;
  if (!owners.length) return;
  body.append(make("h3", { text: `Over time, at ${count(moments.length, "checkpoint")} of the pass` }));
  const rows = owners.map(([owner, held, most, moment]) => ({ cells: [
    owner, strip(owner, held, moments), bytesOr(held[0]), bytes(most), moment, bytesOr(held[held.length - 1]),
  ] }));
  body.append(table("Memory over time", ["owner", "at each checkpoint", ">before", ">most", "after what", ">at last"], rows, { class: "policy" }));
  body.append(make("p", { class: "hint", text: "Owners overlap and are not added up. Each row is drawn on a scale from 0 to its own most." }));
  const all = moments.map((name, i) => ({ cells: [name, one.format(at[i] / 1000), ...owners.map(([, held]) => bytesOr(held[i]))] }));
  body.append(make("details", {}, make("summary", { text: `All checkpoints (${moments.length})` }),
    table("Checkpoints", ["checkpoint", ">ms", ...owners.map(([owner]) => `>${owner}`)], all)));
}

function bytesOr(value) {
  return value === null ? "-" : bytes(value);
}

function strip(owner, held, moments) {
  const most = Math.max(...held, 1);
  const words = moments.map((name, i) => `${name}: ${bytesOr(held[i])}`);
  const svg = draw("svg", { class: "strip k0", width: held.length * STRIP_STEP, height: STRIP_HIGH, role: "img", "aria-label": `${owner}: ${words.join(", ")}` });
  held.forEach((value, i) => {
    if (value === null) return;
    const high = Math.max(1, (value / most) * (STRIP_HIGH - 2));
    svg.append(draw("rect", { x: i * STRIP_STEP + 1, width: STRIP_STEP - 3, y: STRIP_HIGH - high, height: high }, draw("title", { text: words[i] })));
  });
  return svg;
}

/** What the tensors that units make occupy around each unit: a bar for each, in the order of execution. */
function showLive(body) {
  const { unit: places, during, after } = DATA.live;
  if (!places.length && !UNITS.length) return;
  body.append(make("h3", { text: "Tensors between units" }));
  if (!places.length) {
    body.append(nothing("The engine does not report their sizes."));
    return;
  }
  const peak = during.indexOf(Math.max(...during));
  const words = (i) => `${nameOf(places[i])}: ${bytes(during[i])} while it runs, ${bytes(after[i])} after it`;
  const says = make("p", { class: "hint", role: "status" });
  says.textContent = `At most ${bytes(during[peak])}, around ${nameOf(places[peak])}, unit ${peak + 1} of ${places.length}. Weights and the model's inputs are not counted.`;
  const wide = Math.max(320, body.clientWidth || 1100) - LIVE_LEFT - 12, step = wide / places.length, most = Math.max(during[peak], 1);
  const svg = draw("svg", { width: wide + LIVE_LEFT + 12, height: LIVE_HIGH, role: "img",
    "aria-label": `Bytes of tensors around each of ${count(places.length, "unit")}; the table below has the same figures` });
  for (const part of [0, 0.5, 1]) {
    const y = LIVE_HIGH - 20 - part * (LIVE_HIGH - 34);
    svg.append(draw("line", { class: "tick", x1: LIVE_LEFT, x2: LIVE_LEFT + wide, y1: y, y2: y }),
      draw("text", { x: LIVE_LEFT - 8, y: y + 4, "text-anchor": "end", text: bytes(Math.round(most * part)) }));
  }
  svg.append(draw("text", { x: LIVE_LEFT, y: LIVE_HIGH - 4, text: "units, in the order of execution" }));
  const each = Math.ceil(Math.max(1, 1 / step)); // units that share a pixel, of which the one with the most is drawn
  const bars = Array.from({ length: Math.ceil(places.length / each) }, (_, column) => {
    const own = during.slice(column * each, (column + 1) * each), i = column * each + own.indexOf(Math.max(...own)), place = places[i];
    const high = Math.max(1, (during[i] / most) * (LIVE_HIGH - 34));
    return draw("rect", { class: `unit ${i === peak ? "k1" : "k2"}${step < 4 ? " thin" : ""}`, "data-live": i,
      x: LIVE_LEFT + column * each * step, width: step * each, y: LIVE_HIGH - 20 - high, height: high,
      onclick: () => place >= 0 && choose({ unit: UNITS[place] }) }, draw("title", { text: words(i) }));
  });
  svg.append(...bars);
  body.append(scrolling("Live tensors", { class: "lanes live" }, svg), says);
  listeners.push(({ unit }) => bars.forEach((bar, column) =>
    bar.classList.toggle("on", unit !== null && places.slice(column * each, (column + 1) * each).includes(unit.index))));
  const order = places.map((_, i) => i).sort((a, b) => during[b] - during[a] || a - b).slice(0, TOP);
  const button = (i) => make("button", { type: "button", class: "link", onclick: () => { choose({ unit: UNITS[places[i]] }); enterInspector(); }, text: nameOf(places[i]) });
  body.append(make("details", {}, make("summary", { text: `Units around which most is live (${order.length})` }),
    table("Live tensors", ["unit", ">place", ">while it runs", ">after it"], order.map((i) =>
      ({ cells: [places[i] < 0 ? nameOf(places[i]) : button(i), whole.format(i + 1), bytes(during[i]), bytes(after[i])] })))));
}

function nameOf(place) {
  return place < 0 ? "a unit that is not in the report" : UNITS[place].id;
}
