# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Write the diagrams of the documentation, ``docs/assets/*.svg``, from boxes on a grid and arrows between them.

``python tools/diagrams.py`` writes; ``--check`` only says whether the files are up to date (``make lint``).
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from diagram_data import DESIGN, Arrow, Box, Diagram

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "assets"
GAP_X, GAP_Y, MARGIN, LINE = 52, 40, 14, 23
#: Colors by light and dark: of the page, of text, of small text and lines, and fill and border of each kind of box.
COLORS = {
    "page": ("#fbfbfe", "#1f2129"),
    "text": ("#1a1c2b", "#eceef6"),
    "line": ("#43465a", "#b9bdd0"),
}
KINDS = {
    "data": (("#e8eaf6", "#3f51b5"), ("#2a2f52", "#8c9eff")),
    "step": (("#e0f2f1", "#00796b"), ("#143b38", "#4db6ac")),
    "stop": (("#fdecea", "#b3261e"), ("#4a1f1c", "#ef9a9a")),
}


def colors(scheme: int) -> str:
    """Return the rules of a scheme: 0 is light, 1 is dark."""
    page, text, line = (pair[scheme] for pair in COLORS.values())
    kinds = "".join(f".{kind}{{fill:{pair[scheme][0]};stroke:{pair[scheme][1]}}}" for kind, pair in KINDS.items())
    return f".page{{fill:{page}}}text{{fill:{text}}}.s,.a,#end{{fill:{line}}}.f{{stroke:{line}}}{kinds}"


STYLE = (
    "text{font-family:system-ui,'Noto Sans','Noto Sans KR',sans-serif;text-anchor:middle}"
    ".h{font-size:21px;font-weight:600}.s{font-size:17px}.a{font-size:15px}"
    ".f{fill:none;stroke-width:2;marker-end:url(#end)}.d{stroke-dasharray:6 5}"
    f"{colors(0)}@media(prefers-color-scheme:dark){{{colors(1)}}}"
)


def loop(texts: dict[str, tuple[str, str, str]], title: str) -> Diagram:
    """Return the loop of the product: three boxes to the right, three back."""
    places = {"policy": (0, 0), "plan": (1, 0), "run": (2, 0), "evidence": (2, 1), "lock": (1, 1), "verify": (0, 1)}
    boxes = {}
    for name, (column, row) in places.items():
        head, *lines = texts[name]
        boxes[name] = Box(column, row, head, tuple(lines), "step" if name in ("run", "verify") else "data")
    arrows = [Arrow(a, b) for a, b in pairwise(places)]
    return Diagram(title, 212, boxes, (*arrows, Arrow("verify", "policy")))


DIAGRAMS = {
    "loop": loop(
        {
            "policy": ("policy", "what you request,", "in one file"),
            "plan": ("plan", "what will run, and why", "the rest was rejected"),
            "run": ("run", "as planned,", "or an error"),
            "evidence": ("evidence", "what ran, beside", "what was requested"),
            "lock": ("lock", "pins what ran", "for later runs"),
            "verify": ("verify", "fails if anything", "has changed"),
        },
        "policy, plan, run, evidence, lock, verify",
    ),
    "loop.ko": loop(
        {
            "policy": ("정책 policy", "요청한 것을", "파일 하나에 적는다"),
            "plan": ("계획 plan", "무엇을 실행할지,", "나머지는 왜 거부했는지"),
            "run": ("실행 run", "계획대로 실행하거나", "오류를 낸다"),
            "evidence": ("증거 evidence", "실제로 실행된 것과", "요청한 것을 비교한다"),
            "lock": ("잠금 lock", "실행된 것을", "고정한다"),
            "verify": ("검증 verify", "달라진 것이 있으면", "실패한다"),
        },
        "정책, 계획, 실행, 증거, 잠금, 검증",
    ),
    **DESIGN,
}


def height_of(diagram: Diagram, row: int) -> int:
    """Return the height of a row: that of its tallest box."""
    return max(22 + LINE * (1 + len(box.lines)) for box in diagram.boxes.values() if box.row == row)


