# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The README is short, and the output that it shows is what its commands print."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import NEEDS, ROOT, Block, blocks, not_printed

README = ROOT / "README.md"
#: What an excerpt needs beside the core.
ENGINES = ("openvino",)


def excerpts() -> list[Block]:
    """Return each console block with output below it."""
    return [block for block in blocks(README) if block.language == "console" and block.shown]


def test_it_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    assert len(excerpts()) == 4


@pytest.mark.parametrize("command", excerpts(), ids=lambda block: block.body.split("\n")[0])
def test_excerpts_are_printed(command: Block, reader_folder: Path):
    if "cuda:0" in command.body and NEEDS["cuda"][0]():
        pytest.skip("the excerpt is of a machine without a GPU")
    if any(engine in command.body and not NEEDS[engine][0]() for engine in ENGINES):
        pytest.skip(", ".join(NEEDS[engine][1] for engine in ENGINES))
    for words in map(shlex.split, command.body.splitlines()):
        done = subprocess.run(
            [Path(sys.executable).with_name(words[0]), *words[1:]],
            capture_output=True, text=True, check=False, timeout=240, env={**os.environ, "COLUMNS": "160"},
        )  # fmt: skip
    assert done.returncode == int(command.marks.get("exit", 3 if "cuda:0" in command.body else 0)), done.stderr
    printed = done.stdout + done.stderr
    assert not not_printed(command.shown, printed), printed
