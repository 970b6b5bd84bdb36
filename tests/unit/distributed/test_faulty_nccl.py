# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A communicator over an NCCL with planted failures and stalls: see faulty_nccl_cases.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="NCCL is for Linux")
@pytest.mark.skipif(find_spec("nccl") is None, reason="needs nccl4py")
def test_what_a_communicator_does_when_nccl_fails(tmp_path: Path):
    """In a process of its own, which can have one libnccl only."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    built = tmp_path / "libnccl.so.2"
    subprocess.run(
        [compiler, "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-Wall", "-Wextra", "-Werror", "-o",
         str(built), str(HERE / "faulty_nccl.cpp")],
        check=True,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "faulty_nccl_cases.py")],
        env={**os.environ, "FAULTY_NCCL": str(built)}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout
