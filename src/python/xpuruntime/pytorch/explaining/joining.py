# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`join`: whose the time is that the profiler saw, of calls that were recorded and of everything else."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xpuruntime.pytorch.explaining.escapes import Escape, escape_of_kernel, escape_of_operator
from xpuruntime.pytorch.explaining.timeline import Timeline

if TYPE_CHECKING:
    from xpuruntime.pytorch.explaining.timeline import DeviceWork, Node

__all__ = ["Joined", "Share", "join"]

#: Ranges in which torch.compile runs what it compiled for the CPU into C++, which no profiler sees into.
_COMPILED = "## Call CompiledFxGraph"
#: Types of tensors, as kineto has them.
_DTYPES = {
    "double": "fp64", "float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16", "c10::Float8_e4m3fn": "fp8",
    "signed char": "int8",
}  # fmt: skip


class Share:
    """Time, how often, and by which kernels.

    Attributes
    ----------
    ns : int
    count : int
        Of a recorded call: how many of its ranges the profiler saw.
    kernels : dict of str to int
        Kernel to nanoseconds; on the CPU, operator of PyTorch's to nanoseconds.
    leaves : set of str
        Operators of PyTorch's that ran inside.
    modules : set of str
        Of a recorded call: paths of the modules that it ran in, as ranges and sequence numbers tell.
    """

    __slots__ = ("count", "kernels", "leaves", "modules", "ns")

    def __init__(self) -> None:
        self.ns = 0
        self.count = 0
        self.kernels: dict[str, int] = defaultdict(int)
        self.leaves: set[str] = set()
        self.modules: set[str] = set()

    def add(self, name: str, ns: int) -> None:
        """Add time in one kernel."""
        self.ns += ns
        self.kernels[name] += ns


class Escaped(NamedTuple):
    """What tells one row of what no override saw from another."""

    what: Literal["escape", "replay", "compiled", "other"]
    op: str
    operator: str
    module: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    reason: str


class Joined(NamedTuple):
    """Whose the time is.

    Attributes
    ----------
    kind : {"device", "cpu"}
        Which time: of kernels, copies and fills on devices, or on the CPU where no device did anything.
    calls : dict of int to Share
        By number of a kind of recorded calls.
    rest : dict of Escaped to Share
    overhead_ns : int
        CPU time between the entry of operators and their kernels: choosing, and watching. In no share.
    """

    kind: Literal["device", "cpu"]
    calls: dict[int, Share]
    rest: dict[Escaped, Share]
    overhead_ns: int


def join(events: list[Any]) -> Joined:
    """Read what the profiler recorded."""
    timeline = Timeline(events)
    return _Joining(timeline).result()


