# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tensors inside of a model: `tap` returns them, and `find_divergence` finds the first node that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.base import Engine, LoadedModel, Request, judge
from xpuruntime.engines.model.graph import reads
from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.evidence.tolerances import OutputFigures, ProbeResult, Tolerance, compare_within
from xpuruntime.policies.document import nearest, question
from xpuruntime.printable import error_line

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.runtime.machine import Machine

    Answer = Callable[[ModelInfo], Mapping[str, Any]]


def tap(
    engine: Engine,
    request: Request,
    machine: Machine,
    loaded: LoadedModel,
    inputs: Mapping[str, Any],
    names: Sequence[str],
) -> dict[str, Any]:
    """Return tensors inside of a model; see `InferenceSession.intermediates`."""
    _check(request.model, names)
    intermediates = loaded.intermediates(inputs, names)
    if intermediates is not None:
        return intermediates
    with _copy(engine, request, machine, names) as run:
        results = run(loaded.whole_batch(inputs))
    return {name: results[name] for name in names}


@contextmanager
def tapped(
    engine: Engine,
    request: Request,
    machine: Machine,
    loaded: LoadedModel,
    inputs: Mapping[str, Any],
    names: Sequence[str],
) -> Iterator[Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """Yield a call that runs the model as often as needed and returns tensors inside of it, and maybe its outputs."""
    _check(request.model, names)
    if loaded.intermediates(inputs, names) is not None:
        yield lambda feeds: loaded.intermediates(feeds, names) or {}
        return
    with _copy(engine, request, machine, names) as run:
        yield lambda feeds: run(loaded.whole_batch(feeds))


def _check(info: ModelInfo, names: Sequence[str]) -> None:
    outputs = {name for node in info.nodes for name in node.outputs if name and not node.graph}
    for name in names:
        if name not in outputs:
            near = nearest(name, outputs)
            fix = f"write {near or 'one of the outputs of session.model.nodes'}"
            raise InputError(f"no node of {info.path} makes a tensor {name!r}{question(near)}", fix=fix)


@contextmanager
def _copy(
    engine: Engine, request: Request, machine: Machine, names: Sequence[str]
) -> Iterator[Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """Load the model once more with these tensors as outputs."""
    info = request.model
    if request.artifact is not None:
        msg = f"{request.artifact.folder} is compiled, and gives no tensors inside of it; open the model {info.path}"
        raise UnsupportedOperationError(msg, engine=engine.name, device=request.device)
    extended = msgspec.structs.replace(request, model=_with_outputs(info, names))
    judgement = judge(engine, extended, machine)
    if not judgement.verdict.accepted:
        msg = f"{info.path} was refused with more outputs: {judgement.verdict.reason}"
        raise UnsupportedOperationError(msg, engine=engine.name, device=request.device)
    copy = engine.load(extended, judgement, machine)
    try:
        yield copy.run
    finally:
        copy.close()


def _with_outputs(info: ModelInfo, names: Sequence[str]) -> ModelInfo:
    from xpuruntime.engines.model import inspect_edited

    proto = info.named_proto()
    already = {value.name for value in proto.graph.output}
    wanted = [name for name in dict.fromkeys(names) if name not in already]
    types = _types(info, proto, wanted)
    proto.graph.output.extend(types[name] for name in wanted)
    extended = inspect_edited(info, proto)
    return msgspec.structs.replace(extended, path=info.path, inputs=info.inputs)


def _types(info: ModelInfo, proto: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return name, type and shape of tensors inside of a graph: as it says, else as ONNX or ONNX Runtime infers."""
    from onnx import shape_inference

    types = {value.name: value for value in proto.graph.value_info if _known(value)}
    if all(name in types for name in names):
        return types
    try:
        inferred = shape_inference.infer_shapes(proto).graph.value_info
    except Exception:  # it refuses models that engines run
        inferred = ()
    types = {**{value.name: value for value in inferred if _known(value)}, **types}
    missing = [name for name in names if name not in types]
    return {**types, **_asked(info, proto, missing)} if missing else types


def _known(value: Any) -> bool:
    kind = value.type.tensor_type
    return bool(kind.elem_type) and kind.HasField("shape")


def _asked(info: ModelInfo, proto: Any, names: Sequence[str]) -> dict[str, Any]:
    from onnx import helper

    from xpuruntime.engines.model_source import ModelSource
    from xpuruntime.engines.onnxruntime.opening import open_session
    from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings

    copy = type(proto)()
    copy.CopyFrom(proto)
    for name in names:
        copy.graph.output.add().name = name
    source = ModelSource(copy.SerializeToString(), info.base_dir, info.path)
    session = open_session(OnnxRuntimeSettings(provider="CPUExecutionProvider"), source, "cpu").session
    value_infos = {}
    for output in session.get_outputs():
        if output.name in names:
            word = output.type.removeprefix("tensor(").removesuffix(")")
            kind = {"float": "FLOAT", "double": "DOUBLE"}.get(word, word.upper())
            number = helper.TensorProto.DataType.Value(kind)
            value_infos[output.name] = helper.make_tensor_value_info(output.name, number, output.shape)
    return value_infos


#: Types of tensors, as ONNX Runtime writes them, that come back as plain arrays.
_PLAIN = frozenset(
    f"tensor({name})"
    for name in (
        "float", "double", "float16", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"
    )
)  # fmt: skip


class Inside:
    """A model to look into."""

    def __init__(self, info: ModelInfo, feeds: Mapping[str, Any]) -> None:
        self.info, self.feeds = info, feeds
        self.proto = info.named_proto()
        self.nodes = list(self.proto.graph.node)
        self.outputs = {value.name for value in self.proto.graph.output}
        self.described = _described(self.proto)

    def reference(self, names: Sequence[str]) -> dict[str, Any]:
        """Return those of the tensors that are plain arrays, as fp32 on the CPU computes them."""
        from xpuruntime.engines.model_source import ModelSource
        from xpuruntime.engines.onnxruntime._private_api import raw_session
        from xpuruntime.engines.onnxruntime.opening import open_session, translate
        from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings

        proto = self._copy()
        for name in dict.fromkeys(names):
            if name not in self.outputs:
                proto.graph.output.add().name = name  # ONNX Runtime knows its type
        source = ModelSource(proto.SerializeToString(), self.info.base_dir, self.info.path)
        session = open_session(OnnxRuntimeSettings(provider="CPUExecutionProvider"), source, "cpu").session
        types = {output.name: output.type for output in session.get_outputs()}
        wanted = [name for name in dict.fromkeys(names) if types.get(name) in _PLAIN]
        try:
            arrays = raw_session(session).run(wanted, dict(self.feeds), None)
        except Exception as error:
            raise translate(error, doing=f"running {self.info.path}", device="cpu") from None
        return dict(zip(wanted, arrays, strict=True))

    def with_outputs(self, arrays: Mapping[str, Any]) -> ModelInfo:
        """Return the model with these tensors as further outputs."""
        from onnx import helper

        from xpuruntime.engines.model import inspect_edited

        proto = self._copy()
        fixed = all(isinstance(size, int) for tensor in self.info.inputs for size in tensor.shape or ("?",))
        for name, array in arrays.items():
            if name in self.outputs:
                continue
            if name in self.described:
                proto.graph.output.append(self.described[name])
                continue
            shape = list(array.shape) if fixed else [f"{name}.{axis}" for axis in range(array.ndim)]
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            proto.graph.output.append(helper.make_tensor_value_info(name, kind, shape))
        return inspect_edited(self.info, proto)

    def _copy(self) -> Any:
        proto = type(self.proto)()
        proto.CopyFrom(self.proto)
        return proto


def _described(proto: Any) -> dict[str, Any]:
    from onnx import shape_inference

    try:
        info = shape_inference.infer_shapes(proto).graph.value_info
    except Exception:  # it refuses models that engines run: then the types are taken from the reference
        return {}
    return {
        value.name: value
        for value in info
        if value.type.tensor_type.HasField("shape")
        and all(dim.dim_param or dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)
    }


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine leaves the reference."""

    nodes: tuple[str, ...]
    op: str
    output: str
    figures: OutputFigures
    steps: int
    note: str = ""

    def __str__(self) -> str:
        """Return it as one sentence."""
        figures = f"output {self.output!r}: {self.figures.reason}"
        if len(self.nodes) == 1:
            return f"first divergence at node {self.nodes[0]!r} ({self.op}), {figures}"
        named = f"{self.nodes[0]!r} to {self.nodes[-1]!r} ({self.op})"
        return f"first divergence in the {len(self.nodes)} nodes {named}, {figures}. {self.note}"


def find_divergence(
    info: ModelInfo, feeds: Mapping[str, Any], failing: ProbeResult, limits: Tolerance, answer: Answer
) -> Divergence | None:
    """Find the first node whose output is out of tolerance."""
    search = _Search(info, feeds, failing, limits, answer)
    return search.run() if search.order else None


class _Search:
    def __init__(
        self, info: ModelInfo, feeds: Mapping[str, Any], failing: ProbeResult, limits: Tolerance, answer: Answer
    ) -> None:
        self.limits, self.answer = limits, answer
        self.wrong = {f.name: f for f in failing.outputs if not f.passed}
        self.inside = Inside(info, feeds)
        self.nodes, self.outputs = self.inside.nodes, self.inside.outputs
        self.order = self._ancestors()
        self.worst: dict[int, OutputFigures] = {}
        self.steps = 0
        self.blocked: dict[int, str] = {}

    def _ancestors(self) -> list[int]:
        makers = {name: i for i, node in enumerate(self.nodes) for name in node.output if name}
        targets = [name for name in self.wrong if name in self.outputs and name in makers]
        self.targets = set(targets)
        seen: set[int] = set()
        waiting = [makers[name] for name in targets]
        while waiting:
            index = waiting.pop()
            if index not in seen:
                seen.add(index)
                waiting.extend(makers[name] for name in reads(self.nodes[index]) if name in makers)
        return sorted(seen)

    def run(self) -> Divergence | None:
        low, high = -1, len(self.order) - 1
        while high - low > 1:
            verdict, at = self._nearest(low, high)
            if verdict is None:
                break
            low, high = (low, at) if verdict else (at, high)
        span = [self.nodes[self.order[i]] for i in range(low + 1, high + 1)]
        figures = self.worst.get(high) or next((self.wrong[name] for name in self.wrong if name in self.targets), None)
        if figures is None:
            return None
        note = ""
        if len(span) > 1:
            reasons = list(dict.fromkeys(self.blocked[i] for i in range(low + 1, high) if i in self.blocked))
            note = "They cannot be distinguished: " + "; ".join(reasons[:2])
        return Divergence(
            nodes=tuple(node.name for node in span),
            op=span[-1].op_type,
            output=figures.name,
            figures=figures,
            steps=self.steps,
            note=note,
        )

    def _nearest(self, low: int, high: int) -> tuple[bool | None, int]:
        middle = (low + high) // 2
        for index in sorted(range(low + 1, high), key=lambda i: abs(i - middle)):
            verdict = None if index in self.blocked else self._diverged(index)
            if verdict is not None:
                return verdict, index
        return None, middle

    def _cut(self, index: int) -> list[str]:
        """Return the tensors made by the first nodes, up to `index`, that are read later or are wrong outputs."""
        names = {name for i in self.order[: index + 1] for name in self.nodes[i].output if name}
        later = {name for i in self.order[index + 1 :] for name in reads(self.nodes[i])}
        return sorted(names & (later | self.targets))

    def _diverged(self, index: int) -> bool | None:
        """Whether the cut after a node is out of tolerance; ``None`` where that cannot be seen."""
        cut = self._cut(index)
        try:
            want = self._reference(cut)
            model = self.inside.with_outputs(want)
            got = self.answer(model)
        except XpuRuntimeError as error:
            self.blocked[index] = f"the model was refused with more outputs: {error_line(error)}"
            return None
        finally:
            self.steps += 1
        if len(want) < len(cut):
            hidden = ", ".join(repr(name) for name in cut if name not in want)
            missing = f"no plain array can be had of {hidden}"
        else:
            missing = ""
        if not all(name in got for name in want):
            self.blocked[index] = "the engine gave no array for a tensor that was asked for"
            return None
        seen = compare_within(want, {name: got[name] for name in want}, self.limits, model.random_outputs)
        bad = [figures for figures in seen.outputs if not figures.passed]
        if bad:
            own = set(self.nodes[self.order[index]].output)
            self.worst[index] = next((figures for figures in bad if figures.name in own), bad[0])
            return True
        if missing:
            self.blocked[index] = missing
            return None
        if not self._still_wrong(got):
            self.blocked[index] = "with more outputs the engine computes the right results, so it fused these nodes"
            return None
        return False

    def _still_wrong(self, got: Mapping[str, Any]) -> bool:
        names = [name for name in self.targets if name in got]
        want = {name: array for name, array in self._plain.items() if name in names}
        return not compare_within(want, {n: got[n] for n in want}, self.limits).passed

    def _reference(self, names: Sequence[str]) -> dict[str, Any]:
        """Return those of the tensors that are plain arrays, and keep the outputs that are wrong on the engine."""
        reference = self.inside.reference((*names, *self.targets))
        self._plain = {name: reference[name] for name in self.targets if name in reference}
        return {name: reference[name] for name in names if name in reference}
