# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Read one executed node: the precision it ran in, its layout, and the device that its provider stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.engines.onnxruntime.observing.graph import NodeView
    from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent, TensorSeen

__all__ = ["FLOATS", "device_of", "is_partition", "layout_of", "model_precisions", "precision_of", "short"]

#: Precision names that are floating point.
FLOATS = frozenset({"fp64", "fp32", "fp16", "bf16", "fp8"})
_SHORT = {
    "double": "fp64",
    "float": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8e4m3fn": "fp8",
    "float8e4m3fnuz": "fp8",
    "float8e5m2": "fp8",
    "float8e5m2fnuz": "fp8",
}
_PROVIDER_DEVICES = {
    "CPUExecutionProvider": "cpu",
    "CUDAExecutionProvider": "cuda",
    "TensorrtExecutionProvider": "cuda",
    "NvTensorRTRTXExecutionProvider": "cuda",
    "ROCMExecutionProvider": "rocm",
    "MIGraphXExecutionProvider": "rocm",
    "CoreMLExecutionProvider": "metal",
    "DmlExecutionProvider": "dml",
    "QNNExecutionProvider": "npu",
    "XnnpackExecutionProvider": "cpu",
    "DnnlExecutionProvider": "cpu",
}
_SPATIAL = (
    "Conv",
    "Pool",
    "BatchNormalization",
    "Resize",
    "Upsample",
    "LRN",
    "DepthToSpace",
    "SpaceToDepth",
    "GridSample",
)


def short(dtype: str) -> str:
    """Return our word for ONNX Runtime's type name: ``"float16"`` becomes ``"fp16"``, integers stay."""
    return _SHORT.get(dtype, dtype)


def device_of(provider: str, asked: str) -> str:
    """Return the device that a provider stands for; its number is that of the device asked for.

    A provider that is not known here is taken to run on the device asked for, unless that is the CPU.
    """
    family = asked.partition(":")[0]
    kind = _PROVIDER_DEVICES.get(provider)
    if kind is None:
        return asked if family != "cpu" else provider.removesuffix("ExecutionProvider").lower() or asked
    if kind == family:
        return asked
    return kind if kind in ("cpu", "npu", "metal") else f"{kind}:0"


def is_partition(op: str, provider: str) -> bool:
    """Whether an executed node is a compiled partition, whose inside ONNX Runtime cannot show."""
    return op == "EPContext" or (bool(provider) and op.startswith(f"{provider}_"))


def layout_of(node: NodeView) -> str | None:
    """Return the layout a spatial operator ran in, from its domain and name; None for others."""
    if node.domain == "com.microsoft.nchwc":
        return "nchwc"
    if node.domain == "com.ms.internal.nhwc" or node.op.startswith("Nhwc"):
        return "nhwc"
    return "nchw" if any(word in node.op for word in _SPATIAL) and node.op != "GlobalLpPool" else None


def precision_of(event: NodeEvent) -> str | None:
    """Return the dtype a node read and wrote, such as ``"fp16"``, or ``"fp32->uint8"`` where these differ.

    Of several inputs the largest one counts, and of equally large ones a floating-point one: neither the scales of a
    quantised operator nor the condition of a Where say in what precision it computes.
    """
    read, written = _main_dtype(event.inputs), _main_dtype(event.outputs)
    if read is None or written is None or read == written:
        return written or read
    return f"{read}->{written}"


def _main_dtype(tensors: Sequence[TensorSeen]) -> str | None:
    best: tuple[int, bool] | None = None
    name: str | None = None
    for tensor in tensors:
        word = short(tensor.dtype)
        rank = (tensor.elements, word in FLOATS)
        if best is None or rank > best:
            best, name = rank, word
    return name


def model_precisions(model: Any, stated: dict[str, int]) -> dict[str, str]:
    """Return the precision of the tensors of the outermost graph, as the model states or implies it.

    Types are inferred on a copy without weights; where that fails, only stated ones are returned.
    """
    import onnx

    types = dict(stated)
    light = onnx.ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = model.graph.name or "graph"
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    known = {i.name for i in graph.input}
    for item in model.graph.initializer:
        if item.name not in known:
            graph.input.append(onnx.helper.make_tensor_value_info(item.name, item.data_type, list(item.dims)))
    try:
        inferred = onnx.shape_inference.infer_shapes(light, check_type=False, strict_mode=False, data_prop=False)
    except (RuntimeError, ValueError, TypeError, onnx.shape_inference.InferenceError):
        inferred = light
    for value in (*inferred.graph.value_info, *inferred.graph.output):
        if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type:
            types.setdefault(value.name, value.type.tensor_type.elem_type)
    names = {t: short(onnx.TensorProto.DataType.Name(t).lower()) for t in set(types.values())}
    return {k: names[t] for k, t in types.items()}
