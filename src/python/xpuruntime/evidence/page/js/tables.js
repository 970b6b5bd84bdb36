// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The smaller tables: precision, xpuruntime kernels, boundaries, conversions, surroundings, notes, the command.

function showTables() {
  showPrecision();
  showDeviceKernels();
  showDecisions();
  fillTable("boundaries", ["kind", "where", ">count", ">bytes", ">time"], DATA.boundaries.map((b) =>
    [b.kind, b.where, whole.format(b.count), bytes(b.bytes), timeWords(b.time)]), "No copy, cast or layout change was reported.");
  fillTable("conversions", ["what", "reason", ">count"], DATA.conversions.map((c) => [c.what, c.reason, whole.format(c.count)]),
    "None: arrays and model went in as they were.");
  showCudaGraph();
  showMemory();
  showShapes();
  showDeterminism();
  showEnvironment();
  const notes = bodyOf("notes");
  if (DATA.notes.length) notes.append(make("ul", {}, DATA.notes.map((text) => make("li", { text }))));
  else notes.append(nothing("There are none."));
  bodyOf("reproduce").append(make("pre", { text: DATA.command || "The report does not say." }));
}

function fillTable(section, columns, rows, empty) {
  bodyOf(section).append(rows.length ? table(section, columns, rows.map((cells) => ({ cells }))) : nothing(empty));
}

function timeWords(time) {
  if (!time) return "?";
  const word = time.unit === time.kind ? "" : `, ${time.kind}`;
  return `${amount(time.value)} ${time.unit}${word}`;
}

/** A row for each device, precision that ran and precision that was asked; times apart for each kind. */
function showPrecision() {
  const groups = new Map();
  for (const unit of UNITS) {
    if (unit.relation === "folded") continue;
    const key = JSON.stringify([unit.device, unit.ran || "?", unit.asked || "-", unit.kind ? unit.kind.index : -1]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(unit);
  }
  const rows = [...groups.keys()].sort().map((key) => {
    const [device, ran, asked, kind] = JSON.parse(key);
    const units = groups.get(key);
    const time = units.reduce((sum, u) => sum + (u.time || 0), 0);
    const statuses = new Map();
    for (const unit of units) statuses.set(unit.status, (statuses.get(unit.status) || 0) + 1);
    return { mark: statuses.has("substituted") ? "off" : null, cells: [
      device, ran, asked === "-" ? "nothing (not of the model)" : asked, whole.format(units.length),
      kind < 0 ? "-" : measured(time, KINDS[kind].measure),
      kind < 0 ? "-" : share(KINDS[kind].total ? time / KINDS[kind].total : 0),
      make("span", {}, [...statuses].sort().reverse().flatMap(([status, number]) => [badge(status), ` ${whole.format(number)} `])),
    ] };
  });
  const columns = ["device", "ran in", "asked", ">units", ">time", ">share of its kind", "status"];
  bodyOf("precision").append(rows.length ? table("Precision", columns, rows, { class: "policy" }) : nothing("No unit was observed."));
}

function showDeviceKernels() {
  const rows = DATA.device_kernels.all.map((one) => ({ cells: [
    make("span", { class: "mono", title: DATA.strings[one.name], text: DATA.strings[one.short] }), one.kind, one.math,
    whole.format(Math.round(one.times)), measured(one.us, "us"), share(one.share), whole.format(one.units.length),
  ] }));
  const columns = ["kernel", "kind", "multiplies on", ">in a run", ">time", ">share", ">units"];
  bodyOf("device-kernels").append(rows.length ? table("Kernels on the device", columns, rows, { class: "policy" })
    : nothing("No device was watched."));
}

/** A row for each kind of call; what became of the other kernels opens below it. */
function showDecisions() {
  const body = bodyOf("decisions");
  if (!DATA.decisions.length) {
    body.append(nothing("None: no xpuruntime kernel was asked for."));
    return;
  }
  const where = (d) => make("span", { title: d.nodes.join("\n"),
    text: (d.nodes[0] || d.module || "-") + (d.nodes.length > 1 ? ` + ${d.nodes.length - 1} more` : "") });
  body.append(table("xpuruntime kernels", ["call", "node", "asked", "ran", "why", ">calls"], DATA.decisions.map((d) =>
    ({ mark: d.replaced ? "off" : null, cells: [
      d.call, where(d), d.asked.join(", "), d.ran || "the engine's own", d.why, d.count === null ? "-" : whole.format(d.count),
    ] })), { class: "policy" }));
  for (const d of DATA.decisions) {
    const rows = d.others.map((o) =>
      ({ cells: [o.kernel, o.can ? "yes" : "no", o.reason || "ran", o.us === null ? "-" : amount(o.us)] }));
    body.append(make("details", {}, make("summary", { text: `What was considered for ${d.call}, ${d.nodes[0] || d.module || "no node"}` }),
      table("Kernels considered", ["kernel", "accepted", "what became of it", ">us"], rows),
      d.notes.length ? make("ul", {}, d.notes.map((text) => make("li", { text }))) : null));
  }
}

function showEnvironment() {
  const body = bodyOf("environment");
  const { packages, variables, ...rest } = DATA.environment;
  const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const rows = (things) => Object.entries(things || {}).map(([name, value]) => ({ cells: [name, plain(value)] }));
  const open = (title, content) => body.append(make("details", {}, make("summary", { text: title }), content));
  if (Object.keys(rest).length) body.append(table("Platform", ["what", "value"], rows(rest)));
  else body.append(nothing("The report does not say."));
  const installed = rows(packages);
  if (installed.length) open(`Packages (${installed.length})`, table("Packages", ["package", "version"], installed));
  const set = rows(variables);
  if (set.length) {
    open(`Environment variables that engines read (${set.length})`, table("Environment variables", ["variable", "value"], set));
  }
  if (DATA.libraries.length) {
    open(`Libraries loaded (${DATA.libraries.length})`, table("Libraries", ["library", "version", "origin", "path"],
      DATA.libraries.map((l) => ({ cells: [l.name, l.version || "?", l.origin || "?", l.path || "?"] }))));
  }
  const model = DATA.model;
  const facts = [["path", model.path], ["sha256", model.sha256], ["request hash", DATA.plan.request_hash], ["execution hash", DATA.plan.execution_hash], ["report", DATA.schema]];
  const known = facts.filter(([, value]) => value).map((cells) => ({ cells }));
  open("Fingerprints", table("Fingerprints", ["what", "value"], known));
}
