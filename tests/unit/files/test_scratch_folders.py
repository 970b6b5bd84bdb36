# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Temporary folders of killed processes go with the next one's; those of living processes and of users stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

import xpuruntime as xrt
from xpuruntime.files.scratch import ScratchFolder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_dead_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = ["xpuruntime-observe-0123456789abcdef-01234567-abc", "xpuruntime-qnn-abc"]
    for name in mine:
        (tmp_path / name).mkdir()
    with ScratchFolder("observe") as alive:
        child = os.fork()
        if not child:
            folder = ScratchFolder("qnn")
            (tmp_path / folder.name / "file").write_bytes(b"x")
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        assert len(names(tmp_path)) == 4
        with ScratchFolder("converted"):
            assert len(names(tmp_path)) == 4, "the dead one is gone, and there is a new one"
        assert names(tmp_path) == sorted([*mine, os.path.basename(alive)])  # noqa: PTH119
    assert names(tmp_path) == sorted(mine)


def test_a_session_that_is_killed_while_it_is_explained(tmp_path: Path) -> None:
    """The next one that is explained removes what it has left."""
    kill = (
        "import os, signal, sys\n"
        "def hook(event, args):\n"
        "    if event == 'shutil.rmtree': os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.addaudithook(hook)\n"
    )
    code = (
        "import numpy as np, xpuruntime as xrt\n"
        "with xrt.InferenceSession(xrt.demo_model_path(), device='cpu', engine='onnxruntime') as session:\n"
        "    session.explain({'image': np.zeros((1, 1, 8, 8), np.float32)}, runs=1)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for text, status, left in ((kill + code, -signal.SIGKILL, 1), (code, 0, 0)):
        command = [sys.executable, "-W", "ignore", "-c", text, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert len([name for name in names(tmp_path) if name.startswith("xpuruntime")]) == left


def test_no_temporary_folder_is_an_error_of_ours_or_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="onnxruntime") as session:
        report = session.explain(runs=1)
    assert any("no temporary folder" in note for note in report.notes)
