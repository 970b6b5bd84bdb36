# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Times of a run by OpenVINO's counters, and the units that they belong to."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.openvino.slots import infer_call, port_order, share
from xpuruntime.engines.precision.types import FLOATS
from xpuruntime.evidence.documents import COLD, COUNTED, checkpoint

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo, NodeInfo
    from xpuruntime.engines.openvino.execution_graph import Executed

#: Runs after the cold one that do not count: whoever watched the cold one has emptied the caches.
_SETTLE = 2
#: The counters of a single run say enough where their sum is known to within this share of it.
_COARSE = 0.05
#: Runs of a graph without operators: the first are not counted.
_IDLE_WARM, _IDLE_RUNS = 20, 50
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class NodeCounter:
    """What the counter of one node shows, microseconds. The part cut from each run comes on top: less than one."""

    low: float
    high: float
    sums: tuple[tuple[int, int], ...]

    def of_run(self, number: int) -> tuple[int, int]:
        """Return the least and the most that one counted run can be."""
        (least, most), (least_after, most_after) = self.sums[number : number + 2]
        return max(0, least_after - most), most_after - least


@dataclass(slots=True)
class Counted:
    """What the runs gave."""

    seen: set[str] = field(default_factory=set)
    counts: dict[str, NodeCounter] = field(default_factory=dict)
    spent: list[float] = field(default_factory=list)
    broken: bool = False

    def sums_of_runs(self, names: Iterable[str]) -> tuple[float, ...]:
        """Return what some nodes took of each counted run; empty where the counters are too coarse for that."""
        counts = [self.counts[name] for name in names]
        midpoints = []
        for number, spent in enumerate(self.spent):
            bounds = [count.of_run(number) for count in counts]
            least, most = (sum(pair[i] for pair in bounds) for i in (0, 1))
            if most - least > _COARSE * spent:
                return ()
            midpoints.append((least + most) / 2)
        return tuple(midpoints)

    def kept(self, names: Iterable[str]) -> list[float]:
        """Return the wall times of the runs but for those in which the machine was away: all, where none is left.

        A run is left out that took more than twice as long as the least, and of which these nodes, whatever their
        counters cut off, have less than half. A thread that the system puts aside mostly waits between nodes.
        """
        counts = [self.counts[name] for name in names]
        durations = []
        for number, spent in enumerate(self.spent):
            most = sum(count.of_run(number)[1] + 1 for count in counts)
            if spent <= 2 * min(self.spent) or most >= spent / 2:
                durations.append(spent)
        return durations or self.spent


