# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Intermediate tensors of a model, as the engine of a session computes them (`tap` and `tapped`)."""

from __future__ import annotations

import difflib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.judging import judge
from xpuruntime.errors import InputError, UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from xpuruntime.engines.base import Engine, LoadedModel, Request
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.runtime.machine import Machine

__all__ = ["tap", "tapped"]


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
    found = loaded.intermediates(inputs, names)
    if found is not None:
        return found
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
    made = {name for node in info.nodes for name in node.outputs if name and not node.graph}
    for name in names:
        if name not in made:
            near = difflib.get_close_matches(name, made, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; session.model.nodes has their outputs"
            raise InputError(f"no node of {info.path} makes a tensor {name!r}{hint}")


@contextmanager
def _copy(
    engine: Engine, request: Request, machine: Machine, names: Sequence[str]
) -> Iterator[Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """Load the model once more with these tensors as outputs."""
    info = request.model
    if request.artifact is not None:
        msg = f"{request.artifact.folder} is compiled, and gives no tensors inside of it; open the model {info.path}"
        raise UnsupportedOperationError(msg, engine=engine.name, device=request.device)
    more = msgspec.structs.replace(request, model=_with_outputs(info, names))
    judgement = judge(engine, more, machine)
    if not judgement.verdict.accepted:
        msg = f"{info.path} was refused with more outputs: {judgement.verdict.reason}"
        raise UnsupportedOperationError(msg, engine=engine.name, device=request.device)
    copy = engine.load(more, judgement, machine)
    try:
        yield copy.run
    finally:
        copy.close()


def _with_outputs(info: ModelInfo, names: Sequence[str]) -> ModelInfo:
    """Return the model with these tensors as further outputs."""
    from xpuruntime.engines.model import inspect_edited

    proto = info.named_proto()
    already = {value.name for value in proto.graph.output}
    wanted = [name for name in dict.fromkeys(names) if name not in already]
    types = _types(info, proto, wanted)
    proto.graph.output.extend(types[name] for name in wanted)
    more = inspect_edited(info, proto)
    return msgspec.structs.replace(more, path=info.path, inputs=info.inputs)


def _types(info: ModelInfo, proto: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return name, type and shape of tensors inside of a graph: as it says, else as ONNX or ONNX Runtime infers."""
    from onnx import shape_inference

    found = {value.name: value for value in proto.graph.value_info if _known(value)}
    if all(name in found for name in names):
        return found
    try:
        inferred = shape_inference.infer_shapes(proto).graph.value_info
    except Exception:  # it refuses models that engines run
        inferred = ()
    found = {**{value.name: value for value in inferred if _known(value)}, **found}
    missing = [name for name in names if name not in found]
    return {**found, **_asked(info, proto, missing)} if missing else found


def _known(value: Any) -> bool:
    kind = value.type.tensor_type
    return bool(kind.elem_type) and kind.HasField("shape")


def _asked(info: ModelInfo, proto: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return types as ONNX Runtime reports them on the CPU."""
    from onnx import helper

    from xpuruntime.engines.model_source import ModelSource
    from xpuruntime.engines.onnxruntime.opening import open_session
    from xpuruntime.engines.onnxruntime.settings import OnnxRuntimeSettings

    copy = type(proto)()
    copy.CopyFrom(proto)
    for name in names:
        copy.graph.output.add().name = name
    source = ModelSource(copy.SerializeToString(), info.base_dir, info.path)
    session = open_session(OnnxRuntimeSettings(provider="CPUExecutionProvider"), source, "cpu").session
    found = {}
    for output in session.get_outputs():
        if output.name in names:
            word = output.type.removeprefix("tensor(").removesuffix(")")
            kind = {"float": "FLOAT", "double": "DOUBLE"}.get(word, word.upper())
            number = helper.TensorProto.DataType.Value(kind)
            found[output.name] = helper.make_tensor_value_info(output.name, number, output.shape)
    return found
