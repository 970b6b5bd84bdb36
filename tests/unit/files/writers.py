# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Everything in the package that writes files, and a program that kills or starves each of them at every step."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from compile_tools import SlowEngine

import xpuruntime as xrt
from xpuruntime.artifacts.manifest import open_artifact
from xpuruntime.artifacts.store import copy_artifact
from xpuruntime.cli.results import save_outputs
from xpuruntime.engines.tensorrt.building import CacheFile
from xpuruntime.evidence import Report
from xpuruntime.evidence.profile import write_trace
from xpuruntime.files import writing
from xpuruntime.files.writing import check_writable, files_beside
from xpuruntime.lockfile.canonical import load_lock, save_lock
from xpuruntime.lockfile.records import Identity, Lock, Provenance
from xpuruntime.ops.tuning_cache import TuningCache

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = xrt.demo_model_path()
LOG = Path(tempfile.gettempdir(), f"xpuruntime-writers-{os.getpid()}.log")
#: Names of audit events at which a writer may be killed.
STEPS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "os.chmod")


def compile_(target: Path, word: str) -> None:
    registry = SlowEngine(LOG, version=word).registry()
    xrt.compile_model(MODEL, target, engine="slow", device="cpu", registry=registry, overwrite=True)


def version(target: Path) -> str:
    return open_artifact(target).manifest.target["slow"]


def copy(target: Path, word: str) -> None:
    source = LOG.with_name(f"{LOG.name}.{word}.xrt")
    if not source.exists():
        compile_(source, word)
    copy_artifact(open_artifact(source), target, overwrite=True)


def keep(target: Path, word: str) -> None:
    entry = {"times": [{"kernel": word, "config": "", "microseconds": 1.0}], "validators": {}}
    note = TuningCache(target).put("k", entry)
    if note:
        raise xrt.XpuRuntimeError(note)


def kept(target: Path) -> str:
    entry, note = TuningCache(target).find("k", {})
    assert entry is not None, note
    return str(entry["times"][0]["kernel"])


def export(target: Path, word: str) -> None:
    """As `xpuruntime.pytorch.export` writes, which takes seconds to import."""
    with files_beside(target) as place:
        place.with_name("weights.data").write_bytes(b"w" * 100)
        place.write_bytes(word.encode() * 1000)


def write_page(target: Path, word: str) -> None:
    Report(command=word).save_html(target)


def page(target: Path) -> str:
    text = target.read_text()
    assert text.endswith("</html>\n")
    return "one" if '"command":"one"' in text else "two"


def whole(target: Path) -> str:
    text = target.read_text()
    assert len(text) == 3000
    return text[:3]


def load_outputs(target: Path) -> str:
    with np.load(target) as arrays:
        return "one" if (arrays["y"] == 1).all() else "two"


#: Name of a target to how "one" or "two" is written there and which is read back.
WRITERS: dict[str, tuple[Callable[[Path, str], object], Callable[[Path], str]]] = {
    "compiled.xrt": (compile_, version),
    "copied.xrt": (copy, version),
    "report.json": (lambda target, word: Report(command=word).save(target), lambda t: Report.load(t).command),
    "page.html": (write_page, page),
    "trace.json": (lambda t, word: write_trace(t, {"word": word}), lambda t: json.loads(t.read_text())["word"]),
    "policy.yaml": (
        lambda t, word: xrt.Policy(mode={"one": "strict", "two": "auto"}[word]).save(t),
        lambda t: {"strict": "one", "auto": "two"}[xrt.Policy.load(t).mode],
    ),
    "tuning.json": (keep, kept),
    "vendor.timing": (lambda t, word: CacheFile(t).update(lambda _: word.encode() * 1000), whole),
    "outputs.npz": (lambda t, word: save_outputs({"y": np.full(99, 1 + (word == "two"))}, str(t)), load_outputs),
    "exported.onnx": (export, whole),
    "model.lock": (
        lambda t, word: save_lock(Lock.of(Identity(subject="training"), provenance=Provenance(note=word)), t),
        lambda t: load_lock(t).provenance.note,
    ),
}


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process and return its status: 0, 1 for an xpuruntime error, 2 for another, a signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        work()
    except (xrt.XpuRuntimeError, OSError) as error:
        os._exit(1 if str(error) else 2)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(2)
    os._exit(0)


def killed_at(step: int, work: Callable[[], object]) -> None:
    left = [step]

    def hook(event: str, _: Any) -> None:
        if event in STEPS:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    work()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def kill_everywhere(name: str, folder: Path) -> int:
    """Kill a writer before each of its steps: the old content or the new is there, and the next writer cleans up."""
    write, read = WRITERS[name]
    target = folder / name
    for word in ("two", "one"):
        write(target, word)
    listed = names(folder)
    step = 0
    while True:
        status = in_child(lambda step=step: killed_at(step, lambda: write(target, "two")))
        if writing._rename_two() is None:
            check_writable(folder / "another")  # which puts back what was moved away
        assert read(target) in ("one", "two"), f"step {step}"
        for word in ("two", "one"):  # a cache that holds the same already is not written
            write(target, word)
            assert read(target) == word, f"step {step}"
        assert names(folder) == listed, f"step {step}"
        if status == 0:
            return step
        assert status == -signal.SIGKILL, f"step {step}: {status}"
        step += 1


def starve(name: str, folder: Path) -> list[int]:
    """Write where files of no more than so many bytes fit: an xpuruntime error, the old content, nothing left."""
    write, read = WRITERS[name]
    target = folder / name
    write(target, "one")
    listed, statuses = names(folder), []
    for room in (0, 1, 40):

        def limited(room: int = room) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            write(target, "two")

        status = in_child(limited)
        statuses.append(status)
        assert read(target) == ("one" if status else "two")
        write(target, "one")
        assert names(folder) == listed, room
    return statuses


def without_rights(name: str, folder: Path) -> int:
    write, read = WRITERS[name]
    target = folder / name
    write(target, "one")
    listed = names(folder)
    folder.chmod(0o555)

    def as_another() -> None:
        if os.getuid() == 0:
            os.setuid(54321)
        write(target, "two")

    try:
        status = in_child(as_another)
    finally:
        folder.chmod(0o755)
    assert read(target) == "one"
    assert names(folder) == listed
    return status


if __name__ == "__main__":
    made = Path(sys.argv[1])
    os.umask(0o022)
    results: dict[str, Any] = {}
    for one in WRITERS:
        results[one] = {}
        for trial in (kill_everywhere, starve, without_rights):
            place = made / f"{trial.__name__}-{one}"
            place.mkdir()
            try:
                results[one][trial.__name__] = trial(one, place)
            except AssertionError as error:
                results[one][trial.__name__] = f"failed: {error}"
    writing._rename_two = lambda: None  # as on a file system that cannot exchange two names
    for one in ("compiled.xrt", "copied.xrt"):
        place = made / f"without_exchange-{one}"
        place.mkdir()
        try:
            results[one]["without_exchange"] = kill_everywhere(one, place)
        except AssertionError as error:
            results[one]["without_exchange"] = f"failed: {error}"
    with contextlib.suppress(OSError):
        LOG.unlink()
        for word in ("one", "two"):
            shutil.rmtree(LOG.with_name(f"{LOG.name}.{word}.xrt"))
    print(json.dumps(results))
