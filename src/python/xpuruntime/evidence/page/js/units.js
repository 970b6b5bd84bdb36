// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The table of units.

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
  ...(UNITS.some((u) => u.kernel || u.deviceKernels.length) ? [{ name: "kernel", value: kernelOf, show: (u) => short(kernelOf(u)), full: kernelOf }] : []),
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
  const ran = unit.deviceKernels.filter((one) => one.kind === "kernel").map((one) => DATA.strings[one.short]);
  return unit.kernel || [...new Set(ran)].join(", ") || "unknown";
}

function showUnits() {
  const body = bodyOf("units");
  if (!UNITS.length) {
    body.append(nothing("No unit was observed."));
    return;
  }
  const units = new SortedTable(body, {
    things: UNITS, columns: COLUMNS, facets: FACETS, noun: "unit", link: "unit", hint: "Filter by name, op, kernel…",
    wordsOf: (u) =>
      [u.id, u.op, ...u.sources, ...u.serves, ...u.outputs, u.device, u.provider, u.kernel, u.ran, u.layout, u.status, u.relation],
    pick: (unit, byKey) => {
      choose({ unit });
      if (byKey) enterInspector();
    },
  });
  listeners.push(({ unit }) => units.light(unit));
}
