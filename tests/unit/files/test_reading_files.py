# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Every reader given what is no regular file, or a huge one: an xpuruntime error, at once and in little memory."""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.cli.session import read_feeds
from xpuruntime.distributed import read_choices
from xpuruntime.engines.registry import read_model
from xpuruntime.engines.tensorrt.building import CacheFile
from xpuruntime.evidence import Report, compare_reports
from xpuruntime.files.reading import open_regular, read_regular
from xpuruntime.ops.plugins import load_library
from xpuruntime.ops.tuning_cache import TuningCache
from xpuruntime.runtime.snapshot import load_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")

MODEL = xrt.demo_model_path()
INT8: dict[str, Any] = {"device": "cpu", "engine": "onnxruntime", "precision": "int8"}


def entry() -> dict[str, Any]:
    return {"times": [{"kernel": "a.b", "config": "", "microseconds": 1.0}], "validators": {}}


def tuning(path: str) -> None:
    """It never raises: what is wrong comes back as a note."""
    cache = TuningCache(path)
    notes = [cache.find("k", {})[1], cache.put("k", entry())]
    if all(notes):
        raise xrt.InputError("; ".join(notes))


def feed(path: str) -> None:
    read_feeds(read_model(MODEL), [f"image=@{path}"])


def artifact_file(path: str) -> None:
    """As a file that an artifact lists, and as its manifest."""
    folder = Path(f"{path}.xrt")
    if not folder.exists():
        xrt.compile_model(MODEL, folder, device="cpu", engine="onnxruntime")
    for name in ("model.onnx", "manifest.json"):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).symlink_to(path)
        with pytest.raises(xrt.ModelError):
            xrt.InferenceSession(folder)
        (folder / name).unlink()
        (folder / name).write_bytes(kept)
    raise xrt.ModelError("both")


#: What reads a file that a user names.
READERS: dict[str, Callable[[str], object]] = {
    "model": lambda path: xrt.plan(path, device="cpu"),
    "session": lambda path: xrt.InferenceSession(path, device="cpu"),
    "program": lambda path: xrt.plan(named(path, ".pt2"), device="cpu"),
    "artifact": lambda path: xrt.InferenceSession(named(path, ".xrt")),
    "file of an artifact": artifact_file,
    "report": Report.load,
    "two reports": lambda path: compare_reports(path, path),
    "policy": lambda path: xrt.Policy.load(named(path, ".yaml")),
    "policy of a session": lambda path: xrt.plan(MODEL, policy=named(path, ".json")),
    "machine": load_machine,
    "array": feed,
    "calibration": lambda path: xrt.InferenceSession(MODEL, calibration=named(path, ".npz"), **INT8),
    "calibration array": lambda path: xrt.InferenceSession(MODEL, calibration=named(path, ".npy"), **INT8),
    "tuning cache": tuning,
    "vendor's cache": lambda path: CacheFile(Path(path)).update(lambda before: before),
    "log of NCCL": read_choices,
    "kernel library": load_library,
}


def named(path: str, ending: str) -> str:
    """Return a link of that ending, for readers that look at it first."""
    link = Path(f"{path}-link{ending}")
    if not link.is_symlink():
        link.symlink_to(path)
    return str(link)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """What reads ``/dev/zero`` or a file of terabytes ends with an error instead of taking the machine down."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with Path("/proc/self/statm").open() as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def make(kind: str, folder: Path) -> str:
    path = folder / "f"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            here = Path.cwd()
            os.chdir(folder)  # its path may be long
            bound.bind("f")
            os.chdir(here)
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 43)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"dangling": "nowhere", "loop": "f"}.get(kind, kind))
    return str(path)


KINDS = ("pipe", "socket", "huge", "folder", "dangling", "loop", "/dev/zero", "/dev/full", "/proc/self/mem")
#: What is right to be read, or is read by nobody.
FINE = {
    ("vendor's cache", "dangling"), ("log of NCCL", "/proc/self/mem"), ("vendor's cache", "/proc/self/mem"),
    ("tuning cache", "dangling"),
}  # fmt: skip


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_to_read_is_refused(tmp_path: Path, reader: str, kind: str) -> None:
    path = make(kind, tmp_path)
    if (reader, kind) in FINE:
        READERS[reader](path)
    else:
        with pytest.raises(xrt.XpuRuntimeError) as told:
            READERS[reader](path)
        assert str(told.value)
        assert not isinstance(told.value, MemoryError)


def test_a_regular_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"content")
    (tmp_path / "l").symlink_to("f")
    for name in ("f", "l"):
        assert read_regular(tmp_path / name, 7) == b"content"
        with pytest.raises(OSError, match="it has 7 bytes, and at most 6 are read"):
            read_regular(tmp_path / name, 6)
    np.save(tmp_path / "x.npy", np.arange(3))
    with open_regular(tmp_path / "x.npy") as file:
        assert np.load(file).tolist() == [0, 1, 2]


def test_a_pipe_among_libraries_and_packages(tmp_path: Path) -> None:
    """They are looked through by name: one in a folder of libraries must not hold up ``xrt doctor``."""
    from xpuruntime.runtime.libraries.search import read_elf
    from xpuruntime.runtime.packages import distributions

    os.mkfifo(tmp_path / "libcudart.so.12")
    with pytest.raises(xrt.InputError, match="it is a pipe, not a regular file"):
        read_elf(tmp_path / "libcudart.so.12")
    (tmp_path / "p-1.0.dist-info").mkdir()
    os.mkfifo(tmp_path / "p-1.0.dist-info" / "RECORD")
    (found,) = distributions([str(tmp_path)])
    assert found.files() is None


def test_an_artifact_is_replaced_through_a_link_and_never_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    xrt.compile_model(MODEL, "a.xrt", device="cpu", engine="onnxruntime")
    Path("link").symlink_to("a.xrt")
    before = Path("a.xrt").stat().st_ino
    xrt.compile_model(MODEL, "link", device="cpu", engine="onnxruntime", overwrite=True)
    assert Path("link").is_symlink()
    assert Path("a.xrt").stat().st_ino != before
    with xrt.InferenceSession("a.xrt") as session:
        for place in ("a.xrt", "link", "./link"):
            with pytest.raises(xrt.InputError, match="the artifact that the session is made from"):
                session.save_compiled(place, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.xrt", "link"]
