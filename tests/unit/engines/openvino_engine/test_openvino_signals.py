# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Signals reach Python after sessions on OpenVINO, whichever thread closed them, and threads may end meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("OpenVINO changes signal stacks on Linux only", allow_module_level=True)
pytest.importorskip("openvino")

SIGNALS = """
import faulthandler, gc, signal, sys, threading
faulthandler.enable()  # a signal stack, as under pytest
import xpuruntime as xrt
caught = []
signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
def session():
    return xrt.InferenceSession(sys.argv[1], engine="openvino", device="cpu")
def closed_elsewhere():
    held = [session()]
    def close():
        held.pop().close()
        gc.collect()
    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
def closed_in_the_order_of_opening():
    held = [session(), session()]
    while held:
        held.pop(0).close()
        gc.collect()
def opened_elsewhere():
    thread = threading.Thread(target=closed_in_the_order_of_opening)
    thread.start()
    thread.join()
for use in (closed_elsewhere, closed_in_the_order_of_opening, opened_elsewhere):
    use()
    signal.raise_signal(signal.SIGALRM)
    print(use.__name__, len(caught))
"""


def test_signals_after_sessions_are_closed(mlp: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS, str(mlp)], capture_output=True, text=True, timeout=240, check=False
    )
    expected = ["closed_elsewhere 1", "closed_in_the_order_of_opening 2", "opened_elsewhere 3"]
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr


PROGRAM = """
import ctypes, sys, threading, time
import numpy as np, xpuruntime as xrt
ends = ctypes.CDLL(sys.argv[1])
x = {"image": np.ones((8, 1, 8, 8), np.float32)}
def work(session, met):
    session.run(x)
    ends.slow_end()
    met.wait()
for turn in range(3):
    session = xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="openvino")
    met = threading.Barrier(5)
    threads = [threading.Thread(target=work, args=(session, met)) for _ in range(4)]
    for thread in threads: thread.start()
    met.wait()
    time.sleep(0.06)  # each holds what it uses by the first mutex, and waits at the next
    ends.spoil(1)
    session.close()
    del session
    time.sleep(0.3)
    ends.spoil(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="preloads a library as glibc does")
def test_threads_end_while_their_model_is_closed(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path / "libthreadend.so"
    source = Path(__file__).with_name("thread_end.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(library)],
        capture_output=True, text=True, check=False, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
