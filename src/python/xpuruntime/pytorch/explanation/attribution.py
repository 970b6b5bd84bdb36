# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attribution of device work to calls, in recordings of Kineto."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from xpuruntime.policies.kernel_rules import FAMILIES, TENSOR_OPS
from xpuruntime.pytorch.coverage.model_operations import kind_of_rest, operation_of_model
from xpuruntime.pytorch.coverage.operation_table import (
    NOT_REACHED,
    UNKNOWN,
    TritonFunction,
    UncoveredKernel,
    autograd_functions,
    decomposed_operator,
    operation_of,
    triton_functions,
    uncovered_kernel,
    uncovered_operator,
)
from xpuruntime.pytorch.explanation.call_recorder import MergedSizes, ranged
from xpuruntime.pytorch.explanation.requested import COMPILED
from xpuruntime.pytorch.explanation.timeline import BACKWARD, Timeline

if TYPE_CHECKING:
    from xpuruntime.pytorch.explanation.call_recorder import RecordedCalls
    from xpuruntime.pytorch.explanation.timeline import DeviceEvent, HostEvent

#: Ranges in which torch.compile runs what it compiled for the CPU into C++, which no profiler sees into.
_COMPILED = "## Call CompiledFxGraph"
#: Types of tensors, as kineto has them.
_DTYPES = {
    "double": "fp64", "float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16", "c10::Float8_e4m3fn": "fp8",
    "signed char": "int8", "unsigned char": "uint8", "short int": "int16", "int": "int32", "long int": "int64",
    "bool": "bool", "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
}  # fmt: skip


class AttributedTime:
    """Time, how often, and by which kernels."""

    __slots__ = ("count", "kernels", "leaves", "ns")

    def __init__(self) -> None:
        self.ns = 0
        self.count = 0
        self.kernels: dict[str, int] = defaultdict(int)
        self.leaves: set[str] = set()

    def add(self, name: str, ns: int) -> None:
        """Add time in one kernel."""
        self.ns += ns
        self.kernels[name] += ns


class UnattributedCalls(NamedTuple):
    """What distinguishes one row of what no override saw from another."""

    what: Literal["uncovered", "replay", "compiled", "elsewhere", "unknown", "other"]
    op: str
    operator: str
    module: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    reason: str
    kind: str = ""


class Called(NamedTuple):
    """What distinguishes one row of recorded calls from another."""

    kind: int
    operator: str
    module: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


class TimeAttribution(NamedTuple):
    """Whose the time is."""

    kind: Literal["device", "cpu"]
    calls: dict[Called, AttributedTime]
    rest: dict[UnattributedCalls, AttributedTime]
    overhead_ns: int
    #: Work of devices that was launched inside of the forward of each module itself, in nanoseconds.
    modules: dict[str, int]


#: Products of batches, which projections are not, and attention.
_SCORES = re.compile(r"^aten::(bmm|baddbmm|_?scaled_dot_product_)")
#: What PyTorch's engine calls around an operator that is the whole gradient of attention.
_OWN_GRADIENT = re.compile(r"\bScaledDotProduct\w+Backward\d+$")
#: Operations whose gradient PyTorch computes by operators that are no call of their own.
_SPELLED = frozenset((*TENSOR_OPS, "rms_norm", "layer_norm", "attention"))


def attribute_events(
    events: list[Any], kinds: Sequence[RecordedCalls], modules: Mapping[str, torch.nn.Module] = MappingProxyType({})
) -> TimeAttribution:
    """Read what the profiler recorded, of calls of some kinds and besides; `modules` are those that ran, by path."""
    return _Joining(Timeline(events), kinds, modules).result()


