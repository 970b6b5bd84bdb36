# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Hooks of MkDocs: pages that are files at the root of the repository, the list of modules, and a language switch."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
#: The page with this mark gets the list of modules in its place.
MODULES = "<!-- modules -->"
#: Likewise the table of levels, and that of the public names of each.
STABILITY = "<!-- stability -->"
PACKAGE = ROOT / "src" / "python" / "xpuruntime"
KOREAN = "ko/"
#: How much a page counts in a search, by the begin of its path; others, such as guides, count double, and tables of
#: results not at all.
BOOSTS = {"reference/python/": 0.2, "reference/": 1.0, "design/": 0.4, "changelog": 0.1}
#: Korean pages whose English page lies elsewhere than beside its folder.
MOVED = {"names.md": "reference/names.md"}


def summary(path: Path) -> str:
    """Return the first line of a module's docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0].replace("|", "\\|")


def modules() -> Iterator[str]:
    """Yield the lines of a section for each package: its modules and subpackages, each with its summary."""
    for package in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        yield f"### {package.name}\n\n{summary(package / '__init__.py')}\n\n| module | contents |\n|---|---|"
        files = {path.stem: path for path in package.glob("*.py") if path.stem != "__init__"}
        files |= {f"{path.parent.name}/": path for path in package.glob("*/__init__.py")}
        yield from (f"| `{name}` | {summary(files[name])} |" for name in sorted(files))
        yield ""


def stability() -> Iterator[str]:
    """Yield the lines of two tables: what each level promises, and the names of each package by level."""
    table = runpy.run_path(str(PACKAGE / "stability.py"))
    levels, marks = table["LEVELS"], table["__stability__"]
    yield "| level | a name of it |\n|---|---|"
    yield from (f"| {level} | {promise} |" for level, promise in levels.items())
    yield f"\n| package | {' | '.join(levels)} |\n|---|{'---|' * len(levels)}"
    for package in dict.fromkeys(name.rpartition(".")[0] for name in marks):
        own = {name.rpartition(".")[2]: level for name, level in marks.items() if name.rpartition(".")[0] == package}
        cells = (" ".join(f"`{name}`" for name in own if own[name] == level) for level in levels)
        yield f"| `{package}` | {' | '.join(cells)} |"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in the list of modules, or the body of a page from the root, with its links into ``docs/`` as local ones.

    Search puts guides before pages of the design, and these before the members of the API.
    """
    boosts = (boost for start, boost in BOOSTS.items() if page.file.src_uri.startswith(start))
    found = {"exclude": True} if page.file.src_uri.startswith("results/") else {"boost": next(boosts, 2.0)}
    page.meta.setdefault("search", found)
    if MODULES in markdown:
        return markdown.replace(MODULES, "\n".join(modules()))
    markdown = markdown.replace(STABILITY, "\n".join(stability()) if STABILITY in markdown else "")
    source = PAGES.get(page.file.src_uri)
    if source is None and "\n## " not in markdown.partition("\n::: ")[0]:  # names right below the title
        options = r"\1\n    options:\n      heading_level: 2\n"
        return re.sub(r"^(::: .+)\n(?: +options:\n)?", options, markdown, flags=re.MULTILINE)
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


def on_post_page(output: str, **_: Any) -> str:
    """Name the search for screen readers, make one landmark of a table of contents, let keys scroll code."""
    output = output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
    output = re.sub(r'<nav class="md-nav" aria-label="[^"]*">', '<nav class="md-nav" role="none">', output)
    output = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", output)  # the corner of a table is no heading
    return output.replace("<pre><span></span><code>", '<pre><span></span><code tabindex="0">')
