# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A captured training step is locked, and fresh processes under the lock run its kernels with the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xpuruntime.lockfile.canonical import load_lock

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


def run(path: Path) -> dict[str, Any]:
    program = Path(__file__).with_name("locked_step.py")
    process = subprocess.run([sys.executable, program, "cuda:0", path], check=True, stdout=subprocess.PIPE, timeout=300)
    document: dict[str, Any] = json.loads(process.stdout)
    return document


def test_fresh_processes_run_what_was_locked(tmp_path: Path) -> None:
    path = tmp_path / "step.lock"
    first = run(path)
    locked = path.read_bytes()
    wanted = {call.kernel for call in load_lock(path).identity.calls}
    assert wanted
    for _ in range(2):
        again = run(path)
        assert again == first  # kernels with their configurations, losses and parameters to the last bit
    assert path.read_bytes() == locked
    assert wanted <= {kernel.rpartition(": ")[2] for kernel in first["kernels"]}
