// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// A layered drawing: every edge goes down, edges are short and straight, few of them cross. The same graph gives the
// same drawing.

const BOX_HIGH = 50;
const ROW = 78;
const GAP = 22;
/** An edge that skips more rows than this is drawn as one curve and gets no way of its own. */
const LONG = 40;
const SWEEPS = 6;

/** Return x (centre) and y (top) of each box, a path and its span for each edge, and the size of the whole. Yields often. */
function* layered(widths, edges) {
  const number = widths.length;
  const { down, up } = neighbours(number, edges);
  const row = rowsOf(number, down, up);
  const points = widths.map((width, i) => ({ box: i, width, row: row[i], above: [], below: [] }));
  yield;
  const ways = edges.map(([a, b]) => way(points, row, a, b));
  yield;
  const rows = [];
  for (const point of points) (rows[point.row] ||= []).push(point);
  for (let i = 0; i < rows.length; i += 1) rows[i] ||= [];
  yield* order(rows);
  yield* place(rows);
  const columns = intoColumns(rows, ways);
  yield;
  const paths = [];
  for (const steps of ways) {
    paths.push(pathOf(steps));
    if (paths.length % 500 === 0) yield;
  }
  return {
    x: widths.map((_, i) => points[i].x),
    y: widths.map((_, i) => points[i].y),
    paths,
    spans: ways.map(spanOf),
    width: columns[columns.length - 1].right,
    height: columns.reduce((most, column) => Math.max(most, column.bottom), 0) + (columns.length > 1 ? 10 + LANES * 3 : 0),
  };
}

/** Edges by end. One that goes against the order of the graph is turned round. */
function neighbours(number, edges) {
  const down = Array.from({ length: number }, () => []), up = Array.from({ length: number }, () => []);
  for (const [a, b] of edges) {
    down[Math.min(a, b)].push(Math.max(a, b));
    up[Math.max(a, b)].push(Math.min(a, b));
  }
  return { down, up };
}

/** The row of each box: below all that it reads; a box that reads nothing stands just above its first reader. */
function rowsOf(number, down, up) {
  const row = new Array(number).fill(0);
  for (let i = 0; i < number; i += 1) for (const j of down[i]) row[j] = Math.max(row[j], row[i] + 1);
  for (let i = number - 1; i >= 0; i -= 1) if (!up[i].length && down[i].length) row[i] = Math.min(...down[i].map((j) => row[j])) - 1;
  return row;
}

/** The points that an edge goes through, from its upper to its lower end. */
function way(points, row, a, b) {
  const [from, to] = row[a] <= row[b] ? [points[a], points[b]] : [points[b], points[a]];
  const steps = [from], line = [];
  if (to.row - from.row > 1 && to.row - from.row <= LONG) {
    for (let r = from.row + 1; r < to.row; r += 1) {
      const bend = { box: -1, width: 6, row: r, above: [], below: [], line };
      points.push(bend);
      steps.push(bend);
      line.push(bend);
    }
  }
  steps.push(to);
  for (let i = 1; i < steps.length; i += 1) {
    if (steps[i].row - steps[i - 1].row !== 1) continue;
    steps[i - 1].below.push(steps[i]);
    steps[i].above.push(steps[i - 1]);
  }
  return steps;
}

/** Put each row into the order of the middles of its neighbours, downwards and upwards in turn. */
function* order(rows) {
  const number = (row) => row.forEach((point, i) => { point.place = i; });
  rows.forEach(number);
  for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
    const side = sweep % 2 ? "below" : "above";
    for (const row of sweep % 2 ? [...rows].reverse() : rows) {
      for (const point of row) {
        const near = point[side];
        point.wish = near.length ? near.reduce((sum, p) => sum + p.place, 0) / near.length : point.place;
      }
      row.sort((a, b) => a.wish - b.wish || a.place - b.place);
      number(row);
    }
    yield;
  }
}

/** Give each point an x near the median of its neighbours, in turns, without overlaps. */
function* place(rows) {
  for (const row of rows) {
    let x = 0;
    for (const point of row) {
      point.x = x + point.width / 2;
      x += point.width + GAP;
    }
    for (const point of row) point.x -= (x - GAP) / 2;
  }
  for (let sweep = 0; sweep < SWEEPS * 2; sweep += 1) {
    const straighten = sweep >= SWEEPS;
    const sides = straighten ? ["above", "below"] : [sweep % 2 ? "below" : "above"];
    for (const row of sweep % 2 ? [...rows].reverse() : rows) settle(row, sides, straighten);
    yield;
  }
}

function median(sorted) {
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
}

function mean(line) {
  return line.reduce((sum, point) => sum + point.x, 0) / line.length;
}

/** The least squares answer to: be where you wish, keep your order, keep your distance. Boxes stay, ways past them give. */
function settle(row, sides, straighten) {
  const blocks = [];
  let offset = 0;
  row.forEach((point, i) => {
    if (i) offset += (row[i - 1].width + point.width) / 2 + GAP;
    const all = sides.flatMap((side) => point[side]);
    const boxes = all.filter((p) => p.box >= 0); // chains of boxes are to be straight, rather than ways past them
    const near = (boxes.length ? boxes : all).map((p) => p.x).sort((a, b) => a - b);
    const middle = straighten && point.line ? mean(point.line) : near.length ? median(near) : point.x;
    const weight = point.box < 0 || !near.length ? 0.1 : 1;
    point.offset = offset;
    blocks.push({ sum: (middle - offset) * weight, weight, points: [point] });
    while (blocks.length > 1) {
      const [before, after] = blocks.slice(-2);
      if (before.sum / before.weight <= after.sum / after.weight) break;
      blocks.pop();
      before.sum += after.sum;
      before.weight += after.weight;
      for (const moved of after.points) before.points.push(moved);
    }
  });
  for (const block of blocks) for (const point of block.points) point.x = block.sum / block.weight + point.offset;
}
