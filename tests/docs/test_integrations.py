# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Blocks of the page on integrations that change the whole process: each is a program of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import ROOT, Block, blocks

PAGE = ROOT / "docs" / "guides" / "integrations.md"
PROGRAMS = [
    pytest.param(block, [one for one in found[index + 1 :] if one.language != "console"][:1], id=str(block))
    for found in [blocks(PAGE)]
    for index, block in enumerate(found)
    if block.language == "python" and block.marks.get("not run") == "in a process of its own"
]


@pytest.mark.parametrize(("block", "after"), PROGRAMS)
def test_a_program_prints_what_the_page_shows(block: Block, after: list[Block], reader_folder: Path):
    """Every line of the text after it is one that the program prints."""
    if missing := block.missing():
        pytest.skip(", ".join(missing))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", block.body], cwd=reader_folder, capture_output=True, text=True,
        check=False, timeout=240,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert [one.language for one in after] == ["text"]
    lines = {line.strip().rstrip(",") for line in printed.splitlines()}
    shown = [line.strip().rstrip(",") for line in after[0].body.splitlines() if line.strip() not in ("...", "")]
    assert not [line for line in shown if line not in lines], printed
