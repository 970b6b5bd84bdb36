// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The headline, the facts beside it, and the policy.

function showOverview() {
  const top = document.getElementById("top");
  top.classList.add(DATA.honoured ? "is-good" : "is-bad");
  const keys = DATA.observations;
  const unseen = keys.filter((o) => o.status === "unobservable").length;
  const words = [];
  if (keys.length) words.push(`${count(keys.length, "policy key")} compared`);
  if (unseen) words.push(`${unseen} could not be observed`);
  if (DATA.created) words.push(`made ${DATA.created.replace("T", " ").replace("+00:00", " UTC")}`);
  top.append(
    make("h1", {}, make("span", { class: "mark", "aria-hidden": "true", text: DATA.honoured ? "✓" : "✕" }), sentence(DATA.headline)),
    make("p", { class: "says", text: words.join(" · ") }),
  );
  top.append(...told(DATA.deviations, "policy", ({ requested, observed, reason }) => `${requested} was asked for, and ${observed} was observed: ${reason}`));
  if (DATA.partial) {
    const text = "Partial: the observing pass broke off, or a source of records was missing. See the notes.";
    top.append(make("p", { class: "partial", text }));
  }
  top.append(make("dl", { class: "facts" }, facts().map(([name, value, more]) =>
    make("div", {}, make("dt", { text: name }), make("dd", {}, value, more ? make("small", { text: more }) : null)))));
}

function facts() {
  const { plan, model, latency } = DATA;
  const found = [];
  if (model.path) {
    const name = String(model.path).split(/[\\/]/).filter(Boolean).pop() || "";
    const parts = [model.nodes ? count(model.nodes, "node") : null, model.size ? bytes(model.size) : null];
    found.push(["Model", name, parts.filter(Boolean).join(", ")]);
  }
  if (plan.engine) found.push(["Engine", plan.engine, plan.engine_version ? `version ${plan.engine_version}` : null]);
  if (plan.device) found.push(["Device", plan.device, plan.precision ? `precision ${plan.precision}` : null]);
  if (latency) {
    found.push(["Latency, median", measured(latency.median_us, "us"),
      `p90 ${measured(latency.p90_us, "us")}, min ${measured(latency.min_us, "us")}; ${count(latency.runs, "run")} without instruments`]);
  }
  if (UNITS.length) found.push(["Units", whole.format(UNITS.length), accounting()]);
  return found;
}

/** Where the source nodes went: "15 source nodes: 4 exact, 11 fused into 4". */
function accounting() {
  const units = {}, nodes = {};
  for (const unit of UNITS) {
    units[unit.relation] = (units[unit.relation] || 0) + 1;
    nodes[unit.relation] = (nodes[unit.relation] || 0) + unit.sources.length;
  }
  const words = [];
  for (const relation of ["exact", "fused", "opaque", "folded", "inserted"]) {
    if (!units[relation]) continue;
    if (relation === "fused") words.push(`${nodes.fused} fused into ${units.fused}`);
    else if (relation === "inserted") words.push(`${count(units.inserted, "unit")} inserted`);
    else words.push(nodes[relation] ? `${nodes[relation]} ${relation}` : `${count(units[relation], `${relation} unit`)}`);
  }
  const computing = UNITS.filter((u) => u.relation !== "folded" && (u.sources.length || u.serves.length || u.relation === "opaque")).length;
  const counted = computing < UNITS.length ? `; policy keys count the ${computing} that compute` : "";
  return `${count(Object.values(nodes).reduce((a, b) => a + b, 0), "source node")}: ${words.join(", ")}${counted}`;
}

function showPolicy() {
  const body = bodyOf("policy");
  if (!DATA.observations.length) body.append(nothing("No policy key was compared."));
  else {
    const rows = DATA.observations.map((o) => ({
      mark: o.status === "substituted" || o.status === "unsupported" ? "off" : null,
      cells: [o.key, o.requested, o.resolved, o.observed, badge(o.status), make("span", { class: "dim", text: o.reason })],
    }));
    body.append(table("Policy keys", ["key", "requested", "resolved", "observed", "status", "reason"], rows, { class: "policy" }));
  }
  if (DATA.verdicts.length) {
    const rows = DATA.verdicts.map((v) => ({
      cells: [v.candidate, v.accepted ? "accepted" : "rejected", v.reason, v.fix || ""],
    }));
    body.append(make("details", {}, make("summary", { text: `Candidates: why this engine on this device (${rows.length})` }),
      table("Candidates", ["candidate", "verdict", "reason", "fix"], rows)));
  }
  if (DATA.policy) {
    const source = DATA.policy_source ? `, ${DATA.policy_source}` : "";
    body.append(make("details", {}, make("summary", { text: `The policy${source}` }),
      make("pre", { text: JSON.stringify(DATA.policy, null, 2) })));
  }
}
