// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The state of a server: its models, their batches, memory and evidence. The page is loaded anew every few seconds.

const EVERY = 5;

/** A model that makes no progress is bad, and one that waits for its first request is not. */
function stateBadge(one) {
  const status = !one.good ? "substituted" : one.state === "READY" ? "honoured" : "inconclusive";
  return make("span", { class: `badge ${status}` }, make("i", { "aria-hidden": "true", text: STATUSES[status] }), one.state);
}

function milliseconds(seconds) {
  return seconds === null ? "-" : `${amount(seconds * 1e3)} ms`;
}

function bytes(size) {
  if (size === null) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const step = size > 0 ? Math.min(units.length - 1, Math.floor(Math.log2(size) / 10)) : 0;
  return `${amount(size / 1024 ** step)} ${units[step]}`;
}

function showState() {
  const top = document.getElementById("top"), good = DATA.ready;
  top.classList.add(good ? "is-good" : "is-bad");
  top.append(
    make("h1", {}, make("span", { class: "mark", "aria-hidden": "true", text: good ? "✓" : "✕" }), good ? "Ready" : "Not ready"),
    make("p", { class: "says", text: DATA.reason || "All required models make progress." }),
    make("dl", { class: "facts" }, DATA.facts.map(([key, value]) => make("div", {}, make("dt", { text: sentence(key) }), make("dd", {}, value)))));
}

function showModels() {
  const rows = DATA.models.map((one) => ({
    cells: [
      one.name, one.version || "-", stateBadge(one), one.reason || one.engine, milliseconds(one.p50), milliseconds(one.p99),
      whole.format(one.requests), whole.format(one.failed), `${one.waiting} waiting, ${one.running} running`,
    ],
    mark: one.good ? null : "off",
  }));
  const columns = ["model", "version", "state", "engine", ">p50", ">p99", ">answered", ">failed", "queue"];
  bodyOf("models").append(rows.length ? table("Models", columns, rows) : nothing("There are none."));
}

function showBatches() {
  const served = DATA.models.filter((one) => one.executions);
  const rows = served.map((one) => ({
    cells: [
      one.name, one.version, whole.format(one.executions), amount(one.inferences / one.executions),
      Object.entries(one.reasons).filter(([, count]) => count).map(([reason, count]) => `${reason} ${whole.format(count)}`).join(", "),
      share(one.padding), one.batching,
    ],
  }));
  const columns = ["model", "version", ">batches", ">rows a batch", "sent because", ">padding", "settings"];
  bodyOf("batches").append(rows.length ? table("Batches", columns, rows) : nothing("No batch has run yet."));
}

function showServedMemory() {
  const rows = DATA.devices.map((one) => ({ cells: [one.device, bytes(one.used), one.budget === null ? "no limit" : bytes(one.budget)] }));
  const models = DATA.models.filter((one) => one.memory).map((one) => ({ cells: [one.name, one.memory.device, bytes(one.memory.bytes), one.memory.source] }));
  const body = bodyOf("memory");
  body.append(rows.length ? table("Devices", ["device", ">taken", ">budget"], rows) : nothing("No model is loaded."));
  if (models.length) body.append(make("h3", { text: "By model" }), table("Memory by model", ["model", "device", ">size", "measured by"], models));
}

function showServedEvidence() {
  const rows = DATA.models.filter((one) => one.plan).map((one) => ({
    cells: [one.name, one.version, make("span", { class: "mono long", text: one.plan }), one.lock ? make("span", { class: "mono long", text: one.lock }) : "none", one.canary, one.shadow, one.slo],
  }));
  const columns = ["model", "version", "plan", "lock", "canary", "shadow", "latency asked for"];
  bodyOf("evidence").append(rows.length ? table("Evidence", columns, rows) : nothing("No model is loaded."));
}

/** Load the page anew every few seconds, unless the reader has stopped it. */
function showRefresh() {
  const key = "xpuruntime-status-paused";
  let paused = false;
  try { paused = sessionStorage.getItem(key) === "true"; } catch { /* then it runs */ }
  const button = make("button", { type: "button", id: "refresh", class: "quiet" });
  let timer = null;
  const apply = () => {
    button.textContent = paused ? "Paused" : `Refreshes every ${EVERY} s`;
    button.setAttribute("aria-pressed", String(paused));
    clearTimeout(timer);
    timer = paused ? null : setTimeout(() => location.reload(), EVERY * 1000);
  };
  button.addEventListener("click", () => {
    paused = !paused;
    try { sessionStorage.setItem(key, String(paused)); } catch { /* as above */ }
    apply();
  });
  document.getElementById("theme").before(button);
  apply();
}
