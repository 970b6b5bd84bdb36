# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Forks with open sessions, the end of a process with threads inside of operations, and subinterpreters."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPENVINO = pytest.param("openvino", marks=pytest.mark.needs_module("openvino"))
_OPENED = """
import os, sys, time, threading, warnings
import numpy as np, onnxruntime, xpuruntime as xrt
x = {"image": np.random.default_rng(5).random((8, 1, 8, 8), np.float32)}
raw = onnxruntime.InferenceSession(str(xrt.demo_model_path()), providers=["CPUExecutionProvider"])
want = raw.run(["logits"], x)[0]; del raw
engine = sys.argv[1]
session = xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine=engine)
def check(found):
    if engine != "null":
        np.testing.assert_allclose(found["logits"], want, rtol=1e-4, atol=1e-5)
def wait(pid):
    for _ in range(1500):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, 9)
    return "the child hangs"
def refused(call):
    try:
        call()
    except xrt.EngineError as error:
        assert "opened before the process was forked. Fix: open it" in str(error), error
    else:
        raise AssertionError("a session of the parent ran")
check(session.run(x)); check(session.run_async(x).result(30))
bound = session.bind(x)
"""
#: Calls of a forked child, and the fix that its errors state for a session of its own.
_WORK = {
    "operation": "xrt.ops.matmul(np.ones((64, 64), 'f'), np.ones((64, 64), 'f'))",
    "another": "check(xrt.InferenceSession(xrt.demo_model_path(), device='cpu', engine=engine).run(x))",
    "close": "session.close()",
    "run": "refused(lambda: session.run(x))",
    "run_async": "refused(lambda: session.run_async(x))",
    "bind": "refused(lambda: session.bind(x))",
    "bound": "refused(bound.run)",
    "explain": "refused(lambda: session.explain(x, runs=1))",
    "profile": "with xrt.profile(): refused(lambda: session.run(x))",
}


def _run(code: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("engine", ["null", "onnxruntime", OPENVINO])
def test_a_child_of_a_fork_opens_sessions_of_its_own(engine: str) -> None:
    work = "\n".join(
        f"""
pid = os.fork()
if pid == 0:
    try:
        {code.replace("; ", chr(10) + "        ")}
    except BaseException as error:
        print({name!r}, repr(error), flush=True)
        os._exit(3)
    sys.exit(0)
assert wait(pid) == 0, {name!r}"""
        for name, code in _WORK.items()
    )
    _run(f"{_OPENED}\n{work}\ncheck(session.run_async(x).result(30)); session.close()", engine)


def test_runs_that_were_under_way_fail_in_the_child_and_end_in_the_parent() -> None:
    _run(
        _OPENED
        + """
futures = [session.run_async(x) for _ in range(500)]
pid = os.fork()
if pid == 0:
    lost = 0
    for future in futures:
        try:
            check(future.result(10))
        except xrt.EngineError as error:
            lost += "before the process was forked" in str(error)
    os._exit(0 if lost else 4)
assert wait(pid) == 0
for future in futures:
    check(future.result(30))
""",
        "onnxruntime",
    )


_THREADS = """
import sys, threading, time, numpy as np, xpuruntime as xrt
a = np.ones((300, 300), "f")
session = xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="null")
x = {"image": np.ones((8, 1, 8, 8), np.float32)}
calls = {
    "matmul": lambda: xrt.ops.matmul(a, a),
    "norm": lambda: xrt.ops.rms_norm(a),
    "copy": lambda: xrt.Tensor.from_numpy(a).copy(),
    "run": lambda: session.run(x),
    "run_async": lambda: session.run_async(x).result(),
}
call = calls[sys.argv[1]]
def loop():
    while True:
        call()
for _ in range(4):
    threading.Thread(target=loop, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.parametrize("what", ["matmul", "copy", "run"])
def test_daemon_threads_inside_of_operations_do_not_abort_the_end(what: str) -> None:
    _run(_THREADS, what)


def test_a_daemon_thread_inside_of_its_first_operation() -> None:
    _run("""
import numpy.lib, sys, threading, numpy as np
from xpuruntime import ops
sys.setswitchinterval(100)  # the end of the program waits for a step without the GIL, and then goes on to the end
first, version = threading.Event(), numpy.lib.NumpyVersion
def seen(*given):  # by pybind11, as it looks up NumPy's functions
    first.set()
    return version(*given)
numpy.lib.NumpyVersion = seen
a = np.ones((4, 4), "f")
threading.Thread(target=lambda: ops.matmul(a, a), daemon=True).start()
assert first.wait(60)
""")


@pytest.mark.parametrize("what", ["run", "run_async", "bound"])
@pytest.mark.parametrize("engine", ["onnxruntime", OPENVINO])
def test_daemon_threads_inside_of_an_engine_do_not_abort_the_end(engine: str, what: str) -> None:
    _run(
        _OPENED
        + """
bound = session.bind(x)
call = {
    "run": lambda: session.run(x),
    "run_async": lambda: session.run_async(x).result(),
    "bound": lambda: bound.run(),
}[sys.argv[2]]
def loop():
    try:
        while True:
            call()
    except xrt.XpuRuntimeError as error:
        assert "interpreter ends" in str(error)
for _ in range(1 if sys.argv[2] == "bound" else 4):
    threading.Thread(target=loop, daemon=True).start()
time.sleep(0.2)
""",
        engine,
        what,
    )


def test_a_daemon_thread_inside_of_a_kernel_in_python() -> None:
    _run("""
import threading, time, numpy as np, xpuruntime as xrt
class Backend:
    name, device_type = "slow", "cpu"
    def available(self): return True, ""
    def version(self): return "1"
class Kernel:
    id, op, description, limits = "slow.kernel", "matmul", "a product", "none"
    def supports(self, op): return True, ""
    def prepare(self, op, config):
        def run(views, stream):
            total = 0
            for number in range(1000): total += number
        return run
from xpuruntime.ops.plugins import register
register(Backend(), Kernel())
a = np.ones((4, 4), "f")
def loop():
    while True:
        xrt.ops.matmul(a, a, kernel="slow.kernel")
xrt.ops.matmul(a, a, kernel="slow.kernel")
for _ in range(3): threading.Thread(target=loop, daemon=True).start()
time.sleep(0.2)
""")


def test_the_core_refuses_a_subinterpreter_at_once() -> None:
    _run("""
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
one = interpreters.create()
try:
    refused = interpreters.run_string(one, "import xpuruntime._core")
except Exception as error:
    refused = error
words = "works in the main interpreter", "does not support loading in subinterpreters"  # Python 3.13's
assert any(one in str(refused) for one in words), refused
interpreters.destroy(one)
""")
