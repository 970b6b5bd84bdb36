// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// Estimates over one axis of ratios: a point each, its interval as a whisker, and its limit as a line.

/**
 * `rows` have a `name`, a `value`, its words as `text`, a badge as `mark`, and may have `low`, `high` and `limit`. Ratios
 * of 0.5 and 2 are equally far from 1, the line of the baseline, so the axis is that of their logarithms.
 */
function intervals(label, baseline, rows) {
  const all = rows.flatMap(({ value, low, high, limit }) => [value, low, high, limit]).filter((one) => one > 0);
  const least = Math.log(Math.min(1, ...all)), most = Math.log(Math.max(1, ...all)), room = (most - least || 0.1) * 0.05;
  const at = (value) => `${(100 * (Math.log(value) - least + room)) / (most - least + 2 * room)}%`;
  const part = (kind, value, end = value) => {
    const span = make("span", { class: kind });
    span.style.left = at(value);
    if (end !== value) span.style.width = `calc(${at(end)} - ${at(value)})`;
    return span;
  };
  return make("div", {},
    make("ul", { class: "intervals", "aria-label": label }, rows.map(({ name, value, low, high, limit, text, mark }) =>
      make("li", {},
        make("span", { class: "name", title: name, text: name }),
        make("span", { class: "track", "aria-hidden": "true" }, part("base", 1), limit ? part("limit", limit) : null,
          low > 0 && high > 0 ? part("whisker", low, high) : null, part("dot", value)),
        make("span", { text }), mark))),
    make("ul", { class: "legend" },
      make("li", {}, make("span", { class: "swatch base", "aria-hidden": "true" }), baseline),
      rows.some((row) => row.limit) ? make("li", {}, make("span", { class: "swatch limit", "aria-hidden": "true" }), "the limit") : null,
      rows.some((row) => row.low) ? make("li", {}, make("span", { class: "swatch whisker", "aria-hidden": "true" }), "its interval") : null));
}
