# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Every writer under every fault: killed at every step, no room, no rights, others with like names at work."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import xpuruntime as xrt
from xpuruntime.files.writing import check_writable, replace_file, staging

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither fork nor SIGKILL")

HERE = Path(__file__).parent
SOURCE = Path(xrt.__file__).parent
MODEL = xrt.demo_model_path()


@pytest.fixture(scope="module")
def quick_folder() -> Iterator[Path]:
    """Return a folder in memory where there is one: what is synced to a disk takes most of the time."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def results(quick_folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(HERE / "writers.py"), str(quick_folder)]
    paths = os.pathsep.join([str(HERE.parent / "inference"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    document: dict[str, Any] = json.loads(done.stdout)
    return document


WRITERS = (
    "compiled.xrt", "copied.xrt", "report.json", "page.html", "trace.json", "policy.yaml", "tuning.json",
    "vendor.timing", "outputs.npz", "exported.onnx", "model.lock",
)  # fmt: skip


def test_every_writer_is_tried(results: dict[str, Any]) -> None:
    assert sorted(results) == sorted(WRITERS)


@pytest.mark.parametrize("name", WRITERS)
def test_a_kill_at_any_step_leaves_the_old_or_the_new(results: dict[str, Any], name: str) -> None:
    """The number is that of the steps at which it was killed."""
    steps = results[name]["kill_everywhere"]
    assert isinstance(steps, int), steps
    assert steps >= 8


@pytest.mark.parametrize("name", WRITERS)
def test_no_room_leaves_the_old_and_is_an_error_of_ours(results: dict[str, Any], name: str) -> None:
    assert results[name]["starve"][:2] == [1, 1], results[name]["starve"]


@pytest.mark.parametrize("name", WRITERS)
def test_no_rights_leave_the_old_and_are_an_error_of_ours(results: dict[str, Any], name: str) -> None:
    assert results[name]["without_rights"] == 1


@pytest.mark.parametrize("name", ["compiled.xrt", "copied.xrt"])
def test_where_names_cannot_be_exchanged_the_next_writer_puts_the_old_back(results: dict[str, Any], name: str) -> None:
    steps = results[name]["without_exchange"]
    assert isinstance(steps, int), steps


def test_real_kills_at_random_moments(tmp_path: Path) -> None:
    """With a real engine, whose own threads and files are part of it."""
    code = (
        "import sys, xpuruntime as xrt\n"
        "while True:\n"
        "    for precision in ('model', 'fp32'):\n"
        "        xrt.compile_model(xrt.demo_model_path(), 'a.xrt', device='cpu', engine='onnxruntime',\n"
        "                          precision=precision, overwrite=True)\n"
        "        print(flush=True)\n"
    )
    for moment in (0.0, 0.043):
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with xrt.InferenceSession(tmp_path / "a.xrt") as session:
            assert session.plan.engine == "onnxruntime"
    xrt.compile_model(MODEL, tmp_path / "a.xrt", device="cpu", engine="onnxruntime", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.xrt"]


def test_writers_of_like_names_and_hidden_files_of_the_user(tmp_path: Path) -> None:
    hidden = [".digits.mine.old", ".digits.x.part", ".digits.1234.new", ".xpuruntime-0123456789abcdef-01234567.new"]
    for name in hidden:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("mine")
    code = (
        "import sys, warnings, xpuruntime as xrt\n"
        "from xpuruntime.evidence import Report\n"
        "for _ in range(8):\n"
        "    where = {'device': 'cpu', 'engine': 'onnxruntime'}\n"
        "    xrt.compile_model(xrt.demo_model_path(), sys.argv[1], overwrite=True, **where)\n"
        "    Report().save(sys.argv[1] + '.json')\n"
    )
    names = ["digits", "digits.xrt", "digits.int8.xrt"]
    running = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, name], cwd=tmp_path) for name in names]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    made = [*names, *(f"{name}.json" for name in names)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*hidden, *made])
    assert all((tmp_path / name / "notes").read_text() == "mine" for name in hidden)


def test_a_sweep_removes_what_is_dead_and_nothing_alive(tmp_path: Path) -> None:
    with staging(tmp_path / "alive") as alive:
        child = os.fork()
        if not child:
            with staging(tmp_path / "dead"):
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        dead = {path for path in tmp_path.iterdir() if path != alive}
        assert len(dead) == 1
        check_writable(tmp_path / "another")
        assert list(tmp_path.iterdir()) == [alive]
        (alive / "file").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_of_another_sweep_is_not_taken_for_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sweep removed it before it was locked, and another one has made it anew and will remove the folder."""
    seen: list[str] = []

    def swept(descriptor: int) -> bool:
        (room,) = (path for path in tmp_path.iterdir() if path.name not in seen)
        seen.append(room.name)
        if len(seen) == 1:
            (room / ".lock").unlink()
            (room / ".lock").touch()
        return True

    monkeypatch.setattr("xpuruntime.files.writing._try_lock", swept)
    replace_file(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert len(seen) == 2


def test_many_sweeps_at_once_lose_no_write(tmp_path: Path) -> None:
    """A staging folder is swept before it is locked at times, and its writer then takes another."""
    failed: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for turn in range(30):
                replace_file(tmp_path / f"f{number}", f"{turn}".encode())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"29"}


def test_nothing_changes_the_umask_or_writes_in_another_way() -> None:
    """One routine for files and one for folders; what is left are temporary folders of the system's and scratch."""
    forbidden = {"umask", "mkstemp", "mkdtemp", "NamedTemporaryFile"}
    texts = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if any(word in text for word in forbidden) else ():
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in forbidden and "testing" not in path.parts:
                texts.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {name}")
    assert not texts
