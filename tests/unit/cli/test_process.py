# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The command as a process of its own: start-up, streams, signals."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CALL = [sys.executable, "-c", "from xpuruntime.cli import main; main()"]


def xrt(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CALL, *arguments], capture_output=True, text=True, env={**os.environ, **env}, check=False, timeout=120
    )


def test_both_names_are_installed() -> None:
    folder = Path(sys.executable).parent
    for name in ("xrt", "xpuruntime"):
        script = folder / (name + (".exe" if sys.platform == "win32" else ""))
        if not script.exists():
            pytest.skip("the package is not installed in this environment")
        done = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.split()[0]) == (0, "xpuruntime")


def test_a_report_names_no_folder_of_the_installation(digits: str, tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("xrt")
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    words = ["explain", "model.onnx", "--device", "cpu", "--output", "report.json"]
    (tmp_path / "model.onnx").write_bytes(Path(digits).read_bytes())
    subprocess.run([script, *words], cwd=tmp_path, check=True, capture_output=True)
    assert json.loads((tmp_path / "report.json").read_text())["command"] == shlex.join(["xrt", *words])


def test_help_imports_nothing_heavy() -> None:
    assert xrt("--help").returncode == 0
    code = (
        "import sys; from xpuruntime.cli.app import command_line;"
        "print(sorted({'onnxruntime', 'onnx', 'torch', 'numpy', 'xpuruntime._core'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_exit_codes_reach_the_shell(digits: str) -> None:
    assert xrt("plan", digits, "--device", "cpu").returncode == 0
    assert xrt("plan", digits, "--precision", "bf16", "--device", "cpu", "--engine", "onnxruntime").returncode == 1
    assert xrt("plan", digits, "--device", "nonsense").returncode == 2
    assert xrt("plan", digits, "--device", "cuda:99").returncode == 3


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_in_the_middle_ends_quietly(digits: str) -> None:
    process = subprocess.Popen(
        [*CALL, "bench", digits, "--runs", "10000000", "--device", "cpu", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("note: probe inputs")
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err


INTERRUPTED = """
import atexit, gc, os, signal, sys, threading, time, weakref
from xpuruntime_command import main

place, swallowed_by = sys.argv.pop(1), sys.argv.pop(1)

class Thing:
    def __del__(self):
        if swallowed_by == "del":
            interrupt()

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass

def collected(phase, info):
    gc.callbacks.remove(collected)
    interrupt()

def interrupt_inside():
    if swallowed_by == "weakref, busy machine":
        start = threading.Thread.start
        threading.Thread.start = lambda thread: (start(thread), time.sleep(0.2))
    if swallowed_by.startswith("weakref"):
        thing = Thing()
        watched = weakref.ref(thing, interrupt)
        del thing
    elif swallowed_by == "gc":
        gc.callbacks.append(collected)
        gc.collect()
    elif swallowed_by == "except":
        try:
            interrupt()
        except BaseException:
            pass
    elif swallowed_by == "del":
        Thing()
    else:
        interrupt()

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == place:
            sys.meta_path.remove(self)
            interrupt_inside()

if place == "exit":
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    "module",
    ["xpuruntime", "xpuruntime.cli.entry", "typer", "numpy", "onnxruntime"],
)  # fmt: skip
def test_ctrl_c_in_an_import_ends_quietly(module: str, digits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XPURUNTIME_DIGEST_CACHE", "off")  # a model that was checked before is opened without protobuf
    done = _interrupted(module, "plan", digits, "--device", "cpu")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("place", ["onnxruntime"])
@pytest.mark.parametrize("swallowed_by", ["weakref", "weakref, busy machine", "gc", "del", "except"])
def test_ctrl_c_that_is_swallowed_ends_the_command_all_the_same(place: str, swallowed_by: str, digits: str) -> None:
    done = _interrupted(place, "verify", digits, "--device", "cpu", swallowed_by=swallowed_by)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_at_exit_changes_nothing(digits: str) -> None:
    done = _interrupted("exit", "plan", digits, "--device", "cpu")
    assert done.returncode == 0
    assert "onnxruntime" in done.stdout
    assert done.stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_job_in_the_background_goes_on(digits: str) -> None:
    """A shell starts it with SIGINT ignored, and it stays ignored."""
    done = _interrupted("typer", "plan", digits, "--device", "cpu", ignored=True)
    assert done.returncode == 0


def _interrupted(
    place: str, *arguments: str, ignored: bool = False, swallowed_by: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the command with a SIGINT as a module is looked for."""
    command = [sys.executable, "-c", INTERRUPTED, place, swallowed_by, *arguments]
    handler = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignored else None
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, preexec_fn=handler)


def test_text_with_any_character_can_be_printed(tmp_path: Path) -> None:
    path = tmp_path / "mod[bold]él 模型.yaml"
    path.write_text("execution: {device: cpu}\n", encoding="utf-8")
    done = xrt("policy", "check", str(path), PYTHONIOENCODING="utf-8")
    assert done.returncode == 0
    assert path.name in done.stdout
    refused = xrt("policy", "check", str(tmp_path / "[red]gone.yaml"))
    assert refused.returncode == 2
    assert "[red]gone.yaml" in refused.stderr


def test_a_process_that_is_not_the_command_keeps_its_handler() -> None:
    from xpuruntime.cli import main

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        main(["policy", "schema"])
    assert ended.value.code == 0
    assert signal.getsignal(signal.SIGINT) is before
