# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Hooks of MkDocs: two pages that are files at the root of the repository, and a language switch for each page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
KOREAN = "ko/"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace the body of those pages; their links into ``docs/`` become links within it."""
    source = PAGES.get(page.file.src_uri)
    if source is None:
        return markdown
    return (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")


def on_page_context(context: Any, *, page: Any, config: Any, **_: Any) -> Any:
    """Let the language menu of each page lead to the same page, or to the home of that language if there is none."""
    english = page.file.src_uri.removeprefix(KOREAN)
    there = {file.stem for file in (ROOT / "docs" / KOREAN).glob("*.md")}
    korean = english.removesuffix(".md") if english.removesuffix(".md") in there else "index"
    exists = (ROOT / "docs" / english).is_file()
    config.extra["alternate"] = [
        {"name": "English", "lang": "en", "link": f"{english.removesuffix('.md') if exists else 'index'}.html"},
        {"name": "한국어", "lang": "ko", "link": f"{KOREAN}{korean}.html"},
    ]
    return context
