# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Runs and sessions without growth of memory: the script of `make bench`, which does five times as many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_memory_does_not_grow(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--out", str(tmp_path)]
    command += ["--runs", "200000", "--sessions", "500"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "soak_cpu.json").read_text())
    assert record["runs"]["times"] == 200_000
    assert record["sessions"]["times"] == 500
