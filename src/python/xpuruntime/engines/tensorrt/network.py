# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""An ONNX model as a network of the vendor: parsed, checked, and joined to its source nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.tensorrt.messages import cleaned, failure
from xpuruntime.errors import EngineFailed, ModelError, UnsupportedOperationError, XpuRuntimeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.engines.base import Request
    from xpuruntime.engines.model_source import ModelSource
    from xpuruntime.engines.tensorrt.messages import Listener
    from xpuruntime.engines.tensorrt.products import TensorRtProduct

__all__ = ["DTYPES", "layer_nodes", "parse_network", "strong_typing"]

#: The vendor's element types to xpuruntime's names.
DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
    "FP8": "float8e4m3fn",
    "INT4": "int4",
    "FP4": "float4e2m1",
    "E8M0": "float8e8m0",
}
_MARK = "[ONNX Layer: "


def strong_typing(trt: Any) -> int:
    """Return the flags of a strongly typed network: none where there is no other kind of network."""
    if not hasattr(trt.BuilderFlag, "FP16"):
        return 0
    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def parse_network(
    network: Any, parser: Any, source: ModelSource, request: Request, product: TensorRtProduct, heard: Listener
) -> None:
    """Read the model into the network."""
    if isinstance(source.model, bytes):
        # Of the path, the parser uses the folder, in which it looks for external data.
        place = () if source.folder is None else (str(Path(source.folder) / "model.onnx"),)
        read = parser.parse(source.model, *place)
    else:
        read = parser.parse_from_file(source.model)
    if not read:
        raise _refused(parser, source, request, product, heard)
    _check_borders(network, request, product)


def _refused(
    parser: Any, source: ModelSource, request: Request, product: TensorRtProduct, heard: Listener
) -> XpuRuntimeError:
    known = {"engine": product.name, "device": request.device}
    if not parser.num_errors:
        return failure(f"reading {source.label} with {product.title}", heard.errors(), **known)
    told = []
    codes = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        codes.append(str(error.code()).rpartition(".")[2])
        reason = cleaned(_reason(error.desc()))
        node = f"node {error.node_name()!r} ({error.node_operator()}): " if error.node_operator() else ""
        told.append(f"{node}{reason}")
    message = f"{product.title} cannot read {source.label}: {'; '.join(dict.fromkeys(told))}"
    if "MODEL_DESERIALIZE_FAILED" in codes:
        return ModelError(message, **known, status=codes[0])
    if all(code.startswith(("UNSUPPORTED", "INVALID_NODE", "INVALID_GRAPH")) for code in codes):
        fix = "Change the node in the model, or use engine onnxruntime."
        return UnsupportedOperationError(f"{message}. {fix}", **known, status=codes[0])
    return EngineFailed(message, **known, status=codes[0])


def _reason(text: str) -> str:
    """Return the lines of a parser's message that speak of the node: a machine without a GPU adds one about CUDA."""
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and "cudaError" not in line and not line.startswith("Invalid Node - ")]
    return ": ".join(kept or lines)


def _check_borders(network: Any, request: Request, product: TensorRtProduct) -> None:
    """Refuse a network whose inputs or outputs are not those of the model: the parser changes some types silently."""
    model = request.model
    known = {"engine": product.name, "device": request.device}
    inputs = {(t := network.get_input(i)).name: t for i in range(network.num_inputs)}
    outputs = {(t := network.get_output(i)).name: t for i in range(network.num_outputs)}
    for role, infos, found in (("input", model.inputs, inputs), ("output", model.outputs, outputs)):
        for info in infos:
            tensor = found.get(info.name)
            if tensor is None:
                msg = f"{product.title} dropped the {role} {info.name!r} of {model.path}; take it out of the model"
                raise UnsupportedOperationError(msg, **known)
            dtype = DTYPES.get(tensor.dtype.name, tensor.dtype.name)
            if dtype != info.dtype:
                msg = (
                    f"{role} {info.name!r} of {model.path} is {info.dtype}, and {product.title} makes it {dtype}; put "
                    f"a Cast to {dtype} at this {role} into the model"
                )
                raise UnsupportedOperationError(msg, **known)
            if role == "input" and tensor.is_shape_tensor:
                msg = (
                    f"input {info.name!r} of {model.path} holds sizes that other tensors get, and the range of its "
                    "values would have to be known; make it a constant of the model"
                )
                raise UnsupportedOperationError(msg, **known)


def layer_nodes(text: str | None, nodes: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    r"""Return the source nodes that a layer's metadata names, in order and once each."""
    found: list[str] = []
    for part in (text or "").split(_MARK)[1:]:
        name = part
        while name not in nodes and "]" in name:
            name = name[: name.rindex("]")]
        found.extend(nodes.get(name, ()))
    return tuple(dict.fromkeys(found))
