# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Words of closed lists: the documentation defines each one, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from xpuruntime.evidence import Enforceability, Status
from xpuruntime.locks.verification.claims import ClaimVerdict

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("words", "page", "head"),
    [
        (Enforceability, "concepts.md", "enforceability"),
        (Status, "concepts.md", "status"),
        (ClaimVerdict, "guides/verify.md", "verdict"),
    ],
    ids=["enforceability", "status", "verdict of a claim"],
)
def test_words_are_defined(words: Any, page: str, head: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    match = re.search(rf"^\| {head} \| [^\n]*\n\|[-|]+\|\n((?:\|[^\n]+\n)+)", text, re.M)
    assert match is not None, f"{page} has no table of {head}"
    defined = re.findall(r"^\| `(\w+)` \| \S", match[1], re.M)
    assert sorted(defined) == sorted(get_args(words))
