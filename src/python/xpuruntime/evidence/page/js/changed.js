// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// Two reports: what moved, what changed its kernel, precision or layout, what became slower or faster.

const MOST = 12;
const WORDS = { slower: "substituted", faster: "honoured", same: "unobservable", undecided: "unobservable", unknown: "unobservable" };
const GROUPS = DATA.groups.map((group, index) => ({ ...group, index, named: group.nodes.length ? group.nodes.join(", ") : "(inserted)",
  differs: group.what.join(", ") || "time alone", by: group.time ? group.time.after - group.time.before : 0 }));

function showHeadline() {
  const top = document.getElementById("top");
  top.classList.add(DATA.same ? "is-good" : "is-bad");
  const said = DATA.same ? "The same ran; times, memory and environment may differ." : "Something else ran.";
  const known = DATA.sides.map((side, i) =>
    [i ? "After" : "Before", `${side.engine}@${side.device}`, `precision ${side.precision}; ${side.headline}${side.partial ? ", incomplete" : ""}`]);
  known.push(...DATA.speeds.slice(0, 1).map(([name, change, verdict]) => [sentence(name), verdict, change]),
    ["Nodes that differ", whole.format(GROUPS.reduce((sum, group) => sum + group.nodes.length, 0)), `no difference in ${count(DATA.unchanged, "other")}`]);
  top.append(
    make("h1", {}, make("span", { class: "mark", "aria-hidden": "true", text: DATA.same ? "✓" : "✕" }), sentence(DATA.headline)),
    make("p", { class: "says", text: said }),
    make("dl", { class: "facts" }, known.map(([key, value, more]) =>
      make("div", {}, make("dt", { text: key }), make("dd", {}, value, make("small", { text: more }))))));
}

function showReports() {
  const names = ["name", "model", "engine", "device", "precision", "created", "command", "headline"];
  const [before, after] = DATA.sides;
  bodyOf("reports").append(table("Reports", ["what", "before", "after"], names.map((name) => ({ cells: [name, before[name] || "-", after[name] || "-"] }))));
}

function verdict(word) {
  return make("span", { class: `badge ${WORDS[word]}` }, make("i", { "aria-hidden": "true", text: { slower: "▲", faster: "▼", same: "=" }[word] || "?" }), word);
}

function showSpeed() {
  const body = bodyOf("speed");
  if (DATA.speeds.length) {
    body.append(table("Speed", ["what", "change", "verdict"], DATA.speeds.map(([name, change, word]) => ({ cells: [name, change, verdict(word)] }))));
  } else body.append(nothing("The reports hold no times of the same kind."));
  body.append(make("p", { class: "hint", text: `Differences up to ${DATA.noise} are treated as noise.` }));
  const units = [...new Set(GROUPS.filter((group) => group.time).map((group) => group.time.unit))];
  for (const unit of units) bars(body, unit);
}

/** The groups whose times changed most; those of one unit alone, since others do not compare. */
function bars(body, unit) {
  const all = GROUPS.filter((g) => g.time && g.time.unit === unit && (g.verdict === "slower" || g.verdict === "faster"))
    .sort((a, b) => Math.abs(b.by) - Math.abs(a.by));
  if (!all.length) return;
  const most = Math.abs(all[0].by), shown = all.slice(0, MOST);
  body.append(make("h3", { text: `Changed most, ${shown.length} of ${count(all.length, "group")}` }),
    make("ul", { class: "bars" }, shown.map((group) => {
      const bar = make("span", { class: `fill v-${WORDS[group.verdict]}` });
      bar.style.width = `${most ? (Math.abs(group.by) / most) * 100 : 0}%`;
      return make("li", {}, make("span", { class: "name", title: group.named, text: short(group.named) }),
        make("span", { class: "track", "aria-hidden": "true" }, bar),
        make("span", { class: "num", text: `${group.by > 0 ? "+" : "-"}${amount(Math.abs(group.by))} ${unit}` }),
        make("span", { class: "num dim", text: group.change === null ? "" : `${group.change > 0 ? "+" : ""}${(group.change * 100).toFixed(0)} %` }));
    })));
}

/** The beginning of what a unit is, which tells more than its end. */
function cut(text, most = 44) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

