# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The map from questions to files, ``docs/design/where.md``, names files and symbols that exist."""

from __future__ import annotations

import re

import pytest
from docs_blocks import ROOT

ROW = re.compile(r"^\| ([^|]+\?) \| `([^`|]+)` \| `([^`|]+)` \|$", re.M)
ROWS = ROW.findall((ROOT / "docs" / "design" / "where.md").read_text(encoding="utf-8"))


def test_there_are_twenty_questions():
    assert len({question for question, _, _ in ROWS}) == len(ROWS) >= 20


@pytest.mark.parametrize(("question", "path", "name"), ROWS)
def test_the_file_exists_and_has_the_name(question: str, path: str, name: str):
    assert (ROOT / path).is_file(), question
    assert name in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {name!r}: {question}"
