# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Watcher`: runs sampled requests once more, in a thread of its own, after their answer."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.tolerances import TOLERANCES, Tolerance
from xpuruntime.serving.batching.assembly import Slice, assemble, take_apart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.serving.batching.jobs import Job
    from xpuruntime.serving.batching.layout import Layout
    from xpuruntime.serving.batching.requests import Feed
    from xpuruntime.serving.messages import InferResponse
    from xpuruntime.serving.models.model_settings import ModelSettings

__all__ = ["Watcher", "tolerance_of"]

#: Samples that may wait; more are dropped and counted.
_WAITING = 4


class Watcher(ABC):
    """Takes samples and runs them in a thread of its own."""

    name: str

    def __init__(self, session: InferenceSession, layout: Layout, settings: ModelSettings) -> None:
        self._session, self._layout = session, layout
        batching = settings.batching
        self._fixed = batching.max_batch_size if batching.shapes == "fixed" else 0
        self._most = batching.max_batch_size
        self._samples: queue.Queue[tuple[Feed, dict[str, Any]] | None] = queue.Queue(_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.runs = self.dropped = self.errors = 0
        self.last_error = ""

    def offer(self, job: Job, response: InferResponse) -> None:
        """Take a request that was answered, if it is to be sampled. Returns at once."""
        if self._closed or not self._sampled():
            return
        if self._most and job.feed.rows > self._most:
            self.dropped += 1  # it was split, so that it cannot run as one
            return
        if self._samples.full():
            self.dropped += 1
            return
        feed = replace(job.feed, arrays={name: array.copy() for name, array in job.feed.arrays.items()})
        try:
            self._samples.put_nowait((feed, {one.name: one.data.copy() for one in response.outputs}))
        except queue.Full:
            self.dropped += 1
            return
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._work, name=f"xpuruntime-{self.name}", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """End the thread, and close the other session."""
        self._closed = True
        with self._lock:
            thread = self._thread
        if thread is not None:
            while not self._samples.empty():
                try:
                    self._samples.get_nowait()
                except queue.Empty:
                    break
            self._samples.put(None)
            thread.join(10.0)
            if thread.is_alive():
                return
        self._close()

    def settle(self, timeout: float = 10.0) -> bool:
        """Wait until all samples were run; return whether they were."""
        end = time.monotonic() + timeout
        while self._samples.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.002)
        return not self._samples.unfinished_tasks

    def verdict(self) -> tuple[bool, str]:
        """Return whether the model may stay ready, else why not."""
        return True, ""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return what was found so far, as plain values."""

    @abstractmethod
    def _sampled(self) -> bool:
        """Return whether the next request is sampled."""

    @abstractmethod
    def _check(self, feed: Feed, outputs: Mapping[str, Any]) -> None:
        """Run one sample."""

    @abstractmethod
    def _close(self) -> None:
        """Close what this has opened."""

    def _run(self, session: InferenceSession, feed: Feed, fixed: int = 0) -> tuple[dict[str, Any], float]:
        """Run a request alone, and return its outputs and seconds."""
        one = Slice(feed, 0, feed.rows)
        made = assemble(self._layout, [one], fixed)
        begin = time.perf_counter()
        results = session.run(made.feeds)
        took = time.perf_counter() - begin
        return take_apart(self._layout, results, made.rows, [one])[0], took

    def _work(self) -> None:
        while (sample := self._samples.get()) is not None:
            try:
                self._check(*sample)
            except Exception as error:  # of the sample alone: the model has answered
                self.errors += 1
                self.last_error = f"{type(error).__name__}: {error}"
            else:
                self.runs += 1
            self._samples.task_done()
        self._samples.task_done()


def tolerance_of(session: InferenceSession, rtol: float | None, atol: float | None) -> Tolerance:
    """Return the tolerance that is stated, or that of the precision that a session computes in."""
    precision, model = session.plan.precision, session.model
    if precision == "model":
        stored = {"float16": "fp16", "bfloat16": "bf16"}
        precision = next((stored[dtype] for dtype in model.weights if dtype in stored), "fp32")
        precision = "int8" if model.quantisation.scheme != "none" else precision
    default = TOLERANCES.get(precision, TOLERANCES["fp32"])
    return Tolerance(
        rtol=default.rtol if rtol is None else rtol,
        atol=default.atol if atol is None else atol,
        cosine=default.cosine,
    )
