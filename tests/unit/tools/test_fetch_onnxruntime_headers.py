# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`tools/fetch_onnxruntime_headers.sh` where it cannot work: one message with a reason and a fix, and nothing left."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "fetch_onnxruntime_headers.sh"
with_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get")


def fetch(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(SCRIPT), str(folder)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def refused(done: subprocess.CompletedProcess[str], folder: Path, *words: str) -> None:
    assert done.returncode == 1
    assert done.stderr.startswith(f"the headers of ONNX Runtime cannot be fetched into {folder}\n  reason: ")
    assert "\n  fix:    " in done.stderr
    for word in words:
        assert word in done.stderr
    assert not folder.exists()


def test_without_apt(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "printf"):
        (tools / name).symlink_to(shutil.which(name) or "/bin/sh")
    folder = tmp_path / "headers"
    refused(fetch(folder, PATH=str(tools)), folder, "no apt-get", "-DXPURUNTIME_ONNXRUNTIME_INCLUDE_DIR")


@with_apt
def test_a_mirror_that_does_not_answer(tmp_path: Path) -> None:
    mirror, folder = f"file:{tmp_path}/nothing", tmp_path / "headers"
    keyring = tmp_path / "keys.gpg"
    keyring.write_bytes(b"")
    done = fetch(folder, XPURUNTIME_DEBIAN_MIRROR=mirror, XPURUNTIME_DEBIAN_KEYRING=str(keyring))
    refused(done, folder, "the list of packages of 'trixie' could not be had", mirror, "XPURUNTIME_DEBIAN_MIRROR")


@with_apt
def test_a_keyring_that_is_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "headers"
    settings = {"XPURUNTIME_DEBIAN_MIRROR": "file:/nothing", "XPURUNTIME_DEBIAN_KEYRING": str(tmp_path / "none.gpg")}
    refused(fetch(folder, **settings), folder, "none.gpg is not there", "debian-archive-keyring")
