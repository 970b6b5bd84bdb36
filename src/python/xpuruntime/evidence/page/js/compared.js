// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The engines that were compared, their outputs, and what is said of them in words.

const ROWS = DATA.rows.map((row, index) => ({ ...row, index, colour: `k${Math.min(index, 7)}` }));

/** An error in few digits. What is no number comes as a word. */
function figure(value, digits = 3) {
  if (value === null) return "-";
  if (typeof value === "string") return { Infinity: "∞", "-Infinity": "-∞" }[value] || value;
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(digits)));
}

/** The same for sorting: what is no number is more than any number. */
function weight(value) {
  return value === null ? -1 : typeof value === "string" ? Infinity : value;
}

function showVerdict() {
  const top = document.getElementById("top");
  top.classList.add(DATA.agreed ? "is-good" : "is-bad");
  const name = DATA.model.split(/[\\/]/).filter(Boolean).pop() || DATA.model;
  const known = [["Model", name, DATA.model], ["Reference", DATA.reference, null], ["Input", DATA.inputs, null],
    ["Engines", whole.format(ROWS.length), ROWS.filter((row) => row.status === "rejected").length ? "with those rejected" : null],
    ["Layers measured", whole.format(DATA.layers.name.length), null]];
  top.append(
    make("h1", {}, make("span", { class: "mark", "aria-hidden": "true", text: DATA.agreed ? "✓" : "✕" }), sentence(DATA.headline)),
    make("p", { class: "says", text: says() }),
    make("dl", { class: "facts" }, known.map(([key, value, more]) =>
      make("div", {}, make("dt", { text: key }), make("dd", {}, value, more ? make("small", { text: more }) : null)))));
}

/** The first node that differs; of engines whose outputs agree, a layer that does not. */
function says() {
  const found = ROWS.find((row) => row.divergence);
  if (found) return `${found.label}: ${divergenceWords(found.divergence)}`;
  const layer = POINTS.find((point) => point.first && !point.row.outputs.every((one) => one.passed)) || POINTS.find((point) => point.first);
  if (!layer) return "Each engine is compared with the reference, within the tolerance of its precision.";
  const though = layer.row.status === "agrees" ? "its outputs agree, and a layer inside of it does not" : "the first layer out of tolerance";
  return `${layer.row.label}: ${though}: ${layer.name} (${layer.op}): ${layer.reason}`;
}

function divergenceWords({ nodes, op, output, reason, note }) {
  const where = nodes.length === 1 ? `at node '${nodes[0]}' (${op})` : `in the ${nodes.length} nodes '${nodes[0]}' to '${nodes[nodes.length - 1]}' (${op})`;
  return `first divergence ${where}, output '${output}': ${reason}${note ? `. ${note}` : ""}`;
}

function showEngines() {
  const ran = ROWS.filter((row) => row.status !== "rejected");
  const rows = [...ran, ...ROWS.filter((row) => row.status === "rejected")].map((row) => ({
    mark: row.status === "differs" || row.status === "failed" ? "off" : null,
    cells: [`${row.engine}@${row.device}`, row.precision, badge(row.status), figure(row.max_rel), figure(row.max_abs),
      figure(row.cosine, 6), row.median_us === null ? "-" : measured(row.median_us, "us"),
      row.tolerance ? `${figure(row.tolerance.rtol)} rel., ${figure(row.tolerance.atol)} abs., cosine ${figure(row.tolerance.cosine, 6)}` : "-",
      make("span", { class: "dim", text: row.divergence ? `${row.reason}; ${divergenceWords(row.divergence)}` : row.reason })],
  }));
  bodyOf("engines").append(table("Engines",
    ["engine", "precision", "verdict", ">rel. error", ">largest difference", ">cosine", ">median time", "tolerance", "in words"], rows, { class: "policy" }));
}

function showOutputs() {
  const rows = ROWS.flatMap((row) => row.outputs.map((one) => ({
    mark: one.passed ? null : "off",
    cells: [one.name, row.label, badge(one.undecided ? "inconclusive" : one.passed ? "within" : "out"), ...[one.max_rel, one.max_abs].map((value) => figure(one.compared === 0 ? null : value)), figure(one.cosine, 6),
      whole.format(one.nan + one.inf), make("span", { class: "dim", text: one.reason || one.undecided })],
  })));
  const columns = ["output", "candidate", "tolerance", ">rel. error", ">largest difference", ">cosine", ">NaN, infinite", "why"];
  bodyOf("outputs").append(rows.length ? table("Outputs", columns, rows, { class: "policy" }) : nothing("No engine ran, so there is no output to compare."));
}

function showNotes() {
  const body = bodyOf("notes");
  const notes = ROWS.flatMap((row) => [...row.notes, ...(row.drift_note ? [row.drift_note] : [])].map((text) => `${row.label}: ${text}`));
  if (notes.length) body.append(make("ul", {}, notes.map((text) => make("li", { text }))));
  for (const row of ROWS) {
    if (!row.skipped.length) continue;
    const cells = row.skipped.map((one) => ({ cells: one }));
    body.append(make("details", {}, make("summary", { text: `Not measured on ${row.label} (${row.skipped.length})` }),
      table("Not measured", ["layer", "why"], cells)));
  }
  if (!body.childElementCount) body.append(nothing("There are none."));
}
