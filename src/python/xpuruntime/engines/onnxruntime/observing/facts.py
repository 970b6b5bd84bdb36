# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Facts of one executed node: the precision it ran in, its layout, and the device that its provider stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.onnxruntime.arithmetic import arithmetic_of
from xpuruntime.engines.precision.names import main_precision, precision_name, read_and_written

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.engines.onnxruntime.observing.graph import NodeView
    from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent, TensorSeen

__all__ = ["computed_precision", "is_partition", "layout_of", "provider_device"]

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


def provider_device(provider: str, asked: str) -> str:
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


def computed_precision(event: NodeEvent, numbers: Mapping[str, int] | None = None) -> str | None:
    """Return the precision in which a node multiplied; of most, that is what it read and wrote.

    Such as ``"fp16"``, or ``"fp32->uint8"`` where these differ; ``None`` where it is not known.
    """
    inputs = (precision_name(tensor.dtype) for tensor in event.inputs)
    inside = arithmetic_of(event.op, event.provider, inputs, numbers)
    if inside is not None:
        return None if inside == "unknown" else inside
    return read_and_written(_main(event.inputs), _main(event.outputs))


def _main(tensors: Sequence[TensorSeen]) -> str | None:
    return main_precision((precision_name(tensor.dtype), tensor.elements) for tensor in tensors)
