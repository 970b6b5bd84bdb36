// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// Whether the session is a CUDA graph and what prevents it, which shapes the report covers, and how far results
// repeated in a test.

function showCudaGraph() {
  const body = bodyOf("cuda-graph");
  const found = DATA.cuda_graph;
  if (!found) {
    body.append(nothing("The report does not say."));
    return;
  }
  const mark = { captured: "honoured", possible: "honoured", blocked: "substituted", refused: "unsupported", unknown: "unobservable" }[found.status];
  const word = found.status === "not_applicable" ? null : make("span", { class: `badge ${mark}` },
    make("i", { "aria-hidden": "true", text: STATUSES[mark] }), found.word);
  body.append(make("p", {}, word, word ? ` ${sentence(found.reason)}` : sentence(found.reason)));
  if (found.status !== "not_applicable") body.append(make("p", { class: "hint", text: `execution.cuda_graph: ${found.asked}` }));
  if (found.blockers.length) {
    const rows = found.blockers.map(([node, ...cells]) => ({ mark: "off", cells: [nodeLink(node), ...cells] }));
    body.append(table("In the way of a graph", ["node", "op", "what", "why"], rows, { class: "policy" }));
  }
  if (found.holds_for.length) body.append(make("ul", {}, found.holds_for.map((text) => make("li", { text: `A graph holds for ${text}` }))));
}

/** The name of a node or unit; a button where the page knows the unit. */
function nodeLink(name) {
  const unit = UNIT_OF.get(name) || UNITS.find((one) => one.id === name);
  if (!unit) return name;
  return make("button", { type: "button", class: "link", text: name, onclick: () => { choose({ unit }); enterInspector(); } });
}

function showShapes() {
  const body = bodyOf("shapes");
  const found = DATA.shapes;
  if (!found || !found.inputs.length) {
    body.append(nothing("The report does not say."));
    return;
  }
  const rows = found.inputs.map(([name, model, allowed, observed, covered, reason]) =>
    ({ cells: [name, model, allowed, observed, covered, make("span", { class: "dim", text: reason })] }));
  body.append(table("Shapes", ["input", "in the model", "allowed", "observed", "all of them", "why"], rows, { class: "policy" }));
  if (found.by_shape.length) body.append(make("ul", {}, found.by_shape.map((text) => make("li", { text: sentence(text) }))));
}

function showDeterminism() {
  const body = bodyOf("determinism");
  const found = DATA.determinism;
  if (!found) {
    body.append(nothing("Not tested: xrt explain --determinism GRADE tests it."));
    return;
  }
  const rows = found.tests.map(([grade, verdict, trials, why], at) => ({
    cells: [grade, make("span", { class: `badge ${found.marks[at]}` }, verdict), trials, make("span", { class: "dim", text: why })],
  }));
  body.append(make("p", { text: `${sentence(found.headline)} Inputs: ${found.inputs}.` }));
  body.append(table("Determinism", ["grade", "verdict", "trials", "why"], rows, { class: "policy" }));
}