const GROUP_COLUMNS = [
  { name: "#", number: true, value: (g) => g.index, show: (g) => String(g.index + 1) },
  { name: "nodes", value: (g) => g.named, show: (g) => (g.nodes.length > 1 ? `${short(g.nodes[0], 30)} + ${g.nodes.length - 1} more` : short(g.named, 40)), full: (g) => g.named },
  { name: "what", value: (g) => g.differs },
  { name: "before", value: (g) => g.before, show: (g) => cut(g.before), full: (g) => g.before },
  { name: "after", value: (g) => g.after, show: (g) => cut(g.after), full: (g) => g.after },
  { name: "time before", number: true, value: (g) => (g.time ? g.time.before : -1), show: (g) => timeText(g, "before") },
  { name: "time after", number: true, value: (g) => (g.time ? g.time.after : -1), show: (g) => timeText(g, "after") },
  { name: "difference", number: true, value: (g) => g.by, show: (g) => (g.time ? `${g.by > 0 ? "+" : g.by < 0 ? "-" : ""}${amount(Math.abs(g.by))}` : "-") },
  { name: "speed", value: (g) => g.verdict, show: (g) => verdict(g.verdict) },
];

function timeText(group, side) {
  return group.time ? `${amount(group.time[side])} ${group.time.unit}` : "-";
}

function showNodes() {
  const body = bodyOf("nodes");
  if (GROUPS.length) {
    const groups = new SortedTable(body, {
      things: GROUPS, columns: GROUP_COLUMNS, noun: "group", link: "nodes", hint: "Filter by node, kernel, device…",
      facets: [["what", (g) => g.differs], ["speed", (g) => g.verdict]],
      wordsOf: (g) => [...g.nodes, g.before, g.after, g.differs],
      pick: (group) => {
        groups.light(group);
        detail.textContent = `${group.named}: ${group.before} → ${group.after}`;
      },
    });
    const detail = make("p", { class: "hint", role: "status", text: "Choose a row to see all of its nodes." });
    body.append(detail);
  } else body.append(nothing(`No difference in any of ${count(DATA.unchanged, "source node")}.`));
  DATA.only.forEach((nodes, i) => {
    if (!nodes.length) return;
    body.append(make("details", {}, make("summary", { text: `Only in the report ${i ? "after" : "before"} (${nodes.length})` }),
      make("ul", {}, nodes.map((text) => make("li", { text })))));
  });
}

function showRest() {
  plainTable("policy", ["key", "asked", "observed", "status", "reason"],
    DATA.keys.map(({ cells, deviates }) => ({ cells, mark: deviates ? "off" : null })), "No key differs.", { class: "policy" });
  plainTable("decisions", ["call", "kernel", "asked", "by", "reason"], DATA.decisions.map((cells) => ({ cells })), "No call is served by another kernel.");
  plainTable("boundaries", ["kind", "where", ">count", ">bytes", ">time"], DATA.boundaries.map((cells) => ({ cells })), "No boundary differs.");
  plainTable("memory", ["owner", ">before", ">after"], DATA.memory.map((cells) => ({ cells })), "Nothing differs, or the reports do not say.");
  plainTable("cuda-graph", ["what", "before", "after", "why"], DATA.cuda_graph.map((cells) => ({ cells })), "Nothing differs, or a report does not say.");
  plainTable("peaks", ["owner", ">before", ">after"], DATA.peaks.map((cells) => ({ cells })), "Nothing differs beyond the noise, or a report does not say.");
  plainTable("shapes", ["what", "before", "after"], DATA.shapes.map((cells) => ({ cells })), "Nothing differs, or a report does not say.");
  plainTable("surroundings", ["what", "before", "after"], DATA.surroundings.map((cells) => ({ cells })), "Nothing differs.");
  const notes = bodyOf("notes");
  if (DATA.notes.length) notes.append(make("ul", {}, DATA.notes.map((text) => make("li", { text }))));
  else notes.append(nothing("There are none."));
}

function plainTable(section, columns, rows, empty, facts = {}) {
  bodyOf(section).append(rows.length ? table(sentence(section), columns, rows, facts) : nothing(empty));
}
