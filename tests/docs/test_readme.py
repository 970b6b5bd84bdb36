# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The README is short, and the output that it shows is what its commands print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from docs_blocks import NEEDS, ROOT, Block, blocks

README = ROOT / "README.md"
#: What an excerpt needs beside the core.
ENGINES = ("openvino",)


def shape(text: str) -> str:
    """Return a text without figures, bars, rules and runs of blanks, which differ from run to run."""
    text = re.sub(r"[─━#]+", " ", text)
    return re.sub(r"\s+", " ", re.sub(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?%?", "N", text))


def pairs() -> list[tuple[Block, Block]]:
    """Return each console block with the output below it."""
    found = blocks(README)
    return [(one, two) for one, two in pairwise(found) if (one.language, two.language) == ("console", "text")]


def test_it_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    assert len(pairs()) == 4


@pytest.mark.parametrize(("command", "shown"), pairs(), ids=lambda block: block.body.split("\n")[0])
def test_excerpts_are_printed(command: Block, shown: Block, reader_folder: Path):
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
    printed = shape(done.stdout + done.stderr)
    for line in filter(None, map(str.strip, shown.body.splitlines())):
        for piece in filter(None, (shape(part).strip() for part in line.split("..."))):
            assert piece in printed, f"{shown}: {line}\n{done.stdout}\n{done.stderr}"