def count(compiled: Any, feeds: Mapping[str, Any], runs: int, info: ModelInfo, notes: list[str]) -> Counted:
    """Run once cold, some times to settle, and `runs` times that count; what goes wrong is noted.

    Parameters
    ----------
    compiled : openvino.CompiledModel
        Compiled with ``PERF_COUNT``, and never run.
    feeds : mapping of str to array
    runs : int
    info : ModelInfo
    notes : list of str
    """
    request = compiled.create_infer_request()
    kept = []
    counted = Counted()
    read = []
    try:
        for port, index in enumerate(port_order(compiled, info)):
            array, kind = _border(feeds[info.inputs[index].name])
            kept.append(array)
            request.set_input_tensor(port, share(array, kind))
        call = infer_call(request)
        for number in range(1 + _SETTLE + runs):
            call({}, True, False)
            read.append(request.get_profiling_info())
            if number > _SETTLE:
                counted.spent.append(request.latency * 1e3)
            if number == 0:
                checkpoint(COLD)
        checkpoint(COUNTED)
    except RuntimeError as error:
        notes.append(f"an instrumented run failed: {' '.join(str(error).split())[:300]}")
        counted.broken = True
        return counted
    means: dict[str, list[int]] = {}
    for nodes in read:
        for node in nodes:
            means.setdefault(node.node_name, []).append(node.real_time // _MICROSECOND)
    counted.counts = {name: bounded(values, runs) for name, values in means.items() if len(values) == len(read)}
    counted.seen = {name for name, values in means.items() if any(values)}
    return counted


def bounded(means: Sequence[int], runs: int) -> NodeCounter:
    """Return what the last `runs` runs took, of the whole means that were read after each run.

    After `k` runs with a mean of `m`, the sum is at least ``k * m`` and at most ``k * m + k - 1``; and no sum is less
    than one before it.
    """
    least = list(itertools.accumulate((k * mean for k, mean in enumerate(means, 1)), max))
    ends = [k * (mean + 1) - 1 for k, mean in enumerate(means, 1)]
    most = list(itertools.accumulate(reversed(ends), min))[::-1]
    sums = tuple(zip(least, most, strict=True))[-runs - 1 :]
    return NodeCounter(max(0, least[-1] - sums[0][1]) / runs, (most[-1] - sums[0][0]) / runs, sums)


def idle_call_us(compiled: Any) -> float:
    """Return what a request of a compiled graph without operators takes: the median of some, microseconds."""
    request = compiled.create_infer_request()
    call = infer_call(request)
    taken = []
    for number in range(_IDLE_WARM + _IDLE_RUNS):
        call({}, True, False)
        if number >= _IDLE_WARM:
            taken.append(request.latency * 1e3)
    return float(statistics.median(taken))


def _border(array: Any) -> tuple[np.ndarray[Any, Any], Any]:
    if isinstance(array, np.ndarray):
        return array, None
    from xpuruntime.engines.openvino.slots import borders

    return borders(array)


#: Why a source node has no executed node.
COMPUTED = "simplified away when the model was compiled: it depends on constants and shapes only"
REMOVED = "removed: it moves values, and OpenVINO found another way to them"
UNUSED = "removed: nothing reads its result"
SCALED = "its scale went into the kernels of the nodes beside it"
MOVED = "its result is that of a node before it: OpenVINO passes the tensor on"

#: Operators whose results depend on shapes only.
_SHAPES = frozenset({"Shape", "Size", "Constant", "ConstantOfShape"})
#: Operators that move values or change their type, and compute nothing.
_MOVING = frozenset(
    {
        "Cast", "CastLike", "Concat", "Dropout", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split",
        "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
#: Layers that change the type or the order of a tensor.
_CONVERTING = frozenset({"Convert", "Reorder"})
_SCALES = frozenset({"QuantizeLinear", "DequantizeLinear"})
#: Operators and layers with a state. OpenVINO runs those of two directions as two layers that have no original name.
_RECURRENT, _RECURRENT_LAYERS = frozenset({"LSTM", "GRU", "RNN"}), frozenset({"RNNSeq", "RNNCell"})


class Shares:
    """Which executed node stands for which source nodes; all by position."""

    def __init__(self) -> None:
        self.owned: dict[int, list[int]] = {}
        self.serves: dict[int, list[int]] = {}
        self.inferred: set[int] = set()
        self.folded: dict[int, str] = {}


def share_out(
    nodes: Sequence[NodeInfo], executed: Sequence[Executed], inputs: Sequence[str], outputs: Sequence[str]
) -> Shares:
    """Give every source node to one executed node, or say why it has none."""
    return _Sharing(nodes, executed, inputs, outputs).run()


class _Sharing:
    def __init__(
        self, nodes: Sequence[NodeInfo], executed: Sequence[Executed], inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        self.nodes, self.executed = nodes, executed
        self.inputs, self.outputs = frozenset(inputs), frozenset(outputs)
        self.shares = Shares()
        self.owner: dict[int, int] = {}
        self.makers = {name: i for i, node in enumerate(nodes) if not node.graph for name in node.outputs if name}
        self.readers: dict[int, list[int]] = {}
        for index, node in enumerate(nodes):
            for name in node.inputs:
                if name in self.makers:
                    self.readers.setdefault(self.makers[name], []).append(index)

        self.followers: dict[str, list[Executed]] = {}
        for step in executed:
            for name in step.above:
                self.followers.setdefault(name, []).append(step)

    def run(self) -> Shares:
        mentioned = self._mentioned()
        constant = self._constant(mentioned)
        left = [i for i in range(len(self.nodes)) if i not in self.owner and i not in self.shares.folded]
        for index in reversed([i for i in left if not self.nodes[i].graph]):
            self._unmentioned(index, constant)
        for index in (i for i in left if self.nodes[i].graph):
            self._inside(index)
        for index, unit in sorted(self.owner.items()):
            self.shares.owned.setdefault(unit, []).append(index)
        return self.shares

    def _mentioned(self) -> set[int]:
        """Give each mentioned node to the executed node with its last operation; the others serve it."""
        # A recurrent node belongs to its layer. Without a last operation, a step that makes floats goes before one that
        # counts: OpenVINO computes the sizes of a layer's state beside it. A conversion of a result serves the node,
        # unless converting is what the node does. Times decide nothing: they are others in the next run.
        best: dict[int, tuple[bool, bool, bool, bool, bool, int]] = {}
        still: set[int] = set()
        named = [(*node.mentioned, *self._layers_of(position)) for position, node in enumerate(self.executed)]
        for position, executed in enumerate(self.executed):
            for index, last in named[position]:
                if index >= len(self.nodes):
                    continue
                if executed.still:
                    still.add(index)
                    continue
                layer = executed.kind in _RECURRENT_LAYERS and self.nodes[index].op in _RECURRENT
                computes = executed.kind not in _CONVERTING or self.nodes[index].op in _MOVING | _SCALES
                works = executed.kernel is not None or executed.time_us is not None
                rank = (layer, last, executed.writes in FLOATS, computes, works, -position)
                if index not in best or rank > best[index]:
                    best[index] = rank
        for index, (*_, position) in best.items():
            self.owner[index] = -position
        for position, node in enumerate(self.executed):
            helped = sorted({i for i, _ in named[position] if self.owner.get(i, position) != position})
            if helped and not node.still:
                self.shares.serves[position] = helped
        for index in still - set(best):
            self.shares.folded[index] = COMPUTED
        return set(best)

    def _layers_of(self, position: int) -> tuple[tuple[int, bool], ...]:
        """Return the recurrent source node that a layer without an original name is of: the first behind it."""
        executed = self.executed[position]
        if executed.mentioned or executed.kind not in _RECURRENT_LAYERS:
            return ()
        waiting, seen = [executed.name], {executed.name}
        for name in waiting:
            for reader in self.followers.get(name, ()):
                recurrent = [i for i, _ in reader.mentioned if i < len(self.nodes) and self.nodes[i].op in _RECURRENT]
                if recurrent:
                    return ((recurrent[0], False),)
                if not reader.mentioned and reader.name not in seen:
                    seen.add(reader.name)
                    waiting.append(reader.name)
        return ()

    def _constant(self, mentioned: set[int]) -> set[int]:
        known: set[str] = set()
        constants: set[int] = set()
        for index, node in enumerate(self.nodes):
            if index in mentioned or node.graph:
                continue
            open_ = [n for n in node.inputs if n and n not in known and (n in self.makers or n in self.inputs)]
            if node.op in _SHAPES or index in self.shares.folded or not open_:
                known.update(node.outputs)
                constants.add(index)
        return constants

    def _unmentioned(self, index: int, constant: set[int]) -> None:
        node = self.nodes[index]
        if index in constant:
            self.shares.folded[index] = COMPUTED
            return
        readers = self.readers.get(index, [])
        is_output = any(name in self.outputs for name in node.outputs)
        if not readers and not is_output:
            self.shares.folded[index] = UNUSED
            return
        if node.op in _SCALES:
            self.shares.folded[index] = SCALED
            return
        if node.op in _MOVING:
            self.shares.folded[index] = MOVED if node.op in ("Identity", "Dropout") else REMOVED
            return
        units = [self.owner[r] for r in readers if r in self.owner]
        above = [self.owner[i] for name in node.inputs if (i := self.makers.get(name, -1)) in self.owner]
        if units or above:
            self.owner[index] = units[0] if units else above[0]
            self.shares.inferred.add(index)
        else:
            self._through(index, readers)

    def _through(self, index: int, readers: Sequence[int]) -> None:
        waiting, seen = list(readers), set(readers)
        for reader in waiting:
            if reader in self.owner:
                self.owner[index] = self.owner[reader]
                self.shares.inferred.add(index)
                return
            for further in self.readers.get(reader, ()):
                if further not in seen:
                    seen.add(further)
                    waiting.append(further)
        self.shares.folded[index] = REMOVED

    def _inside(self, index: int) -> None:
        path = self.nodes[index].graph
        holders = [i for i, node in enumerate(self.nodes[:index]) if path.startswith(f"{node.name}/")]
        holder = max(holders, key=lambda i: len(self.nodes[i].name), default=None)
        if holder in self.owner:
            self.owner[index] = self.owner[holder]
        else:
            self.shares.folded[index] = COMPUTED


def requested_precision(nodes: Sequence[NodeInfo], owned: Sequence[int], types: Mapping[str, str]) -> str | None:
    """Return what the model itself states for a unit: the type of its last float result."""
    for index in reversed(owned):
        for name in nodes[index].outputs:
            if types.get(name) in FLOATS:
                return types[name]
    return None
