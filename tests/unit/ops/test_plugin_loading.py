# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Packages with kernels that fail to load, and kernels in Python that misbehave."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plugin_tools import environment, python, write_package, xrt

import xpuruntime
from xpuruntime import _core
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.ops import plugins
from xpuruntime.policies import KernelPolicy

#: A package with one kernel, which adds ones.
GOOD = """
from xpuruntime.ops import plugins

class Kernel(plugins.PythonKernel):
    op = "matmul"
    description = "for tests"
    limits = "none"
    def __init__(self, id):
        self.id = id
    def supports(self, op):
        return True, ""
    def prepare(self, op, config):
        def run(operands, stream):
            operands["out"].numpy()[...] = 1
        return run

def register():
    plugins.register(plugins.KernelBackend("NAME", "cpu", "1"), Kernel("NAME.ones"))
"""
LIST = """
import xpuruntime as xrt
print(*(one.id for one in xrt.ops.kernels("matmul")))
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('the moon is wrong')", "RuntimeError: the moon is wrong"),
        ("def register(): raise OSError('no disk')", "OSError: no disk"),
        ("register = 3", "TypeError: 'int' object is not callable"),
        (
            GOOD.replace("NAME", "broken") + "    raise ValueError('after it has registered one')",
            "ValueError: after it has registered one",
        ),
        (GOOD.replace("NAME", "cpu"), "kernel 'cpu.ones' is of a backend that is not the 'cpu' of cpu."),
        (GOOD.replace("NAME", "good"), "kernel 'good.ones' is registered already for matmul"),
    ],
)
def test_a_plugin_that_fails_is_left_out_whole_and_the_rest_works(tmp_path: Path, code: str, said: str) -> None:
    write_package(tmp_path, "good", GOOD.replace("NAME", "good"))
    write_package(tmp_path, "other", GOOD.replace("NAME", "other"))
    write_package(tmp_path, "later_broken", code)
    done = python(LIST, tmp_path, warnings="default")
    assert done.returncode == 0, done.stderr
    ids = done.stdout.split()
    assert {"good.ones", "other.ones", "cpu.blas"} <= set(ids)
    assert not any(id_.startswith("broken.") for id_ in ids)
    assert ids.count("good.ones") == 1
    assert done.stderr.count("Warning: ") == 1
    assert (
        "the kernel plugin 'later_broken' of later_broken 1.5 is left out, because it failed to load: " in done.stderr
    )
    assert said in done.stderr


def test_its_warning_may_be_an_error_and_the_rest_is_loaded(tmp_path: Path) -> None:
    write_package(tmp_path, "zz_good", GOOD.replace("NAME", "good"))
    write_package(tmp_path, "broken", "raise RuntimeError('the moon is wrong')")
    code = """
import xpuruntime as xrt
try:
    xrt.ops.kernels()
except xrt.XpuRuntimeWarning as warning:
    assert "the moon is wrong" in str(warning)
else:
    raise AssertionError
assert "good.ones" in {one.id for one in xrt.ops.kernels()}
"""
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_command_line_says_it_and_goes_on(tmp_path: Path) -> None:
    write_package(tmp_path, "broken", "raise RuntimeError('the moon is wrong')")
    done = xrt("kernels", "matmul", folder=tmp_path)
    assert done.returncode == 0
    assert "cpu.blas" in done.stdout
    assert done.stderr.startswith("warning: the kernel plugin 'broken' of broken 1.5 is left out")


def test_plugins_are_loaded_in_order_of_name_before_the_first_operation(tmp_path: Path) -> None:
    """The order decides which one `first_supported` takes."""
    for name in ("b", "c", "a"):
        write_package(tmp_path, f"plugin_{name}", GOOD.replace("NAME", f"kernels_{name}"))
    done = python(LIST, tmp_path)
    mine = [one for one in done.stdout.split() if one.startswith("kernels_")]
    assert mine == ["kernels_a.ones", "kernels_b.ones", "kernels_c.ones"], done.stderr
    code = """
