// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The table of units: sorted by any column, filtered by words and by facts. Rows are made for what is looked at only.

const PAGE = 100;
const COLUMNS = [
  { name: "#", title: "place in the report", number: true, value: (u) => u.index, show: (u) => String(u.index + 1) },
  { name: "status", value: (u) => u.status, show: (u) => badge(u.status) },
  { name: "unit", value: (u) => u.id, show: (u) => short(u.id, 34), full: (u) => u.id },
  { name: "op", value: (u) => u.op },
  { name: "stands for", value: standsFor, show: (u) => short(standsFor(u), 28), full: standsFor },
  { name: "relation", value: (u) => u.relation },
  { name: "device", value: (u) => u.device },
  { name: "asked", value: (u) => u.asked || "-" },
  { name: "ran in", value: (u) => u.ran || "?" },
  ...(UNITS.some((u) => u.kernel) ? [{ name: "kernel", value: kernelOf, show: (u) => short(kernelOf(u)), full: kernelOf }] : []),
  { name: "time", number: true, value: (u) => (u.kind ? u.time : -1), show: (u) => (u.kind ? timeOf(u) : "-") },
  { name: "share", number: true, value: (u) => (u.kind ? u.share : -1), show: (u) => (u.kind ? share(u.share) : "-") },
];
const FACETS = [
  ["status", (u) => u.status],
  ["device", (u) => u.device],
  ["ran in", (u) => u.ran || "?"],
  ["op", (u) => u.op],
  ["relation", (u) => u.relation],
];

function kernelOf(unit) {
  return unit.kernel || "unknown";
}

function showUnits() {
  const body = bodyOf("units");
  if (!UNITS.length) {
    body.append(nothing("No unit was observed."));
    return;
  }
  new UnitTable(body);
}

class UnitTable {
  constructor(body) {
    this.words = UNITS.map((u) =>
      [u.id, u.op, ...u.sources, ...u.serves, ...u.outputs, u.device, u.provider, u.kernel, u.ran, u.layout, u.status, u.relation]
        .filter(Boolean).join(" ").toLowerCase());
    this.sorted = { column: 0, down: false };
    this.limit = PAGE;
    this.text = "";
    this.picked = new Map();
    this.count = make("span", { class: "count", role: "status" });
    this.search = make("input", { type: "search", "aria-label": "Filter units by text", placeholder: "Filter by name, op, kernel…",
      oninput: (event) => { this.text = event.target.value.toLowerCase().trim(); this.refresh(); } });
    this.selects = FACETS.map(([name, value]) => this.facet(name, value));
    this.heads = COLUMNS.map((column, i) =>
      make("th", { scope: "col", class: column.number ? "num" : null, "aria-sort": "none" },
        make("button", { type: "button", title: column.title, onclick: () => this.sortBy(i), text: column.name })));
    this.rows = make("tbody", { onclick: (event) => this.click(event) });
    this.more = make("div", { class: "row" });
    body.append(
      make("div", { class: "row" }, this.search, this.selects,
        make("button", { type: "button", onclick: () => this.clear(), text: "Clear" }), this.count),
      make("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Units, scrolls" },
        make("table", { class: "units", "aria-label": "Units" }, make("thead", {}, make("tr", {}, this.heads)), this.rows)),
      this.more);
    listeners.push(({ unit }) => this.light(unit));
    this.refresh();
  }

  facet(name, value) {
    const counts = new Map();
    for (const unit of UNITS) counts.set(value(unit), (counts.get(value(unit)) || 0) + 1);
    const options = [...counts].sort((a, b) => b[1] - a[1])
      .map(([key, units]) => make("option", { value: `=${key}`, text: `${key} (${units})` }));
    const select = make("select", { "data-facet": name, onchange: (event) => {
      if (event.target.value) this.picked.set(name, event.target.value.slice(1));
      else this.picked.delete(name);
      this.refresh();
    } }, make("option", { value: "", text: "any" }), options);
    return make("label", {}, name, select);
  }

  clear() {
    this.text = this.search.value = "";
    this.picked.clear();
    for (const label of this.selects) label.querySelector("select").value = "";
    this.refresh();
  }

  sortBy(column) {
    const first = Boolean(COLUMNS[column].number) && column > 0; // what is most, first
    this.sorted = { column, down: this.sorted.column === column ? !this.sorted.down : first };
    this.refresh();
  }

  refresh() {
    const wanted = this.text.split(/\s+/).filter(Boolean);
    const tests = FACETS.filter(([name]) => this.picked.has(name)).map(([name, value]) => (u) => value(u) === this.picked.get(name));
    const { column, down } = this.sorted;
    const value = COLUMNS[column].value;
    this.found = UNITS.filter((u) => wanted.every((word) => this.words[u.index].includes(word)) && tests.every((test) => test(u)))
      .map((unit) => [value(unit), unit])
      .sort(([a, first], [b, second]) => {
        const order = a < b ? -1 : a > b ? 1 : 0;
        return (down ? -order : order) || first.index - second.index;
      })
      .map(([, unit]) => unit);
    this.heads.forEach((head, i) => head.setAttribute("aria-sort", i !== column ? "none" : down ? "descending" : "ascending"));
    const all = count(UNITS.length, "unit");
    this.count.textContent = this.found.length === UNITS.length ? all : `${whole.format(this.found.length)} of ${all}`;
    this.limit = PAGE;
    this.render();
  }

  render() {
    const shown = this.found.slice(0, this.limit);
    this.rows.replaceChildren(...shown.map((unit) => this.row(unit)));
    const left = this.found.length - shown.length;
    const show = (by) => () => { this.limit += by; this.render(); };
    this.more.replaceChildren(...(left > 0 ? [
      make("span", { class: "count", text: `${whole.format(shown.length)} shown` }),
      make("button", { type: "button", onclick: show(PAGE), text: `Show ${Math.min(PAGE, left)} more` }),
      make("button", { type: "button", onclick: show(left), text: `Show all ${whole.format(this.found.length)}` }),
    ] : []));
    this.more.hidden = left <= 0;
    this.light(chosen.unit);
  }

  row(unit) {
    const cells = COLUMNS.map((column) => {
      const content = column.show ? column.show(unit) : column.value(unit);
      const inner = column.name === "unit" ? make("button", { type: "button", class: "link", text: content }) : content;
      return make("td", { class: column.number ? "num" : null, title: column.full ? column.full(unit) : null }, inner);
    });
    return make("tr", { "data-unit": unit.index }, cells);
  }

  click(event) {
    const row = event.target.closest("tr[data-unit]");
    if (!row) return;
    choose({ unit: UNITS[Number(row.dataset.unit)] });
    if (event.detail === 0) enterInspector(); // by a key
  }

  light(unit) {
    for (const row of this.rows.querySelectorAll("tr.on")) row.classList.remove("on");
    if (unit) this.rows.querySelector(`tr[data-unit="${unit.index}"]`)?.classList.add("on");
  }
}
