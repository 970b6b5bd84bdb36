// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// What a box of the graph says and how it is coloured. A word in the box says the same as the colour.

const PLAIN = ["folded", "not observed"];
const BANDS = [0.05, 0.2, 0.45, 0.75, 1];
const COLOURINGS = {
  placement: { value: placement, title: "Placement" },
  precision: { value: (unit) => plainWord(unit) || unit.ran || "precision unknown", title: "Precision" },
  time: { title: "Time" },
  status: { value: (unit) => (unit ? unit.status : "not observed"), title: "Status" },
};

function plainWord(unit) {
  return !unit ? "not observed" : unit.relation === "folded" ? "folded" : null;
}

function placement(unit) {
  return plainWord(unit) || unit.device;
}

/** Give each box its class and word, and say what the legend has to tell. */
function paint(boxes, name) {
  return name === "time" ? paintTime(boxes) : paintWords(boxes, COLOURINGS[name].value, name);
}

/** The units of a box; a box of one node is asked very often. */
function unitsOf(box) {
  box.units ||= new Set(box.nodes.map((index) => NODES[index].unit));
  return box.units;
}

function paintWords(boxes, value, name) {
  const totals = new Map();
  const found = boxes.map((box) => {
    const counts = new Map();
    for (const index of box.nodes) {
      const word = value(NODES[index].unit);
      counts.set(word, (counts.get(word) || 0) + 1);
      totals.set(word, (totals.get(word) || 0) + 1);
    }
    return counts;
  });
  const words = [...totals].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([word]) => word);
  const classes = palette(words.filter((word) => !PLAIN.includes(word)));
  const classOf = (word) => (PLAIN.includes(word) ? "sx" : name === "status" ? `v-${word}` : classes.get(word));
  const looks = found.map((counts) => {
    const [first] = [...counts.keys()];
    if (counts.size === 1) return { look: classOf(first), word: first };
    const parts = [...counts].sort((a, b) => b[1] - a[1]);
    const all = parts.reduce((sum, [, number]) => sum + number, 0);
    return {
      look: "mixed",
      word: parts.map(([word, number]) => `${number} ${word}`).join(", "),
      strip: parts.map(([word, number]) => [classOf(word), number / all]),
    };
  });
  const legend = words.map((word) => {
    const text = word === "folded" ? `folded: ${RELATIONS.folded}` : word;
    return legendItem(classOf(word), text, count(totals.get(word), "node"));
  });
  if (looks.some(({ look }) => look === "mixed")) legend.push(legendItem("mixed", "mixed: a group with several of these, in the shares of its strip"));
  return { looks, legend };
}

/** Bands of the share of a box in all time of its kind, from the least to the most in this drawing. */
function paintTime(boxes) {
  const shares = boxes.map((box) => {
    const byKind = new Map();
    for (const unit of unitsOf(box)) if (unit && unit.kind) byKind.set(unit.kind, (byKind.get(unit.kind) || 0) + unit.time);
    const [kind, time] = [...byKind].sort((a, b) => b[1] / b[0].total - a[1] / a[0].total)[0] || [null, 0];
    return kind && kind.total ? { kind, time, value: time / kind.total } : null;
  });
  const most = shares.reduce((top, s) => Math.max(top, s ? s.value : 0), 0);
  const looks = shares.map((found, i) => {
    if (!found) {
      const [unit] = unitsOf(boxes[i]);
      return { look: "sx", word: plainWord(unit) || "no time" };
    }
    const band = most ? BANDS.findIndex((edge) => found.value <= most * edge * 1.0000001) : 0;
    return { look: `s${band}`, word: `${measured(found.time, found.kind.measure)}, ${share(found.value)}` };
  });
  const legend = BANDS.map((edge, i) =>
    legendItem(`s${i}`, `${i ? `${fine(most * BANDS[i - 1])} to` : "up to"} ${fine(most * edge)}`));
  if (looks.some(({ look }) => look === "sx")) legend.push(legendItem("sx", "no time of its own"));
  legend.push(make("li", { text: "A share is of all time of its kind. Nodes that were fused show the time of their unit." }));
  return { looks, legend };
}

/** A share with two digits that tell. */
function fine(value) {
  return `${Number((value * 100).toPrecision(2))} %`;
}

/** The three lines of a box. */
function linesOf(box, word) {
  const cut = (text, most) => (text.length > most ? `…${text.slice(1 - most)}` : text);
  const name = box.group ? `${whole.format(box.nodes.length)} nodes` : partsOf(box.node.name).pop() || box.node.name;
  const head = box.group ? box.group.label : box.node.op;
  return [cut(head, 22), cut(name, 25), word.length > 25 ? `${word.slice(0, 24)}…` : word];
}

function boxName(box) {
  return box.group ? `group ${box.group.path}, ${count(box.nodes.length, "node")}` : `${box.node.name}, ${box.node.op}`;
}

function deviates(box) {
  for (const unit of unitsOf(box)) if (unit && (unit.status === "substituted" || unit.status === "unsupported")) return true;
  return false;
}
