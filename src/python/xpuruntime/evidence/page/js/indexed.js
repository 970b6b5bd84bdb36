// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// An index of files: what differs from a baseline, how many are odd, what is odd about them, and all files.

const ODD = DATA.files.filter((file) => file.odd.length || file.error);

function fileLink(file) {
  return make("a", { href: DATA.links[file.path] }, ...wrappable(file.path));
}

function showResult() {
  const top = document.getElementById("top"), good = !ODD.length && DATA.files.every((file) => file.same !== false);
  top.classList.add(good ? "is-good" : "is-bad");
  const models = new Set(DATA.files.map((file) => file.model).filter(Boolean));
  const failed = DATA.files.filter((file) => !file.good).length;
  const facts = [["folder", DATA.folder], ["models", [...models].join(", ") || "none"], ["not honoured, failed or not readable", String(failed)]];
  top.append(
    make("h1", {}, make("span", { class: "mark", "aria-hidden": "true", text: good ? "✓" : "✕" }), DATA.headline),
    make("dl", { class: "facts" }, facts.map(([key, value]) => make("div", {}, make("dt", { text: sentence(key) }), make("dd", {}, value)))));
}

function showAgainst() {
  if (!DATA.baseline) return void document.getElementById("against").remove();
  const base = DATA.files.find((file) => file.path === DATA.baseline);
  const rows = DATA.files.map((file) => ({ cells: [
    fileLink(file), `${file.engine}@${file.device}`, DATA.medians[file.path],
    file === base || file.median_us == null || base.median_us == null ? "-" : `${(file.median_us / base.median_us).toFixed(2)} x`,
    file === base ? "baseline" : file.changes] }));
  bodyOf("against").append(table(`Against ${DATA.baseline}`, ["report", "engine", ">median", ">to the baseline", "differs"], rows));
}

/** What is odd about a file; the units that no other file has are one fact. */
function oddFacts({ odd }) {
  const own = odd.filter(({ name, usual }) => name.startsWith("unit ") && usual === "nothing");
  const several = own.length > 2, others = several ? odd.filter((fact) => !own.includes(fact)) : odd;
  const facts = others.map((fact) => [fact.name, fact.value, fact]);
  if (several) {
    facts.push([`${own.length} units of its own`, make("details", {}, make("summary", { text: own.slice(0, 2).map(({ name }) => name.slice(5)).join(", ") + ", …" }),
      make("ul", {}, own.map(({ name, value }) => make("li", { text: `${name.slice(5)}: ${value}` })))), own[0]]);
  }
  return facts;
}

function showOdd() {
  const body = bodyOf("odd");
  const rows = ODD.flatMap((file) => file.error
    ? [{ cells: [fileLink(file), file.model, "not readable", file.error, ""] }]
    : oddFacts(file).map(([name, value, { usual, agreeing, of }]) => ({ cells: [fileLink(file), file.model, name, value, `${usual} (${agreeing} of ${of})`] })));
  if (rows.length) body.append(table("Odd ones", ["file", "model", "fact", "value", "most others"], rows));
  else body.append(nothing("All files of a kind and a model agree."));
  if (!DATA.undecided.length) return;
  body.append(make("h3", { text: "No majority" }), make("ul", {}, DATA.undecided.map((text) => make("li", { text }))));
}

function showFiles() {
  const rows = DATA.files.map((file) => ({ cells: [
    fileLink(file), file.kind, file.model, file.engine, file.device, file.created.slice(0, 10),
    make("span", { class: `badge ${file.good ? "honoured" : "substituted"}` },
      make("i", { "aria-hidden": "true", text: STATUSES[file.good ? "honoured" : "substituted"] }), file.good ? "good" : "bad"),
    file.headline, String(file.odd.length)] }));
  bodyOf("files").append(table("Files", ["file", "kind", "model", "engine", "device", "date", "verdict", "says", ">odd facts"], rows));
}
