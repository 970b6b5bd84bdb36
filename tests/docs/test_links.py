# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Links between files of the repository lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_blocks import ROOT, pages

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def broken(page: Path) -> list[str]:
    targets = LINK.findall(re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.S))
    local = [t for t in targets if "://" not in t and not t.startswith("mailto:")]
    return [t for t in local if not (page.parent / t).exists()]


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in pages()])
def test_links_between_files(page: Path):
    assert not broken(page), f"{page.relative_to(ROOT)} links to files that do not exist: {broken(page)}"


@pytest.mark.parametrize(
    ("english", "korean"),
    [
        ("README.md", "README.ko.md"),
        ("docs/index.md", "docs/ko/index.md"),
        ("docs/quickstart.md", "docs/ko/quickstart.md"),
        ("docs/concepts.md", "docs/ko/concepts.md"),
    ],
)
def test_a_korean_page_links_to_what_the_english_one_does(english: str, korean: str):
    translated = {(ROOT / "docs" / "reference" / "names.md"): ROOT / "docs" / "ko" / "names.md"}
    translated |= {
        ROOT / "docs" / f"{name}.md": ROOT / "docs" / "ko" / f"{name}.md" for name in ("quickstart", "concepts")
    }

    def targets(name: str) -> set[Path]:
        found = {((ROOT / name).parent / t).resolve() for t in LINK.findall((ROOT / name).read_text(encoding="utf-8"))}
        return {translated.get(path, path) for path in found if path.suffix == ".md" and path.stem != "README.ko"}

    assert targets(english) - targets(korean) == set()


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")]
    missing = [name for name in missing if f": {name}\n" not in navigation]
    assert not missing, f"not in mkdocs.yml: {missing}"


def tables(page: Path) -> list[list[str]]:
    """Return the blocks of lines that look like tables, outside of fences."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    return [block.strip().splitlines() for block in re.findall(r"(?:^\|.*\n)+", text + "\n", re.M)]


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in pages()])
def test_tables_are_whole(page: Path):
    """A blank line in a table, or a cell too many, shows its rows as text."""
    for rows in tables(page):
        assert len(rows) > 2, f"{page.name}: not a table, or cut in two: {rows[0][:80]}"
        assert re.fullmatch(r"\|(?: *:?-+:? *\|)+", rows[1]), f"{page.name}: the table lost its head: {rows[0][:80]}"
        # A bar inside of code is written as \\| in a table.
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
        assert len(widths) == 1, f"{page.name}: rows of {widths} cells below: {rows[0][:80]}"
