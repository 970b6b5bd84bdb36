# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Find the fenced blocks of a Markdown page.

Every Python block and every ``xrt`` line of a console block is run. A comment just before a block says otherwise:
``<!-- needs: cuda -->`` (run where there is a device), ``<!-- exit: 1 -->`` (of a console block) or
``<!-- not run: reason -->``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.M | re.S)
MARK = re.compile(r"<!-- (needs|exit|not run): ([^>]*?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    body: str
    mark: str | None
    value: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        mark = MARK.search(text[: match.start()])
        indent = match["indent"]
        body = "".join(line.removeprefix(indent) for line in match["body"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(page, line, match["language"], body, mark and mark[1], mark and mark[2]))
    return found


def pages() -> list[Path]:
    """Return every page that users read."""
    return [ROOT / "README.md", ROOT / "README.ko.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
