// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The page's data, how elements are made, and how numbers are written. All files of this folder are parts of one script;
// each page takes those that it needs. Text goes into a page as text alone: there is no markup made of strings anywhere.

const DATA = JSON.parse(document.getElementById("data").textContent);
const STATUSES = { honoured: "✓", substituted: "✕", unsupported: "!", unobservable: "?", inconclusive: "?", fallback: "→", agrees: "✓", within: "✓", differs: "✕", failed: "!", out: "✕", rejected: "–" };

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. `class`, `text`, `on…` handlers and attributes are in `facts`; children are elements or text. */
function make(tag, facts = {}, ...children) {
  return fill(document.createElement(tag), facts, children);
}

function draw(tag, facts = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), facts, children);
}

/** Elements whose text is wrapped at the separators of names and paths, and inside of no word. */
const WRAPPED = new Set(["td", "dd", "small"]);
/** Words up to this length are never broken. */
const WORD = 28;

/** Text as nodes that may be wrapped behind the separators of names and paths. */
function wrappable(text) {
  const found = [];
  for (const word of String(text).split(/(\s+)/)) {
    if (word.length < 10) { found.push(word); continue; }
    for (const part of word.split(/(?<=[/\\_:@,.=-])(?=[^\d])/)) {
      if (found.length) found.push(document.createElement("wbr"));
      if (part.length <= WORD) found.push(part);
      else found.push(Object.assign(document.createElement("span"), { className: "long", textContent: part }));
    }
  }
  return found;
}

function fill(element, facts, children) {
  const wraps = WRAPPED.has(element.localName);
  for (const [key, value] of Object.entries(facts)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text" && wraps) element.append(...wrappable(value));
    else if (key === "text") element.textContent = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined) continue;
    if (wraps && typeof child === "string") element.append(...wrappable(child));
    else element.append(child);
  }
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

/** Lets the keyboard scroll what is wider than its place. */
const scrollers = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});

function scrolling(label, facts, ...children) {
  const element = make("div", { role: "group", "aria-label": `${label}, scrolls`, ...facts }, children);
  scrollers.observe(element);
  return element;
}

/** A plain table. Columns that begin with ">" hold numbers. Cells are text or elements. */
function table(caption, columns, rows, facts = {}) {
  const right = columns.map((name) => (name.startsWith(">") ? "num" : null));
  const head = columns.map((name, i) => make("th", { scope: "col", class: right[i], text: name.replace(/^>/, "") }));
  const body = rows.map((row) =>
    make("tr", { class: row.mark }, row.cells.map((cell, i) => make("td", { class: right[i] }, cell === null ? "" : cell))),
  );
  return scrolling(caption, { class: "scroll" },
    make("table", { "aria-label": caption, ...facts }, make("thead", {}, make("tr", {}, head)), make("tbody", {}, body)));
}

const one = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1, minimumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function amount(value) {
  if (value > 0 && value < 0.01) return "<0.01";
  if (value > 0 && value < 1) return String(Number(value.toPrecision(2)));
  return value >= 1e5 || Number.isInteger(value) && value >= 1000 ? whole.format(value) : one.format(value);
}

/** A time or count with its unit, microseconds in the unit that is easy to read. */
function measured(value, unit) {
  if (unit !== "us" || value < 1000) return `${amount(value)} ${unit}`;
  const [scaled, word] = value < 1e6 ? [value / 1e3, "ms"] : [value / 1e6, "s"];
  return `${scaled < 1000 ? Number(scaled.toPrecision(3)) : whole.format(scaled)} ${word}`;
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

/** The end of a long name, which tells more than its beginning. */
function short(name, most = 36) {
  return name.length <= most ? name : `…${name.slice(1 - most)}`;
}

/** Give each of the values a class `k0` to `k6`, in order; those beyond share `k7`. */
function palette(values) {
  return new Map(values.map((value, i) => [value, `k${Math.min(i, 7)}`]));
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Findings that a headline tells; the others are in a section. */
const MOST_TOLD = 4;

/** Return what is wrong as a list below the headline, with what to do; nothing where nothing is. */
function told(findings, section, textOf) {
  if (!findings.length) return [];
  const items = findings.slice(0, MOST_TOLD).map((one) => make("li", {}, make("strong", { text: one.key || one.id }), `: ${textOf(one)}`,
    one.fix ? make("small", { text: `Fix: ${one.fix}` }) : null));
  const left = findings.length - MOST_TOLD;
  if (left > 0) items.push(make("li", {}, make("a", { href: `#${section}`, text: `and ${left} more` })));
  return [make("ul", { class: "off" }, items)];
}
