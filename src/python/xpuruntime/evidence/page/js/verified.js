// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// A verification: the verdict, its claims, and the reasons of those that did not pass.

const CLAIMS = DATA.claims.map((claim, index) => ({ ...claim, index }));
const SHOWN_AS = { pass: "honoured", fail: "substituted", inconclusive: "inconclusive", unobservable: "unobservable", skipped: "rejected" };

function verdictBadge(word) {
  const status = SHOWN_AS[word];
  return make("span", { class: `badge ${status}` }, make("i", { "aria-hidden": "true", text: STATUSES[status] || "?" }), word);
}

function showVerdict() {
  const top = document.getElementById("top"), good = DATA.exit === 0;
  top.classList.add(good ? "is-good" : "is-bad");
  const facts = [...DATA.known, ["exit code", String(DATA.exit)]];
  top.append(
    make("h1", {}, make("span", { class: "mark", "aria-hidden": "true", text: good ? "✓" : "✕" }), sentence(DATA.headline)),
    ...told(CLAIMS.filter((one) => ["fail", "inconclusive"].includes(one.verdict)), "reasons", ({ reason, place }) => `${reason}${place ? ` (${place})` : ""}`),
    make("dl", { class: "facts" }, facts.map(([key, value]) => make("div", {}, make("dt", { text: sentence(key) }), make("dd", {}, value)))));
}

const CLAIM_COLUMNS = [
  { name: "#", number: true, value: (one) => one.index, show: (one) => String(one.index + 1) },
  { name: "claim", value: (one) => one.id },
  { name: "requested", value: (one) => one.requested },
  { name: "observed", value: (one) => one.observed },
  { name: "verdict", value: (one) => one.verdict, show: (one) => verdictBadge(one.verdict) },
  { name: "rule", value: (one) => one.rule },
];

function showClaims() {
  const body = bodyOf("claims");
  if (!CLAIMS.length) { body.append(nothing("There are none.")); return; }
  const detail = make("div", { class: "hint", role: "status", text: "Choose a row to see its reason and figures." });
  const claims = new SortedTable(body, {
    things: CLAIMS, columns: CLAIM_COLUMNS, noun: "claim", link: "claim", hint: "Filter by claim, value, rule…",
    facets: [["section", (one) => one.section], ["verdict", (one) => one.verdict]],
    wordsOf: (one) => [one.id, one.requested, one.observed, one.verdict, one.rule, one.reason],
    pick: (one) => {
      claims.light(one);
      detail.replaceChildren(make("p", { text: `${one.id}: ${one.reason}${one.place ? ` (${one.place})` : ""}` }));
      if (one.figures.length) detail.append(table("Figures", ["figure", ">value"], one.figures.map((cells) => ({ cells }))));
    },
  });
  body.append(detail);
}

function showLimits() {
  const rows = CLAIMS.filter((one) => one.interval)
    .map((one) => ({ name: one.id, ...one.interval, text: one.observed, mark: verdictBadge(one.verdict) }));
  bodyOf("limits").append(rows.length ? intervals("Ratios", "what it is compared with", rows) : nothing("No claim has a figure with a limit."));
}

function showReasons() {
  const open = CLAIMS.filter((one) => one.verdict !== "pass");
  const rows = open.map((one) => ({ cells: [one.id, verdictBadge(one.verdict), one.reason, one.fix || "-", one.place || "-"], mark: one.verdict === "fail" ? "off" : null }));
  bodyOf("reasons").append(rows.length ? table("Reasons", ["claim", "verdict", "reason", "fix", "policy"], rows) : nothing("All claims passed."));
}

function showMachine() {
  bodyOf("machine").append(DATA.facts.length ? table("Machine", ["what", "value"], DATA.facts.map((cells) => ({ cells }))) : nothing("Nothing was recorded."));
  bodyOf("notes").append(DATA.notes.length ? make("ul", {}, DATA.notes.map((text) => make("li", { text }))) : nothing("There are none."));
}