class _Joining:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._calls: dict[int, Share] = defaultdict(Share)
        self._rest: dict[Escaped, Share] = defaultdict(Share)
        self._overhead = 0
        self._escapes: dict[int, tuple[Node, Escape] | None] = {}
        self._replays: dict[Escaped, set[int]] = defaultdict(set)

    def result(self) -> Joined:
        kind: Literal["device", "cpu"] = "device" if self._timeline.work else "cpu"
        for node in self._timeline.nodes:
            self._take(node, timed=kind == "cpu")
        for work in self._timeline.work:
            self._take_work(work)
        for key, graphs in self._replays.items():
            self._rest[key].count = len(graphs)
        return Joined(kind, dict(self._calls), dict(self._rest), self._overhead)

    def _take(self, node: Node, *, timed: bool) -> None:
        """Take one operator or range of the CPU."""
        if node.kind >= 0:
            share = self._calls[node.kind]
            if node.is_range:
                share.count += 1
                share.modules.add(self._timeline.module_of(node))
            if not node.is_range and "::" in node.name:
                share.leaves.add(node.name)
            elif node.is_range and node.parent is not None and "::" in node.parent.name:
                share.leaves.add(node.parent.name)
            if timed:
                name = node.name if not node.is_range or node.parent is None else node.parent.name
                share.add(name, node.own)
            return
        if node.has_range:
            self._overhead += node.own
            return
        preparing = next((one.inner_kind for one in node.upward() if one.inner_kind >= 0), -1)
        if preparing >= 0:
            if timed:
                self._calls[preparing].add(node.name, node.own)
            return
        escape = self._escape(node)
        if escape is not None:
            outer, what = escape
            key = self._key(outer, what)
            self._rest[key].count += outer is node
            if timed:
                self._rest[key].add(node.name, node.own)
        elif timed and node.name.startswith(_COMPILED):
            key = Escaped("compiled", "", "torch.compile", self._timeline.module_of(node), "", (), (), "")
            self._rest[key].add("C++ by torch.compile", node.own)
            self._rest[key].count += 1
        elif timed and not node.annotation:
            other = self._other("autograd engine" if node.name.startswith("autograd::engine") else node.name)
            other.add(node.name, node.own)
            other.count += 1

    def _take_work(self, work: DeviceWork) -> None:
        """Take one kernel, copy or fill of a device."""
        node = work.node
        if work.graph:
            key = Escaped(
                "replay", "", "CUDA graph", "" if node is None else self._timeline.module_of(node), "", (), (), ""
            )
            self._replays[key].add(work.graph)
            self._rest[key].add(work.name, work.duration)
            return
        if node is not None:
            for one in node.upward():
                kind = one.kind if one.kind >= 0 else one.inner_kind
                if kind >= 0:
                    self._calls[kind].add(work.name, work.duration)
                    return
            escape = self._escape(node)
            if escape is not None:
                self._rest[self._key(*escape)].add(work.name, work.duration)
                return
        operator = None if node is None else _operator(node)
        by_name = escape_of_kernel(work.name) if operator is None else None
        if by_name is not None:
            module = "" if node is None else self._timeline.module_of(node)
            phase = "backward" if node is not None and node.phase == "backward" else ""
            share = self._rest[Escaped("escape", by_name.op, work.name, module, phase, (), (), by_name.reason)]
        else:
            share = self._other(work.name if operator is None else operator)
        share.add(work.name, work.duration)
        share.count += 1

    def _other(self, name: str) -> Share:
        return self._rest[Escaped("other", "", name, "", "", (), (), "")]

    def _key(self, node: Node, escape: Escape) -> Escaped:
        shapes = tuple(tuple(shape) for shape in node.shapes if shape and not isinstance(shape[0], (list, tuple)))
        dtypes = tuple(dict.fromkeys(_DTYPES[name] for name in node.dtypes if name in _DTYPES))
        module = self._timeline.module_of(node)
        return Escaped("escape", escape.op, node.name, module, node.phase, shapes, dtypes, escape.reason)

    def _escape(self, node: Node) -> tuple[Node, Escape] | None:
        """Return the outermost operator around this that a policy can speak of, and what it is."""
        if id(node) in self._escapes:
            return self._escapes[id(node)]
        found = None if node.parent is None else self._escape(node.parent)
        if found is None:
            escape = escape_of_operator(node.name) or _compiled(node.name)
            found = None if escape is None else (node, escape)
        self._escapes[id(node)] = found
        return found


def _compiled(name: str) -> Escape | None:
    """Return what a kernel computes around whose launch torch.compile has put a range of its name."""
    return escape_of_kernel(name) if name.startswith("triton_") or "cpp_fused_" in name else None


def _operator(node: Node) -> str | None:
    """Return the operator that launched a kernel, where there is one; compiled code has none."""
    for one in node.upward():
        if one.name.startswith("triton_") or "cpp_fused_" in one.name:
            return one.name
        if one.name.startswith(("aten::", "torchvision::", "c10d::", "xpuruntime::", "nccl")):
            return one.name
        if one.name.startswith("Optimizer."):
            return one.name
    return None