def frame(diagram: Diagram, box: Box) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a box."""
    top = MARGIN + sum(height_of(diagram, row) + GAP_Y for row in range(box.row))
    return MARGIN + box.column * (diagram.width + GAP_X), top, diagram.width, height_of(diagram, box.row)


def draw_box(diagram: Diagram, box: Box) -> str:
    """Return a rectangle with its lines of text."""
    left, top, width, height = frame(diagram, box)
    parts = [
        f'<rect class="{box.kind}" x="{left}" y="{top}" width="{width}" height="{height}" rx="9" stroke-width="2"/>'
    ]
    middle, y = left + width // 2, top + (height - LINE * (1 + len(box.lines))) // 2 + 16
    parts.append(f'<text class="h" x="{middle}" y="{y}">{escape(box.head)}</text>')
    for index, line in enumerate(box.lines, 1):
        parts.append(f'<text class="s" x="{middle}" y="{y + index * LINE}">{escape(line)}</text>')
    return "\n".join(parts)


def draw_arrow(diagram: Diagram, arrow: Arrow) -> str:
    """Return a straight line, or a curve where neither row nor column is shared."""
    one, two = diagram.boxes[arrow.start], diagram.boxes[arrow.end]
    left, top, width, height = frame(diagram, one)
    left2, top2, width2, height2 = frame(diagram, two)
    if one.row == two.row:
        y = y2 = top + height // 2
        x, x2 = (left + width, left2) if left < left2 else (left, left2 + width2)
        text = ((x + x2) // 2, y - 8)
    elif one.column == two.column:
        x = x2 = left + width // 2
        y, y2 = (top + height, top2) if top < top2 else (top, top2 + height2)
        text = (x + 8, (y + y2) // 2 + 5)
    else:
        # A curve in the gap between the columns, from side to side.
        y, y2 = top + height // 2, top2 + height2 // 2
        x, x2 = (left + width, left2) if left < left2 else (left, left2 + width2)
        text = ((x + x2) // 2, (y + y2) // 2 - 6)
    dashes = " d" if arrow.dashed else ""
    way = f"L{x2},{y2}" if x == x2 or y == y2 else f"C{(x + x2) // 2},{y} {(x + x2) // 2},{y2} {x2},{y2}"
    line = f'<path class="f{dashes}" d="M{x},{y} {way}"/>'
    anchor = ' style="text-anchor:start"' if one.column == two.column else ""
    label = f'<text class="a" x="{text[0]}" y="{text[1]}"{anchor}>{escape(arrow.label)}</text>' if arrow.label else ""
    return f"{line}\n{label}" if label else line


def drawing(diagram: Diagram) -> str:
    """Return the SVG."""
    rows = 1 + max(box.row for box in diagram.boxes.values())
    columns = 1 + max(box.column for box in diagram.boxes.values())
    width = 2 * MARGIN + columns * diagram.width + (columns - 1) * GAP_X
    height = 2 * MARGIN + sum(height_of(diagram, row) for row in range(rows)) + (rows - 1) * GAP_Y
    body = [draw_box(diagram, box) for box in diagram.boxes.values()]
    body += [draw_arrow(diagram, arrow) for arrow in diagram.arrows]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img">',
            "<!-- Written by tools/diagrams.py. -->",
            f"<title>{escape(diagram.title)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="end" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0,0 L10,5 L0,10 z"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="12" class="page"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def main() -> int:
    """Write or check the files."""
    check, stale = "--check" in sys.argv[1:], []
    FOLDER.mkdir(exist_ok=True)
    for name, diagram in DIAGRAMS.items():
        path, fresh = FOLDER / f"{name}.svg", drawing(diagram)
        if path.is_file() and path.read_text(encoding="utf-8") == fresh:
            continue
        stale.append(path.relative_to(ROOT))
        if not check:
            path.write_text(fresh, encoding="utf-8")
    if check and stale:
        print(f"error: not up to date: {', '.join(map(str, stale))}; run python tools/diagrams.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
