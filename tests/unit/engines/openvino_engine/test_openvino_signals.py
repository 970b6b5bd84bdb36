# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Signals reach Python after sessions on OpenVINO, whichever thread closed them and in whichever order."""

from __future__ import annotations

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