import numpy as np, xpuruntime as xrt
a = np.zeros((2, 2), np.int16)
assert (xrt.ops.matmul(a.astype("f4"), a.astype("f4"), kernel="kernels_b.ones") == 1).all()
"""
    assert python(code, tmp_path).returncode == 0


class Backend(plugins.KernelBackend):
    def __init__(self, name: str = "testing_plugin") -> None:
        super().__init__(name, "cpu", "1")


class Kernel(plugins.PythonKernel):
    op = "matmul"
    description = "for tests"
    limits = "none"

    def __init__(self, name: str = "one", work: Callable[[], Any] = lambda: None, **more: Any) -> None:
        self.id = f"testing_plugin.{name}"
        self.work = work
        for key, value in more.items():
            setattr(self, key, value)

    def supports(self, op: Any) -> tuple[bool, str]:
        return True, ""

    def prepare(self, op: Any, config: str) -> Any:
        def run(operands: Any, stream: int) -> None:
            self.work()
            operands["out"].numpy()[...] = 1

        return run


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = {(kernel.op, kernel.id) for kernel in xpuruntime.ops.kernels()}
    xpuruntime.ops.clear_decisions()
    yield
    _core.KernelRegistry.instance().remove("testing_plugin")
    _core.Dispatcher.instance().forget_measurements()
    assert {(kernel.op, kernel.id) for kernel in xpuruntime.ops.kernels()} == before


def ids() -> set[str]:
    return {kernel.id for kernel in xpuruntime.ops.kernels() if kernel.backend == "testing_plugin"}


def call(kernel: str | None = "testing_plugin.one", **options: Any) -> Any:
    return xpuruntime.ops.matmul(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32), kernel=kernel, **options)


class Own(Exception):  # noqa: N818
    pass


def raises(error: BaseException) -> Callable[..., Any]:
    def work(*_: Any) -> Any:
        raise error

    return work


@pytest.mark.parametrize("error", [Own("mine", 3), KeyboardInterrupt(), SystemExit(4), KeyError("a"), Own()])
@pytest.mark.parametrize("where", ["launch", "prepare"])
def test_what_a_kernel_raises_is_raised_as_it_is(error: BaseException, where: str) -> None:
    more = {"work": raises(error)} if where == "launch" else {"prepare": raises(error)}
    plugins.register(Backend(), Kernel(**more))
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error
        assert caught.traceback[-1].name == "work", "it shows where"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(4)])
def test_an_interruption_is_no_refusal(error: BaseException) -> None:
    """Neither when it is asked whether it serves, nor while it is measured."""
    plugins.register(Backend(), Kernel(supports=raises(error)))
    with pytest.raises(type(error)):
        call(kernel=None, policy=KernelPolicy(matmul="testing_plugin.one"))
    _core.KernelRegistry.instance().remove("testing_plugin")
    plugins.register(Backend(), Kernel(work=raises(error)))
    for _ in range(2):
        with pytest.raises(type(error)):
            call(kernel=None, policy=KernelPolicy(auto_strategy="best_performance"))


def test_other_errors_are_reasons_while_it_is_measured() -> None:
    plugins.register(Backend(), Kernel(work=raises(Own("mine"))))
    call(kernel=None, policy=KernelPolicy(auto_strategy="best_performance"))
    decision = xpuruntime.decisions()[-1]
    (mine,) = (candidate for candidate in decision.candidates if candidate.id == "testing_plugin.one")
    assert not mine.accepted
    assert "failed while it was measured: Own: mine" in mine.reason


def test_ctrl_c_ends_a_program_that_is_in_a_kernel(tmp_path: Path) -> None:
    code = GOOD.replace("NAME", "slow").replace("def run(operands, stream):", "def run(operands, stream):\n" + " " * 12)
    code = code.replace(
        'operands["out"].numpy()[...] = 1',
        'import time; print("in", flush=True); [time.sleep(0.01) for _ in range(6000)]',
    )
    write_package(tmp_path, "slow", code)
    program = """
import numpy as np, xpuruntime as xrt
a = np.ones((2, 2), np.float32)
try:
    xrt.ops.matmul(a, a, kernel="slow.ones")
except KeyboardInterrupt:
    print("out")
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "out\n"
        assert process.wait() == 0


