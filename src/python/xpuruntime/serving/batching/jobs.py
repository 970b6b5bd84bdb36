# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Job`: one accepted request with its future, from arrival to answer, and what was measured of it."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xpuruntime.serving.messages import InferResponse

if TYPE_CHECKING:
    from xpuruntime.serving.batching.entries import Dispatch, Entry
    from xpuruntime.serving.batching.requests import Feed
    from xpuruntime.serving.messages import InferRequest

__all__ = ["Execution", "Job", "answer", "fail"]


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
    future: Future[InferResponse] = field(default_factory=Future)
    #: When the first of its rows was sent.
    began: float | None = None
    #: Outputs by first row, and the executions that made them.
    pieces: dict[int, dict[str, Any]] = field(default_factory=dict)
    executions: list[Execution] = field(default_factory=list)


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
