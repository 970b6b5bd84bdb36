# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What is decided in instrumented passes is recorded apart: it fills no log, and a full one takes nothing from it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KERNELS = {"matmul": "cpu.reference"}
#: How many decisions the process keeps.
MOST = 10_000
PASSES = 12


def onnxruntime(folder: Path, **kernels: str) -> tuple[xrt.InferenceSession, dict[str, Any]]:
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu"}, "kernels": kernels or KERNELS}
    session = xrt.InferenceSession(models.save(models.mlp(), folder), policy=policy)
    tensor = session.inputs[0]
    shape = [dim if isinstance(dim, int) else 2 for dim in tensor.shape or ()]
    return session, {tensor.name: np.ones(shape, np.float32)}


def torch(folder: Path) -> tuple[xrt.InferenceSession, dict[str, Any]]:
    del folder
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    x = torch.ones(2, 8)
    policy = {"execution": {"engine": "torch", "device": "cpu"}, "kernels": KERNELS}
    session = xrt.InferenceSession(net, policy=policy, example_inputs=(x,))
    return session, {session.inputs[0].name: x}


ENGINES = [onnxruntime, pytest.param(torch, marks=pytest.mark.torch)]


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    xrt.clear_decisions()
    yield
    xrt.clear_decisions()


def fill_log() -> None:
    one = np.ones((1, 1), np.float32)
    for columns in range(MOST + 1):
        xrt.ops.matmul(one, np.ones((1, columns + 1), np.float32), kernel="null.null")
        if _core.Dispatcher.instance().dropped_decisions:
            return
    raise AssertionError("the log has no end")


def hold(report: xrt.Report, runs: set[int]) -> None:
    kernels = [unit.kernel for unit in report.units if unit.kernel == "cpu.reference"]
    assert len(kernels) == 2
    assert {decision.chosen for decision in report.decisions} == {"cpu.reference"}
    assert sum(len(decision.nodes) for decision in report.decisions) == 2
    assert {decision.count for decision in report.decisions} <= runs
    assert not any("dispatcher" in note for note in report.notes)
    assert {o.key: o.status for o in report.observations}["kernels.matmul"] == "honoured"


@pytest.mark.parametrize("make", ENGINES)
def test_passes_leave_nothing_in_the_log_of_the_process(make: Callable[..., Any], tmp_path: Path) -> None:
    session, feeds = make(tmp_path)
    with session:
        for _ in range(2):
            session.run(feeds)
        before = xrt.decisions()
        for _ in range(PASSES):
            hold(session.explain(feeds, runs=2), {2, 3})
    # Those that are new are of the session's own timed runs, on arrays that lie elsewhere: the same few each time.
    known = {(one.description, one.chosen) for one in before}
    assert {(decision.description, decision.chosen) for decision in xrt.decisions()} == known
    assert not any("#" in decision.node for decision in xrt.decisions())


@pytest.mark.parametrize("make", ENGINES)
def test_a_log_that_is_full_takes_nothing_from_a_pass(make: Callable[..., Any], tmp_path: Path) -> None:
    fill_log()
    assert len(xrt.decisions()) == MOST
    session, feeds = make(tmp_path)
    with session:
        for _ in range(PASSES):
            hold(session.explain(feeds, runs=2), {2, 3})
    assert len(xrt.decisions()) == MOST


@pytest.mark.parametrize("make", ENGINES)
def test_who_clears_the_log_meanwhile_takes_nothing_from_a_pass(make: Callable[..., Any], tmp_path: Path) -> None:
    session, feeds = make(tmp_path)
    done = threading.Event()

    def clear() -> None:
        while not done.is_set():
            xrt.clear_decisions()

    thread = threading.Thread(target=clear)
    thread.start()
    try:
        with session:
            for _ in range(PASSES):
                hold(session.explain(feeds, runs=5), {5, 6})
    finally:
        done.set()
        thread.join()


def test_a_log_of_its_own() -> None:
    log = _core.DecisionLog()
    rules = _core.KernelRules(log=log)
    site = _core.CallSite(rules, node="here", pin=("cpu.reference",))
    desc = {
        "op": "matmul",
        "operands": {
            name: {"dtype": "float32", "shape": shape}
            for name, shape in (("a", (2, 3)), ("b", (3, 4)), ("out", (2, 4)))
        },
        "device": "cpu",
    }
    site.choose(desc)
    assert xrt.decisions() == ()
    (one,) = log.decisions()
    assert (one["node"], one["chosen"], log.counts(), log.dropped) == ("here", "cpu.reference", [0], 0)
    log.clear()
    assert log.decisions() == []
    site.choose(desc)
    assert [decision["node"] for decision in log.decisions()] == ["here"]
