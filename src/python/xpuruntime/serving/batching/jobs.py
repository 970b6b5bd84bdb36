# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Job`: one accepted request with its future, from arrival to answer, and what was measured of it."""

from __future__ import annotations

import logging
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError, OutOfMemoryError, XpuRuntimeError
from xpuruntime.printable import printable
from xpuruntime.serving.messages import InferResponse
from xpuruntime.serving.status import ServingError, Status, without_folders

if TYPE_CHECKING:
    from xpuruntime.serving.batching.entries import Dispatch, Entry
    from xpuruntime.serving.batching.requests import Feed
    from xpuruntime.serving.messages import InferRequest

__all__ = ["Execution", "Job", "QueueState", "answer", "fail", "failure_of_run"]

_logger = logging.getLogger("xpuruntime.serving")


@dataclass(slots=True)
class Execution:
    """What was measured of one execution: sizes, times in nanoseconds, and why it was sent."""

    batch: Dispatch
    rows: int = 0
    elements: int = 0
    padding: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    error: BaseException | None = None

    @property
    def compute_ns(self) -> int:
        """Nanoseconds of the whole execution."""
        return self.input_ns + self.infer_ns + self.output_ns


@dataclass(slots=True, eq=False)
class Job:
    """One accepted request."""

    request: InferRequest
    feed: Feed
    entry: Entry
    #: Made when the request is queued; one that runs inline has none.
    future: Future[InferResponse] = field(init=False)
    #: When the first of its rows was sent.
    began: float | None = None
    #: Outputs by first row, and the executions that made them.
    pieces: dict[int, dict[str, Any]] = field(default_factory=dict)
    executions: list[Execution] = field(default_factory=list)


class QueueState:
    """What a batcher does at one moment: requests that wait and run, and how long the first of them have."""

    __slots__ = ("executing", "oldest_deadline", "oldest_wait", "running", "waiting")

    def __init__(
        self, waiting: int, running: int, oldest_wait: float, oldest_deadline: float | None, executing: float
    ) -> None:
        self.waiting, self.running = waiting, running
        #: Seconds that the oldest request has waited, and seconds until its deadline; negative where that has passed.
        self.oldest_wait, self.oldest_deadline = oldest_wait, oldest_deadline
        #: Seconds that the longest execution has run so far.
        self.executing = executing


def answer(future: Future[InferResponse], response: InferResponse) -> bool:
    """Set the result, and return whether somebody still waits for it."""
    try:
        future.set_result(response)
    except InvalidStateError:
        return False
    return True


def fail(future: Future[InferResponse], error: BaseException) -> bool:
    """Set the error, and return whether somebody still waits for it."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        return False
    return True


def failure_of_run(error: BaseException, name: str) -> ServingError:
    """Return the error of a failed execution as clients get it.

    It keeps no tensor of the batch alive: tracebacks are dropped, and an error that is not of this package is logged
    with its traceback before.
    """
    if not isinstance(error, (XpuRuntimeError, MemoryError)):
        _logger.error("a batch of model %r failed", name, exc_info=error)
    one: BaseException | None = error
    while one is not None and one.__traceback__ is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    if isinstance(error, ServingError):
        return error
    text = without_folders(printable(str(error))) or type(error).__name__
    if isinstance(error, InputError):
        status = Status.INVALID_ARGUMENT
    elif isinstance(error, (OutOfMemoryError, MemoryError)):
        status = Status.RESOURCE_EXHAUSTED
        text = f"{text}. Fix: lower batching.max_batch_size, or the number of models on the device"
    else:
        status = Status.INTERNAL
    made = ServingError(status, f"model {name!r}: {text}")
    made.__cause__ = error
    return made
