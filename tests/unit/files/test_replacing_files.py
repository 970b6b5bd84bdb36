# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Files that replace others, and scratch folders."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING

import pytest

import xpuruntime as xrt
from xpuruntime.evidence import Report
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.files.writing import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def trace(path: Path) -> None:
    with xrt.profile(path, devices=False):
        pass


WRITERS: dict[str, Callable[[Path], object]] = {
    "report.json": Report().save,
    "page.html": Report().save_html,
    "trace.json": trace,
}


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("name", WRITERS)
def test_who_may_read_what_a_user_asked_for(tmp_path: Path, name: str) -> None:
    """A page is sent to others: as any new file it has the permissions that the user gives new files."""
    path = tmp_path / name
    WRITERS[name](path)
    assert mode(path) == 0o640
    for kept in (0o600, 0o664):
        path.chmod(kept)
        WRITERS[name](path)
        assert mode(path) == kept
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.usefixtures("umask")
def test_files_of_our_own_are_the_owners(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    path.write_bytes(b"old")
    replace_file(path, b"new")
    assert (path.read_bytes(), mode(path)) == (b"new", 0o600)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_bytes(b"old")
    link.symlink_to(real)
    replace_file(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    """As ``--output /dev/stdout`` and ``--html >(less)`` are; who is root would else lose ``/dev/null``."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    Report().save(pipe)
    reader.join(10)
    assert Report().to_json().encode() + b"\n" == read[0]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(xrt.InputError, match="No space left on device"):
        Report().save(path)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("report.json", b"old")]


needs_sigkill = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@needs_sigkill
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


@needs_sigkill
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
