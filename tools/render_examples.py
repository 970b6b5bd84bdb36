# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Render the pages of ``docs/examples`` again, by the style, script and frame of today, with their own data.

``python tools/render_examples.py`` after a change of the page; ``tools/example_reports.py`` makes new data, on a GPU.
"""

from __future__ import annotations

import html
import sys
from pathlib import Path

import msgspec

from xpuruntime.evidence.page.document import assemble
from xpuruntime.evidence.page.report import PARTS

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "examples"
_DATA = '<script type="application/json" id="data">'
_NOTE = "<p>Charts, the table"


def rendered(page: str) -> str:
    """Return a page of a report as it is rendered today.

    Raises
    ------
    ValueError
        It is no page of a report.
    """
    if _DATA not in page or "<noscript>" not in page:
        raise ValueError("this is no page of a report: its data or its table for browsers without scripts is missing")
    title = html.unescape(_between(page, "<title>", "</title>"))
    data = msgspec.json.decode(_between(page, _DATA, "</script>"))
    fragment = _between(page, "<noscript>", "</noscript>").partition(_NOTE)[0]
    return assemble("page.html", "report", PARTS, title, data, fragment)


def _between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]


def main() -> int:
    """Render all pages."""
    for path in sorted(FOLDER.glob("*.html")):
        before = path.read_text(encoding="utf-8")
        after = rendered(before)
        path.write_text(after, encoding="utf-8")
        print(f"{path.name}: {'as it was' if after == before else 'rendered again'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
