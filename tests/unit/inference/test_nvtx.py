# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ranges of a profile reach whatever tool listens to NVTX, in the way in which Nsight Systems does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from xpuruntime import _core

pytestmark = pytest.mark.skipif(not _core.build_info()["cupti"], reason="built without the headers of CUPTI and NVTX")

PROGRAM = """
import json, sys, threading
import numpy as np
import xpuruntime as xrt

x = np.ones((8, 8), np.float32)
images, _ = xrt.demo_images()
with xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session:
    def run():
        session.run({"image": images[:1]})
    run()
    xrt.ops.matmul(x, x)
    with xrt.profile() as prof:
        with prof.range("epoch 1, näher"):
            run()
            xrt.ops.matmul(x, x)
        def work(name):
            for _ in range(20):
                with prof.range(name):
                    run()
        threads = [threading.Thread(target=work, args=(f"thread {i}",)) for i in range(3)]
        [one.start() for one in threads]
        [one.join() for one in threads]
        try:
            with prof.range("fails"):
                raise KeyError
        except KeyError:
            pass
    run()
    xrt.ops.matmul(x, x)
names = {one.id: one.name for one in prof.result.ranges}
print(json.dumps([[one.thread, one.name, names.get(one.parent)] for one in prof.result.ranges]))
"""


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("nvtx") / "liblistener.so"
    source = Path(__file__).with_name("nvtx_listener.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    return library


def test_a_tool_is_told_each_range_as_it_nests(listener: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(listener), "NVTX_SEEN": str(seen)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    told: list[tuple[str, str | None]] = []
    open_ranges: dict[str, list[str]] = defaultdict(list)
    for line in seen.read_text(encoding="utf-8").splitlines():
        thread, what, name = line.split(" ", 2)
        stack = open_ranges[thread]
        if what == "push":
            told.append((name, stack[-1] if stack else None))
            stack.append(name)
        else:
            stack.pop()
    assert not any(open_ranges.values()), "a range was left open"
    recorded = [(name, inside) for _, name, inside in json.loads(done.stdout)]
    assert Counter(told) == Counter(recorded)
    assert {name.split(" ")[0] for name, _ in told} >= {"epoch", "thread", "matmul", "fails"}
    assert sum(inside == "thread 1" for _, inside in told) == 20
    assert len(open_ranges) == 4