class _Joining:
    def __init__(
        self, timeline: Timeline, kinds: Sequence[RecordedCalls], modules: Mapping[str, torch.nn.Module]
    ) -> None:
        self._timeline = timeline
        self._module_of_path = modules
        #: What ran around the calls of a kind.
        self._around: dict[int, AttributedTime] = defaultdict(AttributedTime)
        self._adapted: dict[tuple[str, str], dict[str, RecordedCalls]] = defaultdict(dict)
        for seen in kinds:
            if seen.op in _SPELLED and seen.count:
                self._adapted[seen.op, seen.module].setdefault(seen.phase, seen)
        self._kinds = kinds
        self._functions = autograd_functions()
        self._triton: dict[str, tuple[TritonFunction, ...]] | None = None
        self._keys: dict[int, Called] = {}
        self._calls: dict[Called, AttributedTime] = defaultdict(AttributedTime)
        self._rest: dict[UnattributedCalls, AttributedTime] = defaultdict(AttributedTime)
        self._sizes = MergedSizes()
        self._overhead = 0
        self._uncovered: dict[int, tuple[HostEvent, UncoveredKernel] | None] = {}
        self._replays: dict[UnattributedCalls, set[int]] = defaultdict(set)
        self._modules: dict[str, int] = defaultdict(int)
        #: When the first attention, or product of scores, began in each module's range.
        self._scores: dict[int, int] | None = None

    def result(self) -> TimeAttribution:
        kind: Literal["device", "cpu"] = "device" if self._timeline.work else "cpu"
        for node in self._timeline.nodes:
            self._take(node, timed=kind == "cpu")
        for work in self._timeline.work:
            self._take_work(work)
        for key, graphs in self._replays.items():
            self._rest[key].count = len(graphs)
        for called, share in self._calls.items():
            around = self._around.pop(called.kind, None)
            for name, ns in () if around is None else around.kernels.items():
                share.add(name, ns)
        return TimeAttribution(kind, dict(self._calls), dict(self._rest), self._overhead, dict(self._modules))

    def _take(self, node: HostEvent, *, timed: bool) -> None:
        if node.call is not None:
            if not self._kinds[node.call.kind].count:
                self._overhead += node.own  # a kernel that refused, so that another one was taken
                return
            share = self._share(node.call)
            # The native kernel runs in the range itself, without an event of its own: it is the operator's around it.
            runs = node.parent if node.kind >= 0 and node.parent is not None else node
            share.count += node.kind >= 0
            if "::" in runs.name:
                share.leaves.add(runs.name)
            if timed:
                share.add(runs.name, node.own)
            return
        if node.aside:
            if timed:
                share = self._other(node.aside)
                share.add(node.aside, node.own)
                share.count += node.parent is None or not node.parent.aside
            return
        if node.inner_call is not None:
            self._overhead += node.own
            return
        preparing = next((ancestor.inner_call for ancestor in node.upward() if ancestor.inner_call is not None), None)
        if preparing is not None:
            if not self._kinds[preparing.kind].count:
                self._overhead += node.own  # all kernels refused
            elif timed:
                self._share(preparing).add(node.name, node.own)
            return
        following = self._followed(node)
        if following is not None:
            if timed:
                following.add(node.name, node.own)
            return
        uncovered = self._uncovered_share(node)
        if uncovered is not None:
            outer, what = uncovered
            key = self._key(outer, what)
            self._rest[key].count += outer is node
            if timed:
                self._rest[key].add(node.name, node.own)
        elif timed and node.name.startswith(_COMPILED):
            key = UnattributedCalls("compiled", "", COMPILED, self._timeline.module_of(node), "", (), (), "")
            self._rest[key].add("C++ by torch.compile", node.own)
            self._rest[key].count += 1
        elif self._only_leads(node):
            self._overhead += node.own
        elif timed and not node.annotation:
            engine = node.name.startswith("autograd::engine")
            other = self._other("autograd engine") if engine else self._rest_of(node, node.name)
            other.add(node.name, node.own)
            other.count += 1

    def _take_work(self, work: DeviceEvent) -> None:
        node = work.node
        if work.graph:
            key = UnattributedCalls(
                "replay", "", "CUDA graph", "" if node is None else self._timeline.module_of(node), "", (), (), ""
            )
            self._replays[key].add(work.graph)
            self._rest[key].add(work.name, work.duration)
            return
        if node is not None:
            self._modules[self._timeline.module_of(node)] += work.duration
            if node.aside and node.call is None:
                self._other(node.aside).add(work.name, work.duration)
                self._other(node.aside).count += 1
                return
            call = next(
                (
                    ancestor.call or ancestor.inner_call
                    for ancestor in node.upward()
                    if ancestor.call or ancestor.inner_call
                ),
                None,
            )
            if call is not None:
                self._share(call).add(work.name, work.duration)
                return
            following = self._followed(node)
            if following is not None:
                following.add(work.name, work.duration)
                return
            uncovered = self._uncovered_share(node)
            if uncovered is not None:
                self._rest[self._key(*uncovered)].add(work.name, work.duration)
                return
        operator = None if node is None else _operator(node)
        unknown = operator is not None and (operation_of(operator) or "").startswith(UNKNOWN)
        by_name = uncovered_kernel(work.name) if operator is None or unknown else None
        if by_name is not None and by_name.op not in FAMILIES:
            share = self._rest[UnattributedCalls("other", by_name.op, work.name, "", "", (), (), "")]
        elif work.elsewhere and by_name is not None:
            share = self._rest[UnattributedCalls("elsewhere", by_name.op, work.name, "", "", (), (), "")]
        elif by_name is not None:
            module = "" if node is None else self._timeline.module_of(node)
            phase = "backward" if node is not None and node.phase == "backward" else ""
            sources = self._triton_sources(work.name)
            reason = f"{by_name.reason}: {' or '.join(map(str, sources))}" if sources else by_name.reason
            share = self._rest[UnattributedCalls("uncovered", by_name.op, work.name, module, phase, (), (), reason)]
        elif (operator is None or unknown) and (sources := self._triton_sources(work.name)):
            owners = dict.fromkeys(source.distribution or source.module.partition(".")[0] for source in sources)
            names = " or ".join(map(str, sources))
            share = self._rest[UnattributedCalls("unknown", UNKNOWN + " or ".join(owners), names, "", "", (), (), "")]
        else:
            share = self._rest_of(node, work.name if operator is None else operator)
        share.add(work.name, work.duration)
        share.count += 1

    def _triton_sources(self, kernel: str) -> tuple[TritonFunction, ...]:
        """Return the loaded Triton functions of a kernel's name; there are several where the name does not tell."""
        if not kernel.isidentifier() or kernel.startswith("triton_"):
            return ()
        if self._triton is None:
            self._triton = triton_functions()
        return self._triton.get(kernel, ())

    def _share(self, call: HostEvent) -> AttributedTime:
        key = self._keys.get(id(call))
        if key is None:
            seen = self._kinds[call.kind]
            through = call.parent if call.parent is not None and "::" in call.parent.name else None
            shapes, dtypes = seen.shapes, seen.dtypes
            if not shapes and through is not None:
                shapes, dtypes = _arguments(through)
            module = seen.module or self._timeline.module_of(call)
            key = Called(call.kind, "" if through is None else through.name, module, seen.phase, shapes, dtypes)
            self._keys[id(call)] = key
        return self._calls[key]

    def _followed(self, node: HostEvent) -> AttributedTime | None:
        """Return the share of the gradient of recorded calls that have none of their own."""
        forward = self._timeline.forward_of(node)
        call = None if forward is None else forward.call
        if call is None or self._kinds[call.kind].op not in _SPELLED or _OWN_GRADIENT.search(node.name):
            return None
        seen, uncovered = self._kinds[call.kind], self._uncovered_share(node)
        if seen.op == "attention" and uncovered is not None and uncovered[1].op != "softmax":
            return None
        return self._calls[Called(call.kind, "", seen.module, "backward", seen.shapes, seen.dtypes)]

    def _rest_of(self, node: HostEvent | None, name: str) -> AttributedTime:
        """Return the share of an operator that is no operation: of one that its module spells out, or of its kind."""
        if node is None or operation_of(name) is not None:
            return self._other(name)
        path = self._timeline.module_of(node)
        spelled = operation_of_model(self._module_of_path, path, name)
        if spelled is None or (spelled[1].op == "rope" and not self._is_before_scores(node)):
            return self._other(name, tuple(ancestor.name for ancestor in node.upward()))
        operator, what = spelled
        phase = "backward" if node.in_backward else node.phase
        adapted = self._adapted.get((what.op, path))
        if adapted is not None:  # its class goes to a kernel, around which it casts and multiplies
            return self._around[(adapted.get(phase) or next(iter(adapted.values()))).number]
        return self._rest[UnattributedCalls("uncovered", what.op, operator, path, phase, (), (), what.reason)]

    def _is_before_scores(self, node: HostEvent) -> bool:
        """Say whether an operator, or the one of which it is the gradient, ran before the attention of its module."""
        if self._scores is None:
            self._scores = {}
            for seen in self._timeline.nodes:
                op = self._kinds[seen.kind].op if seen.kind >= 0 else operation_of(seen.name)
                if op == "attention" or _SCORES.search(seen.name):
                    at = id(_module_around(seen))
                    self._scores[at] = min(seen.start, self._scores.get(at, seen.start))
        for event in (node, self._timeline.forward_of(node)):
            around = None if event is None else _module_around(event)
            if event is not None and around is not None:
                return event.start < self._scores.get(id(around), event.start + 1)
        return True

    def _other(self, name: str, around: tuple[str, ...] = ()) -> AttributedTime:
        op = operation_of(name) or ""
        what: Literal["unknown", "other"] = "unknown" if op.startswith(UNKNOWN) else "other"
        kind = "" if op else kind_of_rest(name, around)
        return self._rest[UnattributedCalls(what, op, name, "", "", (), (), "", kind)]

    def _key(self, node: HostEvent, uncovered: UncoveredKernel) -> UnattributedCalls:
        shapes, dtypes = _arguments(node)
        module = self._timeline.module_of(node)
        if uncovered.op == "softmax":
            shapes = ranged(uncovered.op, node.name, node.phase, shapes)
        shapes = self._sizes((node.name, module, node.phase, dtypes), uncovered.op, node.name, node.phase, shapes)
        return UnattributedCalls(
            "uncovered",
            uncovered.op,
            node.name.removeprefix(BACKWARD),
            module,
            node.phase,
            shapes,
            dtypes,
            uncovered.reason,
        )

    def _uncovered_share(self, node: HostEvent) -> tuple[HostEvent, UncoveredKernel] | None:
        if id(node) in self._uncovered:
            return self._uncovered[id(node)]
        share = None if node.parent is None else self._uncovered_share(node.parent)
        if share is None:
            uncovered = uncovered_operator(node.name) or _compiled(node.name) or self._functions.get(node.name)
            escaped = (
                uncovered is not None
                and not self._leads(node, uncovered)
                and not _cut_short(node, uncovered)
                and not self._asks_for_shapes(node, uncovered)
            )
            share = (node, uncovered) if uncovered is not None and escaped else None
        if share is None and (forward := self._timeline.forward_of(node)) is not None:
            before = self._uncovered_share(forward)  # of which this is the gradient
            if before is not None and before[1].op in TENSOR_OPS:
                share = (node, before[1])
        self._uncovered[id(node)] = share
        return share

    def _leads(self, node: HostEvent, what: UncoveredKernel) -> bool:
        """Say whether an operator leads to a call of the same operation that was recorded: it has not escaped then."""
        return any(self._kinds[kind].op == what.op for kind in node.below or ())

    def _asks_for_shapes(self, node: HostEvent, what: UncoveredKernel) -> bool:
        """Say whether this library runs an operator without data, to learn what a kernel of another package returns."""
        if what.op not in TENSOR_OPS:
            return False
        return any(
            ancestor.name.startswith("xpuruntime::") or self._leads(ancestor, what) for ancestor in node.upward()
        )

    def _only_leads(self, node: HostEvent) -> bool:
        # Say whether an operator was called again by its own name or another's before it was recorded, or cut short. So
        # are the operators that the transforms of ``torch.func`` take: once for each, and then for their result.
        what = uncovered_operator(node.name) or decomposed_operator(node.name)
        return what is not None and (self._leads(node, what) or _cut_short(node, what))


