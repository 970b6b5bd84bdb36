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


@pytest.mark.skipif(sys.platform == "win32", reason="gloo over torchrun is run on Linux and macOS")
@pytest.mark.parametrize("page", ["tune-training.md", "many-gpus.md"])
def test_the_program_for_several_ranks_runs(page: str, tmp_path: Path) -> None:
    text = ROOT / "docs" / "guides" / page
    program = next(block.body for block in blocks(text) if block.body.startswith("# torchrun"))
    assert ("budget=10.0" in program) == (page == "tune-training.md")
    (tmp_path / "ranks.py").write_text(program.replace("budget=10.0", "budget=1.0"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "ranks.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if page == "tune-training.md":
        rows = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
        assert rows[:2] == ["eager", "compile"]
