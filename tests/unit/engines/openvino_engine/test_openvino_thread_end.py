# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Threads that have run a model and end while it is closed: OpenVINO frees nothing then that they still use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openvino")

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
