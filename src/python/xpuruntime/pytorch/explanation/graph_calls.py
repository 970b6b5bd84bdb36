# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`GraphCalls`: the calls that a CUDA graph was captured with, which each of its replays does again unseen."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import structs

from xpuruntime.ops.decision_log import decisions
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.explanation.call_recorder import CallRecorder
from xpuruntime.pytorch.explanation.summary import Row, decision_of

if TYPE_CHECKING:
    import torch

    from xpuruntime.pytorch.dispatch.context import CallObserver
    from xpuruntime.pytorch.dispatch.route import Route
    from xpuruntime.pytorch.explanation.call_recorder import RecordedCalls

_REPLAYED = "chosen at capture; the time of the replays is in the row of the graph"
_graphs: weakref.WeakSet[GraphCalls] = weakref.WeakSet()


class GraphCalls:
    """Calls of operations that a policy decided while a graph was captured, and how often it was replayed since."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.replays = 0
        self.root = weakref.ref(root)
        self._calls: list[tuple[RecordedCalls, int, str]] = []

    @contextlib.contextmanager
    def recording(self, recorder: CallRecorder) -> Iterator[None]:
        """Take the calls of the block for those of the graph."""
        before = [kind.count for kind in recorder.kinds]
        yield
        kernel_decisions = decisions()
        for number, kind in enumerate(recorder.kinds):
            count = kind.count - (before[number] if number < len(before) else 0)
            decision = decision_of(kind, kernel_decisions)
            if count:
                self._calls.append((kind, count, kind.kernel if decision is None else decision.kernel))
        _graphs.add(self)

    def rows(self, replays: int) -> Iterator[Row]:
        """Yield a row for each kind of calls in so many replays."""
        for seen, count, kernel in self._calls:
            yield Row(
                op=seen.op,
                operator=seen.operator,
                module=seen.module,
                phase=seen.phase,
                shapes=seen.shapes,
                dtypes=seen.dtypes,
                device=seen.device,
                requested=seen.asked,
                source=seen.source,
                resolved=kernel,
                observed=(),
                status=seen.status,  # type: ignore[arg-type]
                reason="; ".join(filter(None, (seen.reason, _REPLAYED))),
                count=count * replays,
                time_us=0.0,
                kv=seen.kv,
                measured=seen.measured,
            )


class _Chained(CallRecorder):
    """A recorder that leaves calls to another observer, too."""

    def __init__(self, other: CallObserver | None) -> None:
        super().__init__(lambda _: contextlib.nullcontext())
        self._other = other

    def call(
        self, name: str, op: str, route: Route | None, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        other = self._other
        if other is None:
            return super().call(name, op, route, run, args, kwargs)

        def through(*args: Any, **kwargs: Any) -> Any:
            return other.call(name, op, route, run, args, kwargs)

        return super().call(name, op, route, through, args, kwargs)


@contextlib.contextmanager
def watched_capture(
    root: torch.nn.Module, *, compiled: bool
) -> Iterator[tuple[GraphCalls, contextlib.AbstractContextManager[None]]]:
    """Watch the calls that the policy in force decides; yield them, and the context of the capture itself.

    Without a policy nothing is watched. Hooks that tell modules are not put into code that is compiled, which would
    then be compiled anew.
    """
    calls = GraphCalls(root)
    if active_policy() is None:
        yield calls, contextlib.nullcontext()
        return
    with contextlib.ExitStack() as undo:
        if not compiled:
            module_paths.require(root, first=False)
            undo.callback(module_paths.release, root, first=False)
        recorder = _Chained(CONTEXT.observer)
        before = CONTEXT.watch(recorder)
        undo.callback(CONTEXT.watch, before)
        yield calls, calls.recording(recorder)


def replays_so_far() -> dict[GraphCalls, int]:
    """Return how often each graph was replayed."""
    return {calls: calls.replays for calls in list(_graphs)}


def replays_of(root: torch.nn.Module, before: Mapping[GraphCalls, int]) -> int:
    """Return how many graphs of a model were replayed since."""
    now = replays_so_far()
    return sum(replays - before.get(calls, 0) for calls, replays in now.items() if calls.root() is root)


def rows_of_replays(before: Mapping[GraphCalls, int]) -> list[Row]:
    """Return rows for what was replayed since, one for equal calls of several graphs."""
    counts: dict[Row, int] = {}
    for calls, replays in replays_so_far().items():
        for row in calls.rows(replays - before.get(calls, 0)):
            kind = structs.replace(row, count=0)
            counts[kind] = counts.get(kind, 0) + row.count
    return [structs.replace(row, count=count) for row, count in counts.items() if count]
