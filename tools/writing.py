# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Find what the writing rules of CONTRIBUTING.md exclude and a pattern can find; part of ``make lint``.

It reads the prose of README, of CONTRIBUTING and of the pages in ``docs``, without code, and the strings and docstrings
of ``src/python``. Generated pages, results, translations and the changelog are left out. One table has the patterns.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "python" / "xpuruntime"
#: Below ``docs``: translations, results of scripts, and pages that are written by tools.
_LEFT_OUT = (
    "ko/", "results/", "changelog.md", "contributing.md", "reference/cli.md", "reference/options.md",
    "reference/operators.md", "reference/report-keys.md", "reference/engine-keys.md", "reference/file-keys.md",
)  # fmt: skip
_STEMS = (
    "categor|character|custom|final|general|initial|local|material|normal|optim|organ|parallel|quant|"
    "recogn|serial|special|standard|summar|synchron|token|util|vector|visual"
)


#: Verbs of a what-clause, and those that follow it where the clause is the subject.
_VERBS = (
    "is|are|was|were|has|have|had|does|can|must|may|would|will|runs?|takes?|fits?|needs?|reads?|makes?|failed|changed"
)
_MAIN = "is|are|was|were|has|have|stays?|goes|becomes?|counts?|replaces?|comes|gets?"
_SUBORDINATE = "(?:when|while|before|after|that|which|where|whose|so)"


class Rule(NamedTuple):
    """A pattern of prose, and its replacement in words. `code`: whether strings of the sources are searched, too."""

    pattern: re.Pattern[str]
    instead: str
    code: bool = True


def _rule(pattern: str, instead: str, *, code: bool = True, flags: int = re.IGNORECASE) -> Rule:
    return Rule(re.compile(pattern, flags), instead, code)


RULES = (
    _rule(rf"\b(?:de|re|un)?(?:{_STEMS})is(?:e|ed|er|ers|es|ing|ation|ations)\b", "US spelling: -ize, -ization"),
    _rule(r"\b(?:favour|behaviour|colour|neighbour|flavour)\w*", "US spelling: -or"),
    _rule(
        r"\b(?:centre|licence|catalogue|grey|analys(?:e|ed|es|ing))\b",
        "US spelling: center, license, catalog, gray, analyze",
    ),
    _rule(r"\b(?:label|model|travel|signal)l(?:ed|ing)\b", "US spelling: one l"),
    _rule(
        rf"(?:^|(?<=[.:;!] )|(?<=\| ))What (?:\w+[ ,]+)*?(?:{_VERBS})\b"
        rf"(?:(?!\b{_SUBORDINATE}\b)[^.?!|:;,])*\b(?:{_MAIN})\b[^.?!|]*\.(?= |$)",
        "begin with a noun, not a what-clause",
        flags=re.MULTILINE,
    ),
    _rule(r"\b(?:is|are|was|were) not there\b", "negate with the verb: 'not found', 'missing'"),
    _rule(r"\bof (?!str\b)(?:\w+ ){1,3}of (?:\w+ ){1,3}of\b", "noun before noun, or a verb, not a chain of 'of'"),
    _rule(r"\bthe option that\b", "name the option", code=False),
)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def prose(text: str) -> str:
    """Return a Markdown page with blanks in place of code, addresses and comments; lines stay where they are."""
    for pattern in (
        r"(?s)\A---\n.*?\n---\n",
        r"(?ms)^ *```.*?^ *```",
        r"<!--.*?-->",
        r"(?m)^::: .*$",
        r"(?m)^    .*$",
        r"`[^`\n]*`",
        r'"[^"\n]*"',
        r"\]\([^)\n]*\)",
    ):
        text = re.sub(pattern, _blank, text)
    return text


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module that read as prose: with blanks between words; formatted values are left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 2:
            yield node.lineno, re.sub(r"`[^`\n]*`|'[^'\n]*'", _blank, node.value)


def findings(text: str, rules: tuple[Rule, ...] = RULES) -> Iterator[tuple[int, str, str]]:
    """Yield line, words and what to write instead. A paragraph is searched as one line."""
    joined = re.sub(r"(?<=\S)\n(?=[^\s|#*\-\d>])", " ", text)
    for rule in rules:
        for match in rule.pattern.finditer(joined):
            yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split())[:80], rule.instead


def pages() -> list[Path]:
    """Return the pages that somebody writes."""
    docs = [
        path
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if not path.relative_to(ROOT / "docs").as_posix().startswith(_LEFT_OUT)
    ]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs]


def main() -> int:
    """Print every finding; return 1 when there is one."""
    problems = []
    for page in pages():
        text = prose(page.read_text(encoding="utf-8"))
        for line, words, instead in findings(text):
            problems.append(f"{page.relative_to(ROOT)}:{line}: {words!r}: {instead}")
    code = tuple(rule for rule in RULES if rule.code)
    for module in sorted(SOURCE.rglob("*.py")):
        for line, text in strings(module.read_text(encoding="utf-8")):
            for more, words, instead in findings(text, code):
                problems.append(f"{module.relative_to(ROOT)}:{line + more - 1}: {words!r}: {instead}")
    for problem in problems:
        print(problem)
    print(f"writing: {len(problems)} findings")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
