// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The card beside the page: everything known of the unit, node or group that is chosen.

const RELATIONS = {
  exact: "one unit for one node",
  fused: "one unit for several nodes",
  inserted: "no node of the model",
  folded: "computed or removed when the model was loaded",
  opaque: "its inside cannot be seen",
};

function showInspector() {
  const card = document.getElementById("inspector");
  let opener = null;
  const close = () => {
    if (card.hidden) return;
    card.hidden = true;
    choose({});
    if (opener && opener.isConnected) opener.focus({ preventScroll: true });
  };
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  listeners.push(({ unit, node, group }) => {
    if (!unit && !node && !group) {
      card.hidden = true;
      return;
    }
    if (card.hidden) opener = document.activeElement;
    card.hidden = false;
    card.scrollTop = 0;
    card.replaceChildren(
      make("button", { type: "button", class: "close", onclick: close, text: "Close" }),
      ...(group ? groupCard(group) : unit ? unitCard(unit, node) : nodeCard(node)));
  });
}

function enterInspector() {
  document.querySelector("#inspector .close").focus();
}

function list(rows) {
  return make("dl", {}, rows.filter(([, value]) => value !== null && value !== undefined && value !== "").flatMap(([name, value]) =>
    [make("dt", { text: name }), make("dd", {}, value)]));
}

function names(title, values) {
  if (!values.length) return [];
  const most = 200;
  const items = values.slice(0, most).map((text) => make("li", { class: "mono", text }));
  if (values.length > most) items.push(make("li", { text: `and ${values.length - most} more` }));
  return [make("h3", { text: title }), make("ul", {}, items)];
}

function unitCard(unit, node) {
  const kernel = unit.kernel ? `${unit.kernel} (${unit.kernelSource})` : "unknown: the engine does not say";
  const relation = RELATIONS[unit.relation] ? `${unit.relation}: ${RELATIONS[unit.relation]}` : unit.relation;
  const reason = unit.reason ? `${unit.reason} (${unit.reasonSource})` : null;
  const time = unit.kind ? `${timeOf(unit)} (${unit.kind.word}, ${share(unit.share)}, median of ${count(unit.runs, "run")})` : "none";
  const inside = UNITS.length > 1 && NODES.some((n) => n.unit === unit);
  return [
    make("h2", { text: unit.id }),
    list([["status", badge(unit.status)], ["node", node && node.name !== unit.id ? node.name : null], ["op", unit.op],
      ["relation", relation], ["engine", unit.engine], ["device", unit.device], ["provider", unit.provider],
      ["asked", unit.asked], ["ran in", unit.ran || "unknown"],
      ["layout", unit.layout], ["kernel", kernel], ["time", time], ["placement", reason]]),
    make("div", { class: "row" },
      inside ? make("button", { type: "button", text: "Show in graph", onclick: () => showInGraph(unit) }) : null,
      groupButton(node)),
    ...onDevice(unit),
    ...names(`Stands for ${count(unit.sources.length, "node")}`, unit.sources),
    ...names("Runs on behalf of", unit.serves),
    ...names("Makes the tensors", unit.outputs),
    ...(node && SERVED.has(node.name) ? names("Units inserted for this node", SERVED.get(node.name).map((u) => `${u.id} (${u.op})`)) : []),
  ];
}

function onDevice(unit) {
  if (!unit.deviceKernels.length) return [];
  const line = (one) => `${DATA.strings[one.short]}: ${one.times} in a run, ${measured(one.us, "us")}${one.math === "-" ? "" : `, ${one.math}`}`;
  return [make("h3", { text: "On the device" }),
    make("ul", {}, unit.deviceKernels.map((one) => make("li", { class: "mono", title: DATA.strings[one.name], text: line(one) })))];
}

function showInGraph(unit) {
  document.getElementById("graph").scrollIntoView();
  graph.reveal(unit);
}

function nodeCard(node) {
  return [
    make("h2", { text: node.name }),
    list([["op", node.op], ["unit", "none was observed to run it"]]),
    make("div", { class: "row" }, groupButton(node)),
  ];
}

function groupCard(group) {
  const units = new Set(group.nodes.map((index) => NODES[index].unit).filter(Boolean));
  const times = KINDS.map((kind) => {
    const time = [...units].reduce((sum, u) => sum + (u.kind === kind ? u.time : 0), 0);
    return time ? `${measured(time, kind.measure)} (${kind.word}, ${share(time / kind.total)})` : null;
  }).filter(Boolean);
  const tally = (value) => {
    const counts = new Map();
    for (const unit of units) counts.set(value(unit), (counts.get(value(unit)) || 0) + 1);
    return [...counts].sort((a, b) => b[1] - a[1]).map(([word, number]) => `${word} (${number})`).join(", ");
  };
  return [
    make("h2", { text: group.path }),
    list([["nodes", whole.format(group.nodes.length)], ["units", whole.format(units.size)], ["time", times.join("; ") || "none"],
      ["placement", tally(placement)], ["ran in", tally((u) => u.ran || "unknown")], ["status", tally((u) => u.status)],
      ["ops", tally((u) => u.op)]]),
    make("div", { class: "row" }, make("button", { type: "button", text: "Open this group", onclick: () => graph.open(group) })),
  ];
}

function groupButton(node) {
  const home = node && graph ? graph.groups.home[node.index] : null;
  if (!home || !home.outer || home.nodes.length < 2) return null;
  return make("button", { type: "button", text: "Close its group", title: home.path, onclick: () => graph.open(home, false) });
}
