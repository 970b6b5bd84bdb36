# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Memory that a runner gives for inputs, and what threads of a batcher run before they serve."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from serving_models import WAIT, ask, rows_of

import xpuruntime as xrt
from xpuruntime.engines.host_model import HostRunner
from xpuruntime.inference.calls import host_runner
from xpuruntime.serving.batching.driver import Batcher
from xpuruntime.serving.batching.execution import Slice, assemble
from xpuruntime.serving.batching.layout import Layout
from xpuruntime.serving.batching.requests import check_request
from xpuruntime.serving.batching.settings import BatchSettings
from xpuruntime.serving.monitoring.records import ModelStatistics
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class Counted(HostRunner):
    """A runner that notes the arrays that it gives, and of which memory the inputs of its runs are."""

    copies_all = True

    def __init__(self, session: xrt.InferenceSession) -> None:
        super().__init__(self._run)
        self.session, self.given, self.from_here = session, [], []
        self.threads: set[int] = set()

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        result = np.empty(shape, dtype)
        self.given.append(result)
        return result

    def _run(self, feeds: dict[str, Any]) -> dict[str, Any]:
        self.threads.add(threading.get_ident())
        self.from_here.append(all(any(array is one for one in self.given) for array in feeds.values()))
        return self.session.run(feeds)


class Answers:
    """Sets the future of a request, as a version does."""

    def __init__(self) -> None:
        self.statistics = ModelStatistics()

    def executed(self, execution: Any) -> None:
        self.statistics.executed(execution)

    def answered(self, job: Any, now: float) -> None:
        job.future.set_result(job.pieces)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[xrt.InferenceSession]:
    with xrt.InferenceSession(models.save(models.mlp(), tmp_path), device="cpu") as opened:
        yield opened


def test_all_inputs_of_a_batch_are_in_memory_of_the_runner(session: xrt.InferenceSession) -> None:
    """Also those of a request that is alone, which are passed as they came elsewhere."""
    settings = BatchSettings(max_batch_size=4)
    layout = Layout.of(session.inputs, session.outputs, settings)
    runner = Counted(session)
    batcher = Batcher(runner, layout, settings, Answers(), name="mlp")
    batcher.start()
    try:
        for rows in (1, 2, 4):
            x = rows_of(rows, rows)
            (outputs,) = batcher.submit(ask("mlp", {"x": x})).result(WAIT).values()
            np.testing.assert_array_equal(outputs["y"], session.run({"x": x})["y"])
        assert runner.from_here == [True] * 3
    finally:
        assert batcher.close()
    feed = check_request(ask("mlp", {"x": (alone := rows_of(1.0))}), layout)
    assert assemble(layout, [Slice(feed, 0, 1)]).feeds["x"] is alone
    assert assemble(layout, [Slice(feed, 0, 1)], runner=HostRunner(session.run)).feeds["x"] is alone
    copied = assemble(layout, [Slice(feed, 0, 1)], runner=runner).feeds["x"]
    assert copied is runner.given[-1]
    np.testing.assert_array_equal(copied, alone)


def test_batches_are_padded_to_few_sizes_where_each_costs_a_capture(session: xrt.InferenceSession) -> None:
    settings = BatchSettings(max_batch_size=12, preferred_batch_size=[6])
    layout = Layout.of(session.inputs, session.outputs, settings)
    runner = Counted(session)
    runner.pads_rows = True
    answers = Answers()
    batcher = Batcher(runner, layout, settings, answers, name="mlp")
    batcher.start()
    try:
        for rows, size in ((1, 1), (3, 4), (5, 6), (7, 8), (9, 12), (12, 12)):
            x = np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float32)
            (outputs,) = batcher.submit(ask("mlp", {"x": x})).result(WAIT).values()
            assert runner.given[-1].shape[0] == size
            np.testing.assert_array_equal(runner.given[-1][rows:], np.repeat(x[-1:], size - rows, axis=0))
            np.testing.assert_allclose(outputs["y"], session.run({"x": x})["y"], rtol=1e-5, atol=1e-6)
    finally:
        assert batcher.close()


def test_each_thread_runs_what_it_begins_with(session: xrt.InferenceSession) -> None:
    settings = BatchSettings(max_batch_size=4)
    layout = Layout.of(session.inputs, session.outputs, settings)
    runner = Counted(session)
    warm = [{"x": rows_of(0.0, rows)} for rows in (1, 4)]
    batcher = Batcher(runner, layout, settings, Answers(), instances=3, name="mlp", warm=warm)
    batcher.start()
    try:
        assert len(runner.from_here) == 6
        assert len(runner.threads) == 3
        assert batcher.submit(ask("mlp", {"x": rows_of(1.0)})).result(WAIT)
    finally:
        assert batcher.close()


def test_what_a_thread_cannot_begin_with_is_raised(session: xrt.InferenceSession) -> None:
    settings = BatchSettings(max_batch_size=4)
    layout = Layout.of(session.inputs, session.outputs, settings)
    before = threading.active_count()
    warm = [{"x": np.zeros((1, 64))}]
    batcher = Batcher(Counted(session), layout, settings, Answers(), instances=2, warm=warm)
    with pytest.raises(xrt.InputError, match="the model expects float32"):
        batcher.start()
    assert batcher.close()
    for thread in batcher._threads:
        thread.join()
    assert threading.active_count() == before


def test_without_cuda_a_session_runs_as_it_is(session: xrt.InferenceSession) -> None:
    runner = host_runner(session)
    assert (runner.memory, runner.copies_all, runner.run) == ("pageable", False, session.run)
    session.close()
    with pytest.raises(xrt.XpuRuntimeError, match="closed"):
        host_runner(session)
