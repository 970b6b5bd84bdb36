# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Timeline`: the profiler's events as trees of nested calls, with the device work of each launch."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch.autograd import DeviceType

from xpuruntime.runtime.profiler import TUNING

#: Before the number of a kind of calls, in the name of a range.
RANGE = "xpuruntime#"
#: Before the path of a module, in the name of a range.
MODULE = "xpuruntime@"

#: CUPTI's records of calls into the CUDA runtime and driver. PyTorch 2.13 has a type for them, 2.11 has not.
_API = re.compile(r"(cuda|cu|hip)[A-Z]")
_COMPILING = ("dynamo", "entire_frame_compile", "entire_backward_compile")
BACKWARD = "autograd::engine::evaluate_function: "


class HostEvent:
    """Something that ran on the CPU: an operator or a range."""

    __slots__ = (
        "annotation", "aside", "below", "call", "dtypes", "end", "forward", "inner", "inner_call", "kind", "module",
        "name", "parent", "sequence", "shapes", "start",
    )  # fmt: skip

    def __init__(self, event: Any) -> None:
        self.name: str = event.name()
        self.start: int = event.start_ns()
        self.end: int = self.start + event.duration_ns()
        self.sequence: int = event.sequence_nr()
        self.forward: int = event.fwd_thread_id()
        self.annotation: bool = event.is_user_annotation()
        self.shapes: Any = event.shapes()
        self.dtypes: list[str] = event.dtypes()
        self.parent: HostEvent | None = None
        self.inner = 0
        self.kind = int(self.name[len(RANGE) :]) if self.name.startswith(RANGE) else -1
        self.call: HostEvent | None = self if self.kind >= 0 else None
        self.inner_call: HostEvent | None = None
        self.below: set[int] | None = None
        self.aside = ""
        if self.name == TUNING:
            self.aside = "xpuruntime, tuning"
        elif self.name in _COMPILING or self.name.endswith("(dynamo_timed)"):
            self.aside = "torch.compile, compiling"
        self.module: str | None = None
        if self.name.startswith(MODULE):
            self.annotation = True
            self.module = self.name[len(MODULE) :]

    @property
    def own(self) -> int:
        """Nanoseconds that were spent in this and in nothing inside it."""
        return max(0, self.end - self.start - self.inner)

    def upward(self) -> Iterator[HostEvent]:
        """Yield this and what it ran in, innermost first."""
        node: HostEvent | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def in_backward(self) -> bool:
        """Whether it ran inside of a backward pass."""
        return any(node.name.startswith(BACKWARD) for node in self.upward())

    @property
    def phase(self) -> str:
        """Which phase it belongs to, as `context.phase` has it."""
        recorded = False
        for node in self.upward():
            if node.name.startswith(BACKWARD):
                return "train" if recorded else "backward"
            recorded = recorded or (node.sequence >= 0 and not node.forward)
        return "train" if recorded else "infer"


class DeviceEvent(NamedTuple):
    """A kernel, copy or fill that ran on a device."""

    name: str
    duration: int
    device: int
    node: HostEvent | None
    graph: int
    elsewhere: bool


class Timeline:
    """What was recorded."""

    def __init__(self, events: Iterable[Any]) -> None:
        threads: dict[int, list[HostEvent]] = {}
        resources: dict[int, int] = {}
        host_events: dict[int, tuple[HostEvent, int]] = {}
        launches: dict[int, Any] = {}
        device: list[Any] = []
        for event in events:
            if event.is_hidden_event():
                continue
            if event.device_type() != DeviceType.CPU:
                if not event.is_user_annotation():
                    device.append(event)
                continue
            name = event.name()
            if _API.match(name):
                launches[event.correlation_id()] = event
                continue
            thread = event.start_thread_id()
            if event.is_async() or thread != event.end_thread_id() or name == "[memory]":
                continue
            node = HostEvent(event)
            threads.setdefault(thread, []).append(node)
            resources.setdefault(event.device_resource_id(), thread)
            host_events[event.correlation_id()] = (node, thread)
        for nodes in threads.values():
            _nest(nodes)
        self.nodes = [node for nodes in threads.values() for node in nodes]
        self._starts = {thread: [node.start for node in nodes] for thread, nodes in threads.items()}
        self._threads = threads
        self._made = _made(threads)
        self.work = [self._work(event, launches, host_events, resources) for event in device]

    def module_of(self, node: HostEvent) -> str:
        """Return the path of the module in whose forward something ran, or whose backward it is; empty: unknown."""
        for ancestor in node.upward():
            if ancestor.module is not None:
                return ancestor.module
            if ancestor.sequence >= 0 and ancestor.name.startswith(BACKWARD):
                forward = self._made.get((ancestor.forward, ancestor.sequence))
                return (
                    "" if forward is None else next((up.module for up in forward.upward() if up.module is not None), "")
                )
        return ""

    def forward_of(self, node: HostEvent) -> HostEvent | None:
        """Return the operator of the forward whose backward something is; ``None``: it is none, or not known."""
        for ancestor in node.upward():
            if ancestor.sequence >= 0 and ancestor.name.startswith(BACKWARD):
                return self._made.get((ancestor.forward, ancestor.sequence))
        return None

    def _work(
        self,
        event: Any,
        launches: dict[int, Any],
        host_events: dict[int, tuple[HostEvent, int]],
        resources: dict[int, int],
    ) -> DeviceEvent:
        launch = launches.get(event.correlation_id())
        linked = event.linked_correlation_id() or (0 if launch is None else launch.linked_correlation_id())
        node, thread = host_events.get(linked, (None, None))
        graph = 0
        if launch is not None:
            if "GraphLaunch" in launch.name():
                graph = event.correlation_id()
            if thread is None:
                thread = resources.get(launch.device_resource_id())
            if thread is not None and (node is None or node.call is None):
                node = self._narrowest(thread, launch.start_ns(), node)
        elsewhere = launch is not None and thread is None
        return DeviceEvent(event.name(), event.duration_ns(), event.device_index(), node, graph, elsewhere)

    def _narrowest(self, thread: int, at: int, within: HostEvent | None) -> HostEvent | None:
        index = bisect_right(self._starts[thread], at) - 1
        node: HostEvent | None = self._threads[thread][index] if index >= 0 else None
        while node is not None and node.end < at:
            node = node.parent
        if within is None or (node is not None and any(ancestor is within for ancestor in node.upward())):
            return node
        return within


def _nest(nodes: list[HostEvent]) -> None:
    nodes.sort(key=lambda node: (node.start, -node.end))
    open_: list[HostEvent] = []
    for node in nodes:
        while open_ and open_[-1].end < node.end:
            open_.pop()
        if open_:
            parent = open_[-1]
            node.parent = parent
            parent.inner += node.end - node.start
            node.aside = parent.aside or node.aside
            if node.call is None:
                node.call = parent.call
                open_.append(node)
                continue
            if "::" in parent.name:
                parent.inner_call = node
            for outer in open_:
                outer.below = (outer.below or set()) | {node.kind}
        open_.append(node)


def _made(threads: dict[int, list[HostEvent]]) -> dict[tuple[int, int], HostEvent]:
    """Return thread and sequence number of a node of autograd to the operator of the forward that made it."""
    # Every operator has the number of the node that comes next. The last one with a number has made that node: those
    # before have made none, and may be of another module.
    events: dict[tuple[int, int], HostEvent] = {}
    for thread, nodes in threads.items():
        for node in nodes:
            if node.sequence < 0 or node.forward:  # or it is such a node itself, that runs
                continue
            events[thread, node.sequence] = node
    return events
