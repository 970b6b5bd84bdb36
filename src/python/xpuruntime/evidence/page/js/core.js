// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The units of the report, and which of them is chosen.

const KINDS = DATA.kinds.map((one, index) => {
  const word = { wall: "wall time", device: "device time", simulated: "simulated", cycles: "cycles" }[one.kind] || one.kind;
  return { ...one, index, measure: one.unit, word, label: one.unit === one.kind ? word : `${one.unit}, ${word}`, total: 0, units: [] };
});

const UNITS = readUnits();
const UNIT_OF = new Map(); // source node to the unit that accounts for it
const SERVED = new Map(); // source node to the units that run on its behalf
for (const unit of UNITS) {
  for (const name of unit.sources) UNIT_OF.set(name, unit);
  for (const name of unit.serves) SERVED.set(name, [...(SERVED.get(name) || []), unit]);
}

function readUnits() {
  const raw = DATA.units;
  const text = (place) => (place < 0 ? null : DATA.strings[place]);
  const units = raw.id.map((_, index) => ({
    index,
    id: text(raw.id[index]),
    op: text(raw.op[index]),
    relation: text(raw.relation[index]),
    engine: text(raw.engine[index]),
    device: text(raw.device[index]),
    provider: text(raw.provider[index]),
    kernel: text(raw.kernel[index]),
    kernelSource: text(raw.kernel_source[index]),
    asked: text(raw.precision_requested[index]),
    ran: text(raw.precision_run[index]),
    layout: text(raw.layout[index]),
    reason: text(raw.placement_reason[index]),
    reasonSource: text(raw.placement_source[index]),
    status: text(raw.status[index]),
    sources: raw.source_nodes[index].map(text),
    outputs: raw.outputs[index].map(text),
    serves: raw.serves[index].map(text),
    time: raw.time[index],
    kind: raw.kind[index] < 0 ? null : KINDS[raw.kind[index]],
    runs: raw.runs[index],
    deviceKernels: (DATA.device_kernels.of[index] || []).map(([place, times, us]) => ({ ...DATA.device_kernels.all[place], times, us })),
  }));
  for (const unit of units) {
    if (!unit.kind) continue;
    unit.kind.total += unit.time;
    unit.kind.units.push(unit);
  }
  for (const unit of units) unit.share = unit.kind && unit.kind.total > 0 ? unit.time / unit.kind.total : 0;
  return units;
}

function timeOf(unit) {
  return unit.kind ? measured(unit.time, unit.kind.measure) : "no time";
}

/** What a unit stands for, in a few words. */
function standsFor(unit) {
  if (unit.sources.length) {
    if (unit.sources.length === 1) return unit.sources[0] === unit.id ? "itself" : unit.sources[0];
    return `${unit.sources[0]} + ${unit.sources.length - 1} more`;
  }
  return unit.serves.length ? `a step of ${unit.serves[0]}` : "inserted";
}

// The chosen unit, or source node, or group of them. Whoever shows it listens.
const listeners = [];
let chosen = { unit: null, node: null, group: null };

function choose(what) {
  chosen = { unit: null, node: null, group: null, ...what };
  for (const listener of listeners) listener(chosen);
}
