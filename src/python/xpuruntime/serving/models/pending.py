# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Pending`: requests that wait until their model is loaded, with their deadlines."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from xpuruntime.serving.batching.jobs import answer, fail
from xpuruntime.serving.messages import InferResponse
from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.serving.messages import InferRequest

__all__ = ["Pending"]

#: Seconds after which a deadline is looked at, at the latest.
_TICK = 0.05


class Pending:
    """Requests of a model that is being loaded for them.

    Parameters
    ----------
    name : str
    limit : int
        Requests that may wait; 0 for no limit.
    load : callable
        Loads the model and returns what takes its requests. Slow; called in a thread.
    """

    def __init__(
        self, name: str, limit: int, load: Callable[[], Callable[[InferRequest], Future[InferResponse]]]
    ) -> None:
        self._name, self._limit, self._load = name, limit, load
        self._lock = threading.Lock()
        self._waiting: list[tuple[InferRequest, Future[InferResponse]]] = []
        self._loading = self._closed = False

    def add(self, request: InferRequest) -> Future[InferResponse]:
        """Take a request, and load the model unless that goes on already.

        Raises
        ------
        ServingError
            ``RESOURCE_EXHAUSTED``: as many wait as may.
        """
        future: Future[InferResponse] = Future()
        with self._lock:
            self._waiting = [one for one in self._waiting if not one[1].done()]
            if self._limit and len(self._waiting) >= self._limit:
                raise ServingError(
                    Status.RESOURCE_EXHAUSTED,
                    f"model {self._name!r} is being loaded, and {self._limit} requests wait for it already. Fix: retry",
                    retry_after=1.0,
                )
            self._waiting.append((request, future))
        self.wake()
        return future

    def wake(self) -> None:
        """Load the model unless that goes on already. Returns at once."""
        with self._lock:
            if self._loading or self._closed:
                return
            self._loading = True
        threading.Thread(target=self._work, name=f"xpuruntime-load-{self._name}", daemon=True).start()
        threading.Thread(target=self._expire, name=f"xpuruntime-load-{self._name}-timer", daemon=True).start()

    def close(self) -> None:
        """Fail what waits."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            fail(future, ServingError(Status.UNAVAILABLE, "the server is being stopped. Fix: ask another one"))

    def _work(self) -> None:
        error: Exception | None = None
        infer: Callable[[InferRequest], Future[InferResponse]] | None = None
        try:
            infer = self._load()
        except Exception as failure:  # whatever it was, those who wait get an answer
            error = ServingError(Status.UNAVAILABLE, str(failure), retry_after=getattr(failure, "retry_after", None))
        with self._lock:
            self._loading = False
            waiting, self._waiting = self._waiting, []
        for request, future in waiting:
            if infer is None:
                assert error is not None
                fail(future, error)
            else:
                _hand_over(infer, request, future)

    def _expire(self) -> None:
        while True:
            time.sleep(_TICK)
            now = time.monotonic()
            with self._lock:
                if not self._loading:
                    return
                late = [one for one in self._waiting if _is_late(one[0], now)]
                self._waiting = [one for one in self._waiting if not _is_late(one[0], now)]
            for _, future in late:
                fail(future, _late(self._name))


def _is_late(request: InferRequest, now: float) -> bool:
    return request.deadline is not None and request.deadline <= now


def _late(name: str) -> ServingError:
    return ServingError(
        Status.DEADLINE_EXCEEDED,
        f"model {name!r}: the deadline passed while it was being loaded. Fix: allow more time, or load it at startup",
    )


def _hand_over(
    infer: Callable[[InferRequest], Future[InferResponse]], request: InferRequest, future: Future[InferResponse]
) -> None:
    if future.done():
        return
    try:
        inner = infer(request)
    except Exception as error:
        fail(future, error)
        return

    def forward(done: Future[InferResponse]) -> None:
        if done.cancelled():
            future.cancel()
        elif (error := done.exception()) is not None:
            fail(future, error)
        else:
            answer(future, done.result())

    future.add_done_callback(lambda outer: inner.cancel() if outer.cancelled() else None)
    inner.add_done_callback(forward)