def test_all_or_none() -> None:
    with pytest.raises(InputError, match=r"testing_plugin\.one' is registered already"):
        plugins.register(Backend(), Kernel("zero"), Kernel(), Kernel())
    with pytest.raises(InputError, match="no text as its 'op'"):
        plugins.register(Backend(), Kernel(), Kernel("two", op=None))
    with pytest.raises(InputError, match=r"'testing_plugin\.two words' of backend"):
        plugins.register(Backend(), Kernel(), Kernel("two words"))
    with pytest.raises(InputError, match="no method 'prepare'"):
        plugins.register(Backend(), Kernel(), Kernel("two", prepare=None))
    with pytest.raises(InputError, match="matmull"):
        plugins.register(Backend(), Kernel(), Kernel("two", op="matmull"))
    assert ids() == set()


def test_a_backend_has_a_name_of_its_own_and_may_grow() -> None:
    backend = Backend()
    plugins.register(backend, Kernel())
    plugins.register(backend, Kernel("two"))
    with pytest.raises(InputError, match="give its backend a name of its own"):
        plugins.register(Backend(), Kernel("three"))
    assert ids() == {"testing_plugin.one", "testing_plugin.two"}
    _core.KernelRegistry.instance().remove("testing_plugin")
    plugins.register(Backend(), Kernel("three"))
    assert ids() == {"testing_plugin.three"}


@pytest.mark.parametrize(
    ("op", "families", "said"),
    [
        ("matmul", "cublas", "expected a tuple of words"),
        ("matmul", ("fast",), "'fast', which no policy can name for matmul: the families are cublas, "),
        ("matmul", ("auto",), "'auto', which no policy can name"),
        ("attention_backward", ("cublas",), "'cublas', which no policy can name for attention: "),
    ],
)
def test_families_are_those_of_policies(op: str, families: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        plugins.register(Backend(), Kernel(op=op, families=families))
    assert said in str(caught.value)
    assert ids() == set()


def test_a_family_finds_it() -> None:
    plugins.register(Backend(), Kernel(families=("torch",)))
    call(kernel=None, policy=KernelPolicy(matmul="torch"))
    assert xpuruntime.decisions()[-1].chosen == "testing_plugin.one"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (raises(Own("mine")), "testing_plugin.version() failed: Own: mine"),
        (lambda: None, "testing_plugin.version() failed: it gave None instead of a text"),
        (lambda: "", "testing_plugin.version() failed: it gave '' instead of a text"),
    ],
)
def test_a_version_that_fails_is_a_reason_and_listings_go_on(version: Callable[[], Any], said: str) -> None:
    backend = Backend()
    backend.version = version  # type: ignore[method-assign]
    plugins.register(backend, Kernel())
    (listed,) = (kernel for kernel in xpuruntime.ops.kernels("matmul") if kernel.id == "testing_plugin.one")
    assert (listed.available, listed.reason, listed.version) == (False, said, "")
    with pytest.raises(UnsupportedOperationError) as caught:
        call()
    assert said in str(caught.value)


def test_a_kernel_may_call_operations_also_while_it_is_measured() -> None:
    policy = KernelPolicy(auto_strategy="best_performance")

    def work() -> None:
        a = np.ones((8, 8), np.float32)
        assert (xpuruntime.ops.matmul(a, a, policy=inner) == 8).all()

    inner = KernelPolicy(auto_strategy="best_performance")
    plugins.register(Backend(), Kernel(work=work, supports=lambda op: (op["operands"]["a"]["shape"] == (2, 3), "no")))
    done = threading.Event()

    def run() -> None:
        call(kernel=None, policy=policy)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    assert done.wait(60), "it waits for itself"
    (mine,) = (
        candidate
        for decision in xpuruntime.decisions()
        if decision.source == "tuned" and decision.shapes["a"] == (2, 3)
        for candidate in decision.candidates
        if candidate.id == "testing_plugin.one"
    )
    assert mine.accepted
    assert mine.measured_us is not None


def test_threads_register_at_once() -> None:
    """One of them wins; nobody sees half of it."""
    start = threading.Barrier(16)
    outcomes: list[str] = []

    def work() -> None:
        start.wait()
        try:
            plugins.register(Backend(), Kernel(), Kernel("two"))
            outcomes.append("done")
        except InputError:
            outcomes.append("refused")

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["done"] + ["refused"] * 15
    assert ids() == {"testing_plugin.one", "testing_plugin.two"}
