# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`BatchExecutor`: execution of batches: inputs put together, the run of the model, outputs taken apart, the times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from xpuruntime.serving.batching.assembly import Slice, assemble, take_apart, whole_inputs, whole_outputs
from xpuruntime.serving.batching.jobs import Execution, Job, failure_of_run
from xpuruntime.serving.batching.settings import batch_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from xpuruntime.engines.host_runner import HostRunner
    from xpuruntime.serving.batching.entries import Dispatch, EntryRows
    from xpuruntime.serving.batching.inline import ShortRuns
    from xpuruntime.serving.batching.layout import Layout
    from xpuruntime.serving.batching.settings import BatchSettings

__all__ = ["BatchExecutor"]

_tick = time.perf_counter_ns


class BatchExecutor:
    """Runs batches. Safe to call from many threads.

    Parameters
    ----------
    runner : HostRunner
    layout : Layout
    settings : BatchSettings
    name : str
        Of the model, for messages.
    short : ShortRuns, optional
        Gets the times of executions that were not inline.
    """

    def __init__(
        self, runner: HostRunner, layout: Layout, settings: BatchSettings, name: str, short: ShortRuns | None = None
    ) -> None:
        self._runner, self._layout, self._name, self._short = runner, layout, name, short
        self._fixed_rows = settings.max_batch_size if settings.shapes == "fixed" else 0
        #: Whether a request that runs alone is passed to the engine as it came.
        self._passes = not self._fixed_rows and not runner.copies_all
        #: Rows that executions have where the runner wants few sizes; the least that fits is taken.
        self._sizes: tuple[int, ...] = ()
        if runner.pads_rows and settings.max_batch_size:
            self._sizes = batch_sizes(settings.max_batch_size, settings.preferred_batch_size)

    def execute(self, batch: Dispatch, jobs: Sequence[Job], now: float) -> Execution:
        """Run a batch of the parts of these jobs; what it raises is in the result."""
        execution = Execution(batch)
        parts = batch.parts
        for job in jobs:
            if job.began is None:
                job.began = now
            job.executions.append(execution)
        feed = jobs[0].feed
        whole = len(parts) == 1 and parts[0].stop - parts[0].start == feed.rows
        try:
            if whole and self._passes and not feed.lengths:
                self._run_whole(jobs[0], execution)
            else:
                self._run_parts(parts, jobs, execution)
        except BaseException as error:  # of this batch alone: the thread serves on
            execution.error = failure_of_run(error, self._name)
        else:
            if self._short is not None and batch.reason != "inline":
                self._short.queued(feed.shapes, execution.compute_ns * 1e-9)
        return execution

    def probe(self, feeds: Mapping[str, Any]) -> None:
        """Run inputs, and drop the outputs."""
        self._runner.run(dict(feeds))

    def _run_whole(self, job: Job, execution: Execution) -> None:
        begin = _tick()
        feeds, execution.elements = whole_inputs(self._layout, job.feed)
        execution.rows = job.feed.rows
        copied = _tick()
        results = self._runner.run(feeds)
        ran = _tick()
        job.pieces[0] = whole_outputs(self._layout, results, job.feed)
        execution.input_ns, execution.infer_ns, execution.output_ns = copied - begin, ran - copied, _tick() - ran

    def _run_parts(self, parts: Sequence[EntryRows], jobs: Sequence[Job], execution: Execution) -> None:
        begin = _tick()
        slices = [Slice(job.feed, part.start, part.stop) for job, part in zip(jobs, parts, strict=True)]
        made = assemble(self._layout, slices, self._fixed_rows or self._padded(slices), self._runner)
        execution.rows, execution.elements, execution.padding = made.rows, made.elements, made.padding
        copied = _tick()
        results = self._runner.run(made.feeds)
        ran = _tick()
        pieces = take_apart(self._layout, results, made.rows, slices)
        execution.input_ns, execution.infer_ns, execution.output_ns = copied - begin, ran - copied, _tick() - ran
        for job, part, outputs in zip(jobs, parts, pieces, strict=True):
            job.pieces[part.start] = outputs

    def _padded(self, slices: Sequence[Slice]) -> int:
        rows = sum(one.stop - one.start for one in slices)
        return next((size for size in self._sizes if size >= rows), 0)
