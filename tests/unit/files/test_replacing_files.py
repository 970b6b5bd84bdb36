# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Files that are replaced as a whole: who may read them, and what is no file."""

from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING

import pytest

import xpuruntime as xrt
from xpuruntime.evidence import Report
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
    assert [one.name for one in tmp_path.iterdir()] == [name]


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
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("report.json", b"old")]
