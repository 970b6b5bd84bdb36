// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// A table that is sorted by any column, filtered by words and by facts. Rows are made for what is looked at only.

const PAGE = 100;

class SortedTable {
  /**
   * `things` have their place as `index`. `noun` is what one is called, `link` the column that opens it, `wordsOf` what
   * text finds it, `pick` what is done with one that is chosen.
   */
  constructor(body, { things, columns, facets, noun, link, hint, wordsOf, pick }) {
    Object.assign(this, { things, columns, facets, noun, link, pick });
    this.words = things.map((one) => wordsOf(one).filter(Boolean).join(" ").toLowerCase());
    this.chosen = null;
    this.sorted = { column: 0, down: false };
    this.limit = PAGE;
    this.text = "";
    this.picked = new Map();
    this.count = make("span", { class: "count", role: "status" });
    this.search = make("input", { type: "search", "aria-label": `Filter ${noun}s by text`, placeholder: hint,
      oninput: (event) => { this.text = event.target.value.toLowerCase().trim(); this.refresh(); } });
    this.selects = facets.map(([name, value]) => this.facet(name, value));
    this.heads = columns.map((column, i) =>
      make("th", { scope: "col", class: column.number ? "num" : null, "aria-sort": "none" },
        make("button", { type: "button", title: column.title, onclick: () => this.sortBy(i), text: column.name })));
    this.rows = make("tbody", { onclick: (event) => this.click(event) });
    this.more = make("div", { class: "row" });
    body.append(
      make("div", { class: "row" }, this.search, this.selects,
        make("button", { type: "button", onclick: () => this.clear(), text: "Clear" }), this.count),
      make("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": `${sentence(noun)}s, scrolls` },
        make("table", { class: "units", "aria-label": `${sentence(noun)}s` }, make("thead", {}, make("tr", {}, this.heads)), this.rows)),
      this.more);
    this.refresh();
  }

  facet(name, value) {
    const counts = new Map();
    for (const one of this.things) counts.set(value(one), (counts.get(value(one)) || 0) + 1);
    const options = [...counts].sort((a, b) => b[1] - a[1])
      .map(([key, number]) => make("option", { value: `=${key}`, text: `${key} (${number})` }));
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
    const first = Boolean(this.columns[column].number) && column > 0; // what is most, first
    this.sorted = { column, down: this.sorted.column === column ? !this.sorted.down : first };
    this.refresh();
  }

  refresh() {
    const wanted = this.text.split(/\s+/).filter(Boolean);
    const tests = this.facets.filter(([name]) => this.picked.has(name)).map(([name, value]) => (one) => value(one) === this.picked.get(name));
    const { column, down } = this.sorted;
    const value = this.columns[column].value;
    this.found = this.things
      .filter((one) => wanted.every((word) => this.words[one.index].includes(word)) && tests.every((test) => test(one)))
      .map((one) => [value(one), one])
      .sort(([a, first], [b, second]) => {
        const order = a < b ? -1 : a > b ? 1 : 0;
        return (down ? -order : order) || first.index - second.index;
      })
      .map(([, one]) => one);
    this.heads.forEach((head, i) => head.setAttribute("aria-sort", i !== column ? "none" : down ? "descending" : "ascending"));
    const all = count(this.things.length, this.noun);
    this.count.textContent = this.found.length === this.things.length ? all : `${whole.format(this.found.length)} of ${all}`;
    this.limit = PAGE;
    this.render();
  }

  render() {
    const shown = this.found.slice(0, this.limit);
    this.rows.replaceChildren(...shown.map((one) => this.row(one)));
    const left = this.found.length - shown.length;
    const show = (by) => () => { this.limit += by; this.render(); };
    this.more.replaceChildren(...(left > 0 ? [
      make("span", { class: "count", text: `${whole.format(shown.length)} shown` }),
      make("button", { type: "button", onclick: show(PAGE), text: `Show ${Math.min(PAGE, left)} more` }),
      make("button", { type: "button", onclick: show(left), text: `Show all ${whole.format(this.found.length)}` }),
    ] : []));
    this.more.hidden = left <= 0;
    this.light(this.chosen);
  }

  row(one) {
    const cells = this.columns.map((column) => {
      const content = column.show ? column.show(one) : column.value(one);
      const inner = column.name === this.link ? make("button", { type: "button", class: "link", text: content }) : content;
      return make("td", { class: column.number ? "num" : null, title: column.full ? column.full(one) : null }, inner);
    });
    return make("tr", { [`data-${this.noun}`]: one.index }, cells);
  }

  click(event) {
    const row = event.target.closest("tr");
    if (row) this.pick(this.things[Number(row.dataset[this.noun])], event.detail === 0); // 0: by a key
  }

  /** Choose one and bring its row into view, without the filters where they hide it. */
  reveal(one) {
    if (!this.found.includes(one)) this.clear();
    this.limit = Math.max(this.limit, this.found.indexOf(one) + 1);
    this.chosen = one;
    this.render();
    this.rows.querySelector("tr.on").scrollIntoView({ block: "nearest", behavior: "instant" });
  }

  light(one) {
    this.chosen = one;
    for (const row of this.rows.querySelectorAll("tr.on")) row.classList.remove("on");
    if (one) this.rows.querySelector(`tr[data-${this.noun}="${one.index}"]`)?.classList.add("on");
  }
}
