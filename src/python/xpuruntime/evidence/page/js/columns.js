// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// Most models are long and narrow. Their drawing is cut into columns, read like those of a newspaper, so that all of it
// can be seen at once; an edge from one column to the next goes round between them.

const RATIO = 1.8;
/** Rows of a column, at least: as many as are in view without zooming out. */
const SHORTEST = 7;
const BETWEEN = 30;
const LANES = 8;
const LANE_WIDE = 5;

/** Give each point its column, its x in there and its y. Returns the columns. */
function intoColumns(rows, ways) {
  const across = new Array(rows.length + 1).fill(0);
  for (const steps of ways) for (let r = steps[0].row + 1; r <= steps[steps.length - 1].row; r += 1) across[r] += 1;
  const starts = cuts(rows, across);
  const top = starts.length > 1 ? 14 + LANES * 3 : 0;
  let left = 0;
  const columns = starts.map((first, at) => {
    const inside = rows.slice(first, starts[at + 1] ?? rows.length);
    const points = inside.flat();
    const least = points.reduce((x, p) => Math.min(x, p.x - p.width / 2), Infinity);
    const most = points.reduce((x, p) => Math.max(x, p.x + p.width / 2), -Infinity);
    const over = Math.min(LANES, across[starts[at + 1]] || 0);
    const column = { left, right: left + most - least, top, bottom: top + inside.length * ROW - (ROW - BOX_HIGH), used: 0 };
    for (const point of points) {
      point.x += left - least;
      point.column = column;
      point.y = top + (point.row - first) * ROW;
    }
    left = column.right + BETWEEN + over * LANE_WIDE;
    return column;
  });
  return columns;
}

/** The first row of each column. Columns end where few edges go on. */
function cuts(rows, across) {
  const wide = rows.reduce((most, row) => {
    const first = row[0], last = row[row.length - 1];
    return row.length ? Math.max(most, last.x + last.width / 2 - first.x + first.width / 2) : most;
  }, 1);
  const wanted = Math.max(1, Math.round(Math.sqrt((RATIO * rows.length * ROW) / (wide + BETWEEN))));
  const number = Math.min(wanted, Math.ceil(rows.length / SHORTEST));
  const length = Math.ceil(rows.length / number);
  const starts = [0];
  while (rows.length - starts[starts.length - 1] > length) {
    const from = starts[starts.length - 1];
    let best = from + length;
    for (let r = best - 1; r >= from + Math.ceil(length * 0.75); r -= 1) if (across[r] < across[best]) best = r;
    starts.push(best);
  }
  return starts;
}

/** An edge as a path of SVG. */
function pathOf(steps) {
  const n = (value) => value.toFixed(1);
  let path = `M${n(steps[0].x)} ${n(steps[0].y + BOX_HIGH)}`;
  for (let at = 1; at < steps.length; at += 1) {
    const a = steps[at - 1], b = steps[at], start = a.y + BOX_HIGH;
    if (at > 1) path += `L${n(a.x)} ${n(start)}`;
    if (a.column === b.column) {
      const bend = Math.min(60, (b.y - start) / 2);
      path += `C${n(a.x)} ${n(start + bend)} ${n(b.x)} ${n(b.y - bend)} ${n(b.x)} ${n(b.y)}`;
    } else {
      const lane = a.column.used++ % LANES;
      const low = a.column.bottom + 10 + lane * 3, side = a.column.right + 14 + lane * LANE_WIDE, high = b.column.top - 10 - lane * 3;
      path += `L${n(a.x)} ${n(low)}L${n(side)} ${n(low)}L${n(side)} ${n(high)}L${n(b.x)} ${n(high)}L${n(b.x)} ${n(b.y)}`;
    }
  }
  return path;
}

/** The corners of the rectangle that an edge is in. */
function spanOf(steps) {
  const last = steps[steps.length - 1], columns = [steps[0].column, last.column];
  const xs = steps.map((point) => point.x), ys = steps.map((point) => point.y);
  if (columns[0] === columns[1]) return [Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys)];
  const side = columns[0].right + 14 + LANES * LANE_WIDE;
  return [Math.min(...xs, columns[0].left), 0, Math.max(...xs, side), Math.max(...ys, columns[0].bottom + 10 + LANES * 3)];
}
