# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The programs for several ranks on the pages on training run under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import ROOT, blocks

pytest.importorskip("torch")


GUIDES = ROOT / "docs" / "guides"


def torchrun(program: str, folder: Path) -> str:
    (folder / "ranks.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "ranks.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="gloo over torchrun is run on Linux and macOS")
def test_the_programs_for_several_ranks_run(tmp_path: Path) -> None:
    """That of the page on many GPUs, and the tuning that another page has in place of its training."""
    program = next(block.body for block in blocks(GUIDES / "many-gpus.md") if block.body.startswith("# torchrun"))
    torchrun(program, tmp_path)
    tuning = next(block.body for block in blocks(GUIDES / "tune-training.md") if "tuned.reset()" in block.body)
    assert "budget=10.0" in tuning
    printed = torchrun(program[: program.index("auto = ")] + tuning.replace("budget=10.0", "budget=1.0"), tmp_path)
    rows = [line.split()[0] for line in printed.splitlines() if line.startswith("  ")]
    assert rows[:2] == ["eager", "compile"]
