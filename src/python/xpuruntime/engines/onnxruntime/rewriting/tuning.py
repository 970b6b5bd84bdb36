# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tuning of nodes inside ONNX Runtime: its own kernels and xpuruntime's, one operation at a time."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.onnxruntime.rewriting.graph import Scope, number, rewrite, scopes
from xpuruntime.error_text import error_line
from xpuruntime.errors import XpuRuntimeError
from xpuruntime.measuring.rounds import choose, timed
from xpuruntime.measuring.tuning_watch import TuningStep
from xpuruntime.ops import tuned_records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import onnx

    from xpuruntime.engines.onnxruntime.rewriting.rules import Rewrite
    from xpuruntime.measuring.rounds import KernelTiming, Replacement
    from xpuruntime.policies import TuningPolicy

__all__ = ["STOCK", "Timed", "measure_free"]

#: Id of ONNX Runtime's own kernel in records.
STOCK = "onnxruntime"
_BLOCK = 0.005
_ENDED = "the tuning was cancelled, or its time is used up"
#: Its library, which is loaded when it is imported.
_LIBRARIES = ("onnxruntime_pybind11_state*",)


class Timed(NamedTuple):
    """One node and what was measured of its operation, or why nothing was."""

    rewrite: Rewrite
    found: Replacement | None = None
    reason: str = ""

    @property
    def stock(self) -> float:
        """Microseconds of ONNX Runtime's own kernel."""
        return self._of(STOCK).microseconds

    @property
    def xpuruntime(self) -> float:
        """Microseconds of the xpuruntime operator."""
        return self._of(f"xpuruntime.{self.rewrite.op}").microseconds

    @property
    def wins(self) -> bool:
        """Whether the xpuruntime operator is decided to be faster by more than the margin."""
        return self.found is not None and self.found.chosen.kernel != STOCK

    def _of(self, kernel: str) -> KernelTiming:
        assert self.found is not None
        return next(candidate for candidate in self.found.candidates if candidate.kernel == kernel)

    def __str__(self) -> str:
        """Return what was measured in one line."""
        if self.found is None:
            return f"not measured: {self.reason}"
        own = self._of(f"xpuruntime.{self.rewrite.op}")
        verdict = "the xpuruntime operator is used" if self.wins else "ONNX Runtime's own stays"
        if self.found.undecided:
            verdict += f", as it is not decided after {self.found.rounds} rounds"
        return (
            f"{self.stock:.1f} us by ONNX Runtime, {self.xpuruntime:.1f} us by xpuruntime, {own.ratio:.3f} times as "
            f"long [{own.low:.3f}, {own.high:.3f}]: {verdict}"
        )


def measure_free(
    model: onnx.ModelProto,
    free: Sequence[Rewrite],
    rules: str,
    open_session: Callable[[bytes], Any],
    *,
    deterministic: bool,
    rule: TuningPolicy,
    place: str,
    versions: dict[str, str],
) -> list[Timed]:
    """Measure each distinct operation of `free` alone: as the model has it, and as an xpuruntime operator."""
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
            digest = hashlib.sha256(key).hexdigest()
            text = f"onnxruntime;{one.op};{digest};{place};deterministic={deterministic}"
            text += tuned_records.rule_suffix(rule)
            held_by = tuned_records.validators(one.kind, place.partition(";")[0], versions, _LIBRARIES)
            kept = tuned_records.recall(text, held_by, rule)
            if kept is not None:
                known[key] = Timed(one, kept)
            else:
                measured = _measure(part, one, rules, open_session, rule, deterministic=deterministic)
                if measured.found is not None:
                    tuned_records.keep(text, held_by, measured.found)
                known[key] = measured
        found.append(known[key]._replace(rewrite=one))
    return found


def _measure(
    part: onnx.ModelProto,
    one: Rewrite,
    rules: str,
    open_session: Callable[[bytes], Any],
    rule: TuningPolicy,
    *,
    deterministic: bool,
) -> Timed:
    from xpuruntime.engines.onnxruntime.rewriting.rules import Rewrite as Record

    alone = Record(**{name: getattr(one, name) for name in one.__struct_fields__ if name != "graph"}, graph="")
    edited = rewrite(part, [alone], rules, deterministic=deterministic)
    step = TuningStep("onnxruntime", f"{one.op} at {one.node!r}")
    if step(2, 0, 0, 0.0):
        return Timed(one, reason=_ENDED)
    try:
        runs = {STOCK: open_session(part.SerializeToString())}
        runs[f"xpuruntime.{one.op}"] = open_session(edited.SerializeToString())
        for run in runs.values():
            run()
    except XpuRuntimeError as error:
        return Timed(one, reason=error_line(error))
    found = choose(
        {name: timed(run) for name, run in runs.items()}, control=STOCK, rule=rule, block=_BLOCK, step=step,
    )  # fmt: skip
    return Timed(one, reason=_ENDED) if found.cancelled else Timed(one, found)


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