def _module_around(node: HostEvent) -> HostEvent | None:
    return next((around for around in node.upward() if around.module is not None), None)


def _cut_short(node: HostEvent, uncovered: UncoveredKernel) -> bool:
    """Say whether a checkpoint has ended its second forward in this operator, before anything was computed."""
    return uncovered.reason == NOT_REACHED and node.sequence >= 0 and node.in_backward


def _arguments(node: HostEvent) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    shapes = tuple(tuple(shape) for shape in node.shapes if shape and not isinstance(shape[0], (list, tuple)))
    return shapes, tuple(dict.fromkeys(_DTYPES[name] for name in node.dtypes if name in _DTYPES))


def _compiled(name: str) -> UncoveredKernel | None:
    """Return what a kernel computes around whose launch torch.compile has put a range of its name."""
    return uncovered_kernel(name) if name.startswith("triton_") or "cpp_fused_" in name else None


def _operator(node: HostEvent) -> str | None:
    for ancestor in node.upward():
        if ancestor.name.startswith("triton_") or "cpp_fused_" in ancestor.name:
            return ancestor.name
        if ancestor.name.startswith(("aten::", "torchvision::", "c10d::", "xpuruntime::", "nccl")):
            return ancestor.name
        if operation_of(ancestor.name) is not None:
            return ancestor.name
        if ancestor.name.startswith("Optimizer."):
            return ancestor.name
    return None
