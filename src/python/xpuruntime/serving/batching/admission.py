# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Admission`: requests that fit a model, with their deadline and priority level, before they are queued."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.serving.batching.entries import Entry
from xpuruntime.serving.batching.jobs import Job
from xpuruntime.serving.batching.requests import RequestCheck
from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.serving.batching.layout import Layout
    from xpuruntime.serving.batching.settings import BatchSettings
    from xpuruntime.serving.messages import InferRequest

__all__ = ["Admission"]


class Admission:
    """Checks requests, and makes jobs of them.

    Parameters
    ----------
    layout : Layout
    settings : BatchSettings
    name : str
        Of the model, for messages.
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, layout: Layout, settings: BatchSettings, name: str, clock: Callable[[], float]) -> None:
        self._name, self._clock = name, clock
        self._check = RequestCheck(layout, fixed=settings.shapes == "fixed")
        self._timeout, self._delays = settings.timeout_us * 1e-6, settings.timeout_action == "delay"
        self._levels, self._default_level = settings.priority_levels, settings.default_level

    def accept(self, request: InferRequest) -> Job:
        """Return a request with its deadline and level.

        Raises
        ------
        ServingError
            ``INVALID_ARGUMENT``: it does not fit the model. ``DEADLINE_EXCEEDED``: its deadline has passed.
        """
        feed = self._check(request)
        now = self._clock()
        deadline = request.deadline
        overdue = None
        if self._timeout:
            if self._delays:
                overdue = now + self._timeout
            else:
                deadline = min(deadline, now + self._timeout) if deadline is not None else now + self._timeout
        if deadline is not None and deadline <= now:
            raise ServingError(
                Status.DEADLINE_EXCEEDED, "the deadline had passed when the request arrived. Fix: allow more time"
            )
        level = self._level(request.priority) if request.priority else self._default_level
        entry = Entry(feed.rows, feed.group, now, deadline, overdue, level)
        job = entry.payload = Job(request, feed, entry)
        return job

    def _level(self, priority: int) -> int:
        levels = self._levels
        if not 1 <= priority <= levels:
            has = f"has the levels 1 to {levels}" if levels else "has no levels"
            raise ServingError(
                Status.INVALID_ARGUMENT,
                f"priority {priority}: model {self._name!r} {has}. Fix: leave it out, or set batching.priority_levels",
            )
        return priority
