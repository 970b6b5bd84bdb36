# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ShortRuns`: which requests are short enough for inline execution, in the thread that received them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.serving.batching.settings import BatchSettings

__all__ = ["ShortRuns", "Soon", "sized_by_values"]

#: Calls a function later in the same thread, such as `call_soon` of an event loop.
Soon: TypeAlias = "Callable[[Callable[[], None]], object]"

#: Microseconds that two wake-ups of threads take at least.
_HAND_OVER_US = 50
#: Shapes that are remembered.
_MOST = 1024
#: The share of time that executions above the limit may take from their thread, and how many seconds at once.
_SHARE, _BURST = 0.25, 0.1
#: Seconds of an execution behind which the pause doubles each time, up to 2^12, unless so many seconds went well.
_SEVERE, _MOST_DOUBLED, _FORGIVEN = 0.1, 12, 60.0


#: Operators whose results are as large as the values of these inputs say, which shapes do not tell; of all where empty.
_SIZES: dict[str, tuple[int, ...]] = {
    "CenterCropPad": (1,),
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Loop": (),
    "OneHot": (1,),
    "Pad": (1,),
    "Range": (),
    "Resize": (2, 3),
    "Tile": (1,),
    "Upsample": (1,),
}


def sized_by_values(model: ModelInfo) -> bool:
    """Return whether the values of a request may say how much a model computes, beside the shapes of its inputs."""
    made_by = {name: node for node in model.nodes for name in node.outputs}
    given = {one.name for one in model.inputs}
    todo = [
        name
        for node in model.nodes
        if node.op in _SIZES
        for at, name in enumerate(node.inputs)
        if not _SIZES[node.op] or at in _SIZES[node.op]
    ]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in given:
            return True
        node = made_by.get(name)
        if name not in seen and node is not None and node.op not in ("Shape", "Size"):
            todo += node.inputs
        seen.add(name)
    return False


class ShortRuns:
    """Execution times by the shapes of the inputs.

    The shortest execution of a shape decides, because waiting for a processor or for the interpreter only adds to it.
    A model whose time depends on its values is caught by what it does: what executions take above the limit is summed
    up, and where it is over a quarter of the time, all requests are queued until it no longer is.
    """

    def __init__(self, limit: float, alone_limit: float = 0.0) -> None:
        self.limit, self.alone_limit = limit, max(limit, alone_limit)
        self._best: dict[Hashable, float] = {}
        self._until = self._late = self._late_at = 0.0
        self._severe = 0

    @classmethod
    def of(cls, settings: BatchSettings, instances: int = 1) -> ShortRuns | None:
        """Return the times that settings ask for; `None` where requests are better queued, such as to wait for others.

        Requests that could run together are inline where an execution costs less than the way to another thread and
        back, so that nothing is gained by putting them together. Those that come one at a time gain nothing from a
        thread, unless several instances could run side by side.
        """
        together = settings.max_batch_size > 1
        microseconds = settings.inline_below_us
        alone = settings.inline_alone_below_us if microseconds else 0
        if together:
            microseconds = 0 if settings.max_queue_delay_us else min(microseconds, _HAND_OVER_US)
        if instances > 1 or (together and settings.max_queue_delay_us and settings.queue_delay == "fixed"):
            alone = 0
        return cls(microseconds * 1e-6, alone * 1e-6) if microseconds or alone else None

    def allow(self, shapes: Hashable, now: float, *, alone: bool = False) -> bool:
        """Return whether a request of these shapes may run inline."""
        limit = self.alone_limit if alone else self.limit
        return self._until <= now and self._best.get(shapes, _SEVERE) <= limit

    def queued(self, shapes: Hashable, seconds: float) -> None:
        """Take the time of an execution that was not inline."""
        best = self._best.get(shapes)
        if best is None or seconds < best:
            if best is None and len(self._best) >= _MOST:
                self._best.clear()
            self._best[shapes] = seconds

    def overran(self, seconds: float, now: float) -> None:
        """Take an inline execution that was longer than the limit, and has just ended."""
        if now - self._until > _FORGIVEN:
            self._severe = 0
        self._late = max(0.0, self._late - _SHARE * (now - self._late_at)) + seconds
        self._late_at = now
        self._until = now + max(0.0, self._late - _BURST) / _SHARE
        if seconds > _SEVERE:
            self._until = now + seconds / _SHARE * 2**self._severe
            self._severe = min(self._severe + 1, _MOST_DOUBLED)
