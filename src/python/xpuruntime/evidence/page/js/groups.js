// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// Source nodes, and the groups that their names make: "/layers.0/attn/MatMul" is in "/layers.0/attn" in "/layers.0".

const NODES = DATA.graph.name.map((place, index) => ({
  index, name: DATA.strings[place], op: DATA.strings[DATA.graph.op[index]], reads: DATA.graph.reads[index],
  unit: UNIT_OF.get(DATA.strings[place]) || null,
}));
/** Boxes that a drawing begins with: about as many as can be taken in, and enough to see anything. */
const AT_FIRST = 160;
const TOO_FEW = 8;
const STILL_QUICK = 1000;

/** The parts of a name: split at slashes; names without any are split at dots. */
function partsOf(name) {
  const parts = name.split("/").filter(Boolean);
  return parts.length > 1 ? parts : name.split(".").filter(Boolean);
}

class Groups {
  constructor() {
    this.root = { path: "", label: "", depth: 0, inner: new Map(), nodes: [] };
    this.home = NODES.map((node) => {
      let group = this.root;
      group.nodes.push(node.index);
      for (const part of partsOf(node.name).slice(0, -1)) {
        if (!group.inner.has(part)) {
          const path = `${group.path}/${part}`;
          group.inner.set(part, { path, label: part, depth: group.depth + 1, inner: new Map(), nodes: [], outer: group });
        }
        group = group.inner.get(part);
        group.nodes.push(node.index);
      }
      return group;
    });
    this.depth = this.home.reduce((most, group) => Math.max(most, group.depth), 0);
    this.opened = new Set();
    this.closed = new Set();
  }

  /** The group that a node is shown in when names are cut at `level`, or null where it stands for itself. */
  shownIn(index, level) {
    let shown = null;
    for (let group = this.home[index]; group.outer; group = group.outer) {
      const shut = this.closed.has(group) || (group.depth >= level && !this.opened.has(group));
      if (shut && group.nodes.length > 1) shown = group;
    }
    return shown;
  }

  /** What is drawn: boxes in the order of the graph, and the edges between them. */
  cut(level) {
    const boxes = [], at = new Map();
    const boxOf = NODES.map((node) => {
      const group = this.shownIn(node.index, level);
      const key = group || node;
      if (!at.has(key)) {
        at.set(key, boxes.length);
        boxes.push(group ? { group, nodes: group.nodes } : { node, nodes: [node.index] });
      }
      return at.get(key);
    });
    const seen = new Set(), edges = [];
    for (const node of NODES) {
      for (const from of node.reads) {
        const a = boxOf[from], b = boxOf[node.index], key = a * boxes.length + b;
        if (a === b || seen.has(key)) continue;
        seen.add(key);
        edges.push([a, b]);
      }
    }
    return { boxes, edges, boxOf };
  }

  /** The deepest level at which a drawing is still easy to take in. */
  firstLevel() {
    if (NODES.length <= AT_FIRST) return Infinity;
    for (let level = 1, before = 0; level <= this.depth; level += 1) {
      const boxes = this.cut(level).boxes.length;
      if (boxes > AT_FIRST && (before >= TOO_FEW || boxes > STILL_QUICK)) return Math.max(1, level - 1);
      before = boxes;
    }
    return this.depth || Infinity;
  }
}
