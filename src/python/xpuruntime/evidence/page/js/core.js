// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The report's data, how elements are made, how numbers are written, and which unit is chosen. All files of this folder
// are parts of one script. Text goes into the page as text alone: there is no markup made of strings anywhere.

const DATA = JSON.parse(document.getElementById("data").textContent);
const STATUSES = { honoured: "✓", substituted: "✕", unsupported: "!", unobservable: "?" };
const KINDS = DATA.kinds.map((one, index) => {
  const measure = one.unit === "us" ? "µs" : one.unit;
  const word = { wall: "wall time", device: "device time", simulated: "simulated", cycles: "cycles" }[one.kind] || one.kind;
  return { ...one, index, measure, word, label: one.unit === one.kind ? word : `${measure}, ${word}`, total: 0, units: [] };
});

const UNITS = readUnits();
const UNIT_OF = new Map(); // source node to the unit that accounts for it
const SERVED = new Map(); // source node to the units that run on its behalf
for (const unit of UNITS) {
  for (const name of unit.sources) UNIT_OF.set(name, unit);
  for (const name of unit.serves) SERVED.set(name, [...(SERVED.get(name) || []), unit]);
}

function readUnits() {
  const raw = DATA.units;
  const text = (place) => (place < 0 ? null : DATA.strings[place]);
  const units = raw.id.map((_, index) => ({
    index,
    id: text(raw.id[index]),
    op: text(raw.op[index]),
    relation: text(raw.relation[index]),
    engine: text(raw.engine[index]),
    device: text(raw.device[index]),
    provider: text(raw.provider[index]),
    kernel: text(raw.kernel[index]),
    kernelSource: text(raw.kernel_source[index]),
    asked: text(raw.precision_requested[index]),
    ran: text(raw.precision_run[index]),
    layout: text(raw.layout[index]),
    reason: text(raw.placement_reason[index]),
    reasonSource: text(raw.placement_source[index]),
    status: text(raw.status[index]),
    sources: raw.source_nodes[index].map(text),
    outputs: raw.outputs[index].map(text),
    serves: raw.serves[index].map(text),
    time: raw.time[index],
    kind: raw.kind[index] < 0 ? null : KINDS[raw.kind[index]],
    runs: raw.runs[index],
  }));
  for (const unit of units) {
    if (!unit.kind) continue;
    unit.kind.total += unit.time;
    unit.kind.units.push(unit);
  }
  for (const unit of units) unit.share = unit.kind && unit.kind.total > 0 ? unit.time / unit.kind.total : 0;
  return units;
}

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. `class`, `text`, `on…` handlers and attributes are in `facts`; children are elements or text. */
function make(tag, facts = {}, ...children) {
  return fill(document.createElement(tag), facts, children);
}

function draw(tag, facts = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), facts, children);
}

function fill(element, facts, children) {
  for (const [key, value] of Object.entries(facts)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") element.textContent = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}

function bodyOf(section) {
  return document.querySelector(`#${section} > .body`);
}

function badge(status) {
  return make("span", { class: `badge ${status}` }, make("i", { "aria-hidden": "true", text: STATUSES[status] || "?" }), status);
}

function nothing(text) {
  return make("p", { class: "none", text });
}

/** A plain table. Columns that begin with ">" hold numbers. Cells are text or elements. */
function table(caption, columns, rows, facts = {}) {
  const right = columns.map((name) => (name.startsWith(">") ? "num" : null));
  const head = columns.map((name, i) => make("th", { scope: "col", class: right[i], text: name.replace(/^>/, "") }));
  const body = rows.map((row) =>
    make("tr", { class: row.mark }, row.cells.map((cell, i) => make("td", { class: right[i] }, cell === null ? "" : cell))),
  );
  return make("div", { class: "scroll" },
    make("table", { "aria-label": caption, ...facts }, make("thead", {}, make("tr", {}, head)), make("tbody", {}, body)));
}

const one = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1, minimumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function amount(value) {
  if (value > 0 && value < 0.01) return "<0.01";
  if (value > 0 && value < 1) return String(Number(value.toPrecision(2)));
  return value >= 1e5 || Number.isInteger(value) && value >= 1000 ? whole.format(value) : one.format(value);
}

function share(value) {
  return value > 0 && value < 0.001 ? "<0.1 %" : `${(value * 100).toFixed(1)} %`;
}

function bytes(value) {
  if (value === null || value === undefined) return "?";
  let left = value;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (left < 1024) return unit === "B" ? `${whole.format(left)} B` : `${one.format(left)} ${unit}`;
    left /= 1024;
  }
  return `${one.format(left)} GiB`;
}

function count(number, word) {
  return `${whole.format(number)} ${number === 1 ? word : `${word}s`}`;
}

function timeOf(unit) {
  return unit.kind ? `${amount(unit.time)} ${unit.kind.measure}` : "no time";
}

/** The end of a long name, which tells more than its beginning. */
function short(name, most = 36) {
  return name.length <= most ? name : `…${name.slice(1 - most)}`;
}

/** What a unit stands for, in a few words. */
function standsFor(unit) {
  if (unit.sources.length) {
    if (unit.sources.length === 1) return unit.sources[0] === unit.id ? "itself" : unit.sources[0];
    return `${unit.sources[0]} + ${unit.sources.length - 1} more`;
  }
  return unit.serves.length ? `a step of ${unit.serves[0]}` : "inserted";
}

/** Give each of the values a class `k0` to `k6`, in order; those beyond share `k7`. */
function palette(values) {
  return new Map(values.map((value, i) => [value, `k${Math.min(i, 7)}`]));
}

// The chosen unit, or source node, or group of them. Whoever shows it listens.
const listeners = [];
let chosen = { unit: null, node: null, group: null };

function choose(what) {
  chosen = { unit: null, node: null, group: null, ...what };
  for (const listener of listeners) listener(chosen);
}
