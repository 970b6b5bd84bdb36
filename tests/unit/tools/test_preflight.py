# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a newcomer is told on a machine that lacks something."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = shlex.quote(sys.executable)
SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "preflight.sh"


def preflight(python: Path | str, compiler: Path | str = "") -> subprocess.CompletedProcess[str]:
    command = ["sh", str(SCRIPT), str(python), str(compiler)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def program(tmp_path: Path):
    def write(name: str, body: str) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return write


def test_a_complete_machine_passes_without_a_word():
    done = preflight(sys.executable)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_missing_python(tmp_path: Path):
    done = preflight(tmp_path / "python9")
    assert done.returncode == 1
    assert "no Python" in done.stderr
    assert "make PYTHON=" in done.stderr


def test_old_python(program):
    old = program("python3", 'case "$*" in *version_info*) exit 1 ;; -V) echo Python 3.8.9 ;; esac')
    done = preflight(old)
    assert done.returncode == 1
    assert "Python 3.8.9; 3.11 or newer is needed" in done.stderr


def test_python_without_venv(program):
    bare = program("python3", f'case "$*" in *ensurepip*) exit 1 ;; *) exec {PYTHON} "$@" ;; esac')
    done = preflight(bare)
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr


def test_missing_compiler(tmp_path: Path):
    done = preflight(sys.executable, tmp_path / "g++")
    assert done.returncode == 1
    assert "no C++ compiler" in done.stderr
    assert str(tmp_path / "g++") in done.stderr


def test_everything_missing_is_said_at_once(tmp_path: Path):
    done = preflight(tmp_path / "python3", tmp_path / "g++")
    assert done.stderr.count("xpuruntime cannot be built here") == 2
