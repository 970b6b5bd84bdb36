# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Full disks and closed streams: one line that names the place, the documented exit code, and nothing half written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CALL = f"{sys.executable} -c 'from xpuruntime.cli import main; main()'"
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="streams of POSIX")


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)


@FULL
@pytest.mark.parametrize("arguments", ["plan {} --device cpu", "plan {} --device cpu --json", "policy schema"])
def test_standard_output_that_is_full_is_named(digits: str, arguments: str) -> None:
    done = shell(f"{CALL} {arguments.format(digits)} >/dev/full")
    assert done.returncode == 3
    assert done.stderr == "error: standard output: No space left on device\n"


def test_closed_streams_are_no_bug(digits: str) -> None:
    done = shell(f"{CALL} plan {digits} --device cpu >&-")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(f"{CALL} plan {digits} --device cpu --json 2>&-")
    assert done.returncode == 0
    assert done.stdout.startswith("{")
    done = shell(f"{CALL} plan {digits} --device nonsense 2>&- >&-")
    assert done.returncode == 2


def test_an_output_that_grows_too_large_is_named_and_leaves_the_old_file(digits: str, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    out.write_bytes(b"old")
    done = shell(f"ulimit -f 0; {CALL} run {digits} --device cpu --output {out}")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == f"error: {out}: File too large"
    assert [path.name for path in tmp_path.iterdir()] == ["out.npz"]
    assert out.read_bytes() == b"old"
