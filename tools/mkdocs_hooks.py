# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Hooks of MkDocs: two pages that are files at the root of the repository, and a language switch for each page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
KOREAN = "ko/"
#: Korean pages whose English page lies elsewhere than beside its folder.
MOVED = {"names.md": "reference/names.md"}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace the body of those pages; their links into ``docs/`` become links within it."""
    source = PAGES.get(page.file.src_uri)
    if source is None:
        return markdown
    return (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")


def on_page_context(context: Any, *, page: Any, config: Any, **_: Any) -> Any:
    """Set the language of a page, and link its language menu to the translation, or to the home of that language."""
    pairs = {MOVED.get(file.name, file.name): file.name for file in (ROOT / "docs" / KOREAN).glob("*.md")}
    config.theme["language"] = "ko" if page.file.src_uri.startswith(KOREAN) else "en"
    own = page.file.src_uri.removeprefix(KOREAN)
    english = MOVED.get(own, own)
    config.extra["alternate"] = [
        {"name": "English", "lang": "en", "link": f"{english.removesuffix('.md')}.html"},
        {"name": "한국어", "lang": "ko", "link": f"{KOREAN}{pairs.get(english, 'index.md').removesuffix('.md')}.html"},
    ]
    return context
