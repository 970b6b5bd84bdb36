// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// Where the time goes: bars by operator and by unit, apart for each kind of time.

const TOP = 12;
const OP_COLOURS = palette(opsByTime().slice(0, 7));

/** Operators with most of the time first. Their places are by share, since times of different kinds do not compare. */
function opsByTime() {
  const shares = new Map();
  for (const unit of UNITS) if (unit.kind) shares.set(unit.op, (shares.get(unit.op) || 0) + unit.share);
  return [...shares].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([op]) => op);
}

function colourOfOp(op) {
  return OP_COLOURS.get(op) || "k7";
}

function showTime() {
  const body = bodyOf("time");
  if (!KINDS.length) {
    body.append(nothing("No unit has a time: the engine gives none, or the pass broke off."));
    return;
  }
  for (const kind of KINDS) {
    const runs = kind.runs ? `, of ${count(kind.runs, "instrumented run")}` : "";
    body.append(
      make("h3", { text: `${amount(kind.total)} ${kind.label} in ${count(kind.units.length, "unit")}${runs}` }),
      make("div", { class: "two" },
        make("div", {}, make("h3", { text: "By operator" }), opBars(kind)),
        make("div", {}, make("h3", { text: `By unit, the longest ${Math.min(TOP, kind.units.length)}` }), unitBars(kind))),
    );
  }
  listeners.push(({ unit }) => {
    const wanted = unit === null ? null : String(unit.index);
    for (const button of body.querySelectorAll("[data-unit]")) button.classList.toggle("on", button.dataset.unit === wanted);
  });
}

/** What no unit has of an instrumented run; of wall times alone. */
function outsideOf(kind) {
  return kind.kind === "wall" && KINDS.length === 1 ? DATA.outside : null;
}

function opBars(kind) {
  const groups = new Map();
  for (const unit of kind.units) {
    const group = groups.get(unit.op) || { op: unit.op, units: 0, time: 0 };
    group.units += 1;
    group.time += unit.time;
    groups.set(unit.op, group);
  }
  const all = [...groups.values()].sort((a, b) => b.time - a.time);
  const most = all.length ? all[0].time : 0;
  const shown = all.slice(0, TOP).map(({ op, units, time }) =>
    make("li", {}, barCells([op, ` × ${units}`], time, kind, most, colourOfOp(op), `${op}, ${count(units, "unit")}`)));
  if (all.length > TOP) shown.push(rest(all.slice(TOP), kind, most, "other operator"));
  return make("ul", { class: "bars" }, shown);
}

function unitBars(kind) {
  const all = [...kind.units].sort((a, b) => b.time - a.time || a.index - b.index);
  const most = all.length ? all[0].time : 0;
  const shown = all.slice(0, TOP).map((unit) => {
    const words = [short(unit.id, 25), unit.id.length > 16 ? "" : ` ${unit.op}`];
    const open = (event) => {
      choose({ unit });
      if (event.detail === 0) enterInspector(); // by a key
    };
    return make("li", {}, make("button", { type: "button", "data-unit": unit.index, onclick: open },
      barCells(words, unit.time, kind, most, colourOfOp(unit.op), `${unit.id}, ${unit.op}`)));
  });
  if (all.length > TOP) shown.push(rest(all.slice(TOP), kind, 0, "other unit"));
  const outside = outsideOf(kind);
  if (outside) {
    const cells = barCells(["outside of units", ""], outside.us, kind, 0, "k7", outside.text);
    cells[1] = make("small", { text: outside.text.slice("outside of units".length) }); // a bar would dwarf the others
    cells[3] = make("span", { class: "num dim", text: "" }); // shares are shares of what the units took
    shown.push(make("li", { class: "dim", id: "outside" }, cells));
  }
  return make("ul", { class: "bars" }, shown);
}

function barCells([name, more], time, kind, most, colour, title) {
  const bar = make("span", { class: `fill ${colour}` });
  bar.style.width = `${most ? Math.max(0, (time / most) * 100) : 0}%`;
  return [
    make("span", { class: "name", title }, name, make("small", { text: more })),
    make("span", { class: "track", "aria-hidden": "true" }, bar),
    make("span", { class: "num", text: measured(time, kind.measure) }),
    make("span", { class: "num dim", text: share(kind.total ? time / kind.total : 0) }),
  ];
}

/** What is left over, without a bar where it would dwarf the others. */
function rest(others, kind, most, word) {
  const text = count(others.length, word), time = others.reduce((sum, one) => sum + one.time, 0);
  const cells = barCells([text, ""], time, kind, most, "k7", text);
  if (!most) cells[1] = make("span", {});
  return make("li", { class: "dim" }, cells);
}
