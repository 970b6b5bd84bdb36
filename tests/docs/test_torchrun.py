# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The program for several ranks on the page on tuning a training step runs under torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import ROOT, blocks

pytest.importorskip("torch")


@pytest.mark.skipif(sys.platform == "win32", reason="gloo over torchrun is run on Linux and macOS")
def test_the_program_for_several_ranks_runs(tmp_path: Path) -> None:
    page = ROOT / "docs" / "guides" / "tune-training.md"
    program = next(block.body for block in blocks(page) if block.body.startswith("# torchrun"))
    assert "budget=10.0" in program
    (tmp_path / "tune_ranks.py").write_text(program.replace("budget=10.0", "budget=1.0"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "tune_ranks.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert rows[:2] == ["eager", "compile"]
