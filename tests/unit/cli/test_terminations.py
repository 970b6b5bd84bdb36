# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""SIGTERM and SIGHUP end a command by the signal, and leave no scratch folder and no process behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xpuruntime.cli.entry import run

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is left is looked for in /proc")

#: Where a signal comes: at the first scratch folder, the first worker's start, while it works, and at the ends.
MOMENTS = (
    ("tempfile.mkdtemp", 1, 0.0),
    ("subprocess.Popen", 1, 0.0),
    ("subprocess.Popen", 1, 0.15),
    ("subprocess.Popen", 2, 0.5),
    ("shutil.rmtree", 1, 0.0),
    ("shutil.rmtree", 2, 0.0),
    ("os.rmdir", 1, 0.0),
    ("import", 1, 0.3),
    ("os.mkdir", 1, 0.0),
    ("os.rename", 1, 0.0),
)
METRIC = """
import subprocess, sys, time
def top(run):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    time.sleep(1)
    return 1.0
"""
#: What each command is called with, the names of what it writes, and the moments by number.
COMMANDS: dict[str, tuple[str, tuple[str, ...], tuple[int, ...]]] = {
    "verify": ("MODEL -d cpu --only accuracy --metric HERE/metric.py:top=0", (), (0, 2)),
    "verify --against": ("MODEL -p HERE/speed.yaml --only speed --budget 1s --against PYTHON", (), (1, 6)),
    "compare": ("MODEL", (), (7,)),
    "determinism": ("MODEL -d cpu --grade restart --processes 1", (), (2, 4)),
    "diff": ("py:PYTHON py:PYTHON MODEL -d cpu", (), (0, 3)),
    "lock": ("MODEL -d cpu -o new.lock", ("new.lock",), (1, 4)),
    "bench": ("MODEL -d cpu -n 10000000", (), (7,)),
    "compile": ("MODEL -d cpu -o model.xrt", ("model.xrt",), (8, 9)),
    "export": ("HERE/digits.lock --to ort-python -o exported --prove --model MODEL", ("exported",), (1, 2, 6)),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, digits: str) -> dict[str, list[dict[str, Any]]]:
    """Run all, and return by command what became of each."""
    here = tmp_path_factory.mktemp("terminated")
    (here / "metric.py").write_text(METRIC)
    (here / "speed.yaml").write_text("execution: {device: cpu}\nverify: {speed: {max_slowdown: 50%}}\n")
    assert run(["lock", digits, "-d", "cpu", "-o", str(here / "digits.lock"), "--json"]) == 0
    cases = []
    for name, (text, _, moments) in COMMANDS.items():
        words = {"MODEL": digits, "HERE": str(here), "PYTHON": sys.executable}
        for word, value in words.items():
            text = text.replace(word, value)
        for moment in moments:
            case = {"name": name, "arguments": [name.split()[0], *text.split()], "moment": MOMENTS[moment]}
            cases.append({**case, "signal": "SIGHUP" if moment % 2 else "SIGTERM"})
    rooms = tmp_path_factory.mktemp("r")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("terminated_commands.py"), rooms], input=json.dumps(cases),
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results: dict[str, list[dict[str, Any]]] = {}
    for case, became in zip(cases, json.loads(done.stdout), strict=True):
        results.setdefault(case["name"], []).append(case | became)
    return results


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_ended_leaves_nothing(name: str, ended: dict[str, list[dict[str, Any]]]) -> None:
    for one in ended[name]:
        if one["moment"][0] == "import" and (not one["sent"] or one["status"] == 0):  # it was quicker
            continue
        assert one["sent"], one
        assert one["status"] == -getattr(signal, one["signal"]), one
        assert (one["left"], one["processes"]) == ([], []), one
        assert set(one["written"]) <= set(COMMANDS[name][1]), one
        assert "Traceback" not in one["err"], one


def command(*arguments: str, cwd: Path, before: Callable[[], object] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from xpuruntime_command import main; main()", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, preexec_fn=before,
    )  # fmt: skip


def metric(folder: Path, body: str) -> list[str]:
    """Return the arguments of a command that calls a metric, which writes a file when it is called."""
    (folder / "slow.py").write_text(
        f"import pathlib, time\ndef top(run):\n    pathlib.Path('called').touch()\n    {body}\n"
    )
    return ["--only", "accuracy", "-d", "cpu", "--metric", "slow.py:top=0"]


def wait_until_called(folder: Path) -> None:
    until = time.monotonic() + 60
    while not (folder / "called").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert (folder / "called").exists()


def test_nohup_keeps_a_command_alive(digits: str, tmp_path: Path) -> None:
    process = command(
        "verify", digits, *metric(tmp_path, "time.sleep(0.3); return 1"), cwd=tmp_path,
        before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    wait_until_called(tmp_path)
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err


START = """
import ctypes, gc, os, signal, sys, threading, time
import xpuruntime.cli.interrupts as terminations
from xpuruntime.cli.interrupts import Interrupts

class Swallows:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000): time.sleep(0)

def send():
    for seconds in eval(sys.argv[2]):
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGTERM)

def stand_still():  # in native code, which takes a lock twice
    lock = ctypes.create_string_buffer(64)
    for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(lock)

terminations._UNSEEN = float(sys.argv[3])
interrupts = Interrupts()
interrupts.raise_once()
threading.Thread(target=send, daemon=True).start()
try:
    exec(sys.argv[1])
except KeyboardInterrupt:
    print("raised", flush=True)
    exec(sys.argv[4])
interrupts.let_finish()
"""


@pytest.mark.parametrize(
    ("during", "moments", "unseen", "after", "status", "out"),
    [
        ("time.sleep(9)", (0.2,), 9, "", -signal.SIGTERM, "raised\n"),
        ("time.sleep(9)", (0.2, 0.01), 9, "time.sleep(0.5); print('closed')", -signal.SIGTERM, "raised\nclosed\n"),
        ("time.sleep(9)", (0.2, 0.7), 9, "time.sleep(9); print('closed')", -signal.SIGTERM, "raised\n"),
        ("stand_still()", (0.2,), 0.3, "", 128 + signal.SIGTERM, ""),
        ("stand_still()", (0.2, 0.7), 60, "", 128 + signal.SIGTERM, ""),
        ("time.sleep(9)", (0.2, 0.7), 60, "stand_still()", 128 + signal.SIGTERM, "raised\n"),
        ("Swallows(); time.sleep(9)", (), 9, "", -signal.SIGTERM, "raised\n"),
    ],
    ids=["one", "two-at-once", "two", "native", "native-two", "native-after", "swallowed"],
)
def test_a_signal_ends_the_process(
    during: str, moments: tuple[float, ...], unseen: float, after: str, status: int, out: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START, during, repr(moments), str(unseen), after],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (status, out, "")


def test_a_forked_child_ends_by_the_signal_and_its_parent_goes_on() -> None:
    during = """
child = os.fork()
if not child:
    time.sleep(9)
time.sleep(0.2)
for _ in range(2):
    os.kill(child, signal.SIGTERM)
    time.sleep(0.6)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    # Since 3.12 Python warns of os.fork() where there are threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", START, during, "()", "9", ""]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "-15\n", "")
