# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Measuring ONNX Runtime's own kernels against ours, one operation at a time."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.onnxruntime.rewriting.editing import rewrite
from xpuruntime.engines.onnxruntime.rewriting.graph import Scope, number, scopes
from xpuruntime.errors import XpuRuntimeError
from xpuruntime.measuring.rounds import rotated
from xpuruntime.measuring.statistics import LEAST_GAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import onnx

    from xpuruntime.engines.onnxruntime.rewriting.records import Rewrite

__all__ = ["Timed", "measure_free"]

_ROUNDS = 9
_ROUND_SECONDS = 0.01


class Timed(NamedTuple):
    """One node and what was measured: microseconds of both, or why nothing was."""

    rewrite: Rewrite
    stock: float = 0.0
    ours: float = 0.0
    reason: str = ""

    @property
    def wins(self) -> bool:
        """Whether ours is faster by more than `LEAST_GAIN`."""
        return not self.reason and self.ours < self.stock * (1.0 - LEAST_GAIN)

    def __str__(self) -> str:
        """Return what was measured in one line."""
        if self.reason:
            return f"not measured: {self.reason}"
        verdict = "ours" if self.wins else "ONNX Runtime's own stays"
        return f"{self.stock:.1f} us by ONNX Runtime, {self.ours:.1f} us by ours: {verdict}"


def measure_free(
    model: onnx.ModelProto,
    free: Sequence[Rewrite],
    rules: str,
    open_session: Callable[[bytes], Any],
    *,
    deterministic: bool,
) -> list[Timed]:
    """Measure each distinct operation of `free` alone: as the model has it, and as ours.

    Parameters
    ----------
    model : onnx.ModelProto
    free : sequence of Rewrite
    rules : str
        The name of rules that leave the choice to the fastest kernel.
    open_session : callable
        ``open_session(model)`` opens a serialised model with the settings of the session and returns a function of no
        arguments that runs it once and waits for the result; it raises an `XpuRuntimeError` where that is not
        possible.
    deterministic : bool

    Returns
    -------
    list of Timed
        One for each of `free`. Nodes that do the same on the same sizes are measured once.
    """
    by_path = {scope.path: scope for scope in scopes(model)}
    known: dict[bytes, Timed] = {}
    found: list[Timed] = []
    for one in free:
        part = _part(model, by_path[one.graph], one)
        if isinstance(part, str):
            found.append(Timed(one, reason=part))
            continue
        key = _identity(part)
        if key not in known:
            known[key] = _measure(part, one, rules, open_session, deterministic=deterministic)
        found.append(known[key]._replace(rewrite=one))
    return found


def _measure(
    part: onnx.ModelProto, one: Rewrite, rules: str, open_session: Callable[[bytes], Any], *, deterministic: bool
) -> Timed:
    from xpuruntime.engines.onnxruntime.rewriting.records import Rewrite as Record

    alone = Record(**{name: getattr(one, name) for name in one.__struct_fields__ if name != "graph"}, graph="")
    edited = rewrite(part, [alone], rules, deterministic=deterministic)
    try:
        runs = [open_session(part.SerializeToString()), open_session(edited.SerializeToString())]
        for run in runs:
            run()
    except XpuRuntimeError as error:
        return Timed(one, reason=str(error).splitlines()[0])
    repeats = [_repeats(run) for run in runs]
    times: list[list[float]] = [[], []]
    for turn in range(_ROUNDS):
        for which in rotated((0, 1), turn):
            start = time.perf_counter()
            for _ in range(repeats[which]):
                runs[which]()
            times[which].append((time.perf_counter() - start) / repeats[which] * 1e6)
    return Timed(one, statistics.median(times[0]), statistics.median(times[1]))


def _repeats(run: Callable[[], Any]) -> int:
    start = time.perf_counter()
    run()
    return max(1, int(_ROUND_SECONDS / max(time.perf_counter() - start, 1e-6)))


def _part(model: onnx.ModelProto, scope: Scope, one: Rewrite) -> onnx.ModelProto | str:
    """Return a model of one operation with inputs of its own, or why there is none."""
    import onnx

    names = set(one.nodes)
    nodes = [node for node in scope.graph.node if node.name in names]
    made = {name for node in nodes for name in node.output}
    reads = list(dict.fromkeys(n for node in nodes for n in node.input if n and n not in made))
    reads += [t.source for t in one.before if t.source not in made and t.source not in reads]
    inputs, constants = [], []
    for name in reads:
        tensor = scope.constant(name)
        if tensor is not None and tensor.data_location != 1:
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = name
            constants.append(copy)
            continue
        shape = scope.shape(name)
        sizes = None if shape is None else [number(dim) for dim in shape]
        if sizes is None or None in sizes or not scope.type(name):
            return f"the sizes of {name!r} are not known before it runs; state execution.shapes to fix them"
        inputs.append(onnx.helper.make_tensor_value_info(name, scope.type(name), [int(s or 0) for s in sizes]))
    output = onnx.helper.make_tensor_value_info(one.output, scope.type(one.output) or scope.type(one.inputs[0]), None)
    graph = onnx.helper.make_graph(nodes, "part", inputs, [output], constants)
    part = onnx.helper.make_model(graph, opset_imports=list(model.opset_import))
    part.ir_version = max(4, model.ir_version)
    return part


def _identity(part: onnx.ModelProto) -> bytes:
    """Return what two operations share that take the same time: everything but names and values."""
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(part)
    graph = copy.graph
    renamed: dict[str, str] = {}

    def short(name: str) -> str:
        return renamed.setdefault(name, f"t{len(renamed)}") if name else ""

    for node in graph.node:
        node.name = ""
        node.doc_string = ""
        for field in (node.input, node.output):
            for place, name in enumerate(field):
                field[place] = short(name)
    for value in (*graph.input, *graph.output):
        value.name = short(value.name)
    for tensor in graph.initializer:
        tensor.name = short(tensor.name)
        if sum(len(getattr(tensor, f)) for f in ("raw_data", "float_data", "double_data", "int32_data")) > 64:
            for field_name in ("raw_data", "float_data", "double_data", "int32_data"):
                tensor.ClearField(field_name)
    return bytes(copy.SerializeToString(deterministic=True))
