# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Style`: the form of quantized graph that an engine needs, and the table of them."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import onnx

__all__ = ["HEAVY", "IMAGE", "STYLES", "Style", "for_this_cpu", "without_kernel"]

#: Operators whose products are computed in integers.
HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul")
#: Operators that move values or pick among them: in integers as exact as in floats.
_MOVING = ("Clip", "Concat", "Flatten", "MaxPool", "Relu", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
#: Operators that are worth it between two convolutions, where the values are integers already, and nowhere else.
IMAGE = ("Add", "AveragePool", "GlobalAveragePool", "Mul")


class Style(msgspec.Struct, frozen=True, kw_only=True):
    """The form of QuantizeLinear and DequantizeLinear that an engine computes in integers."""

    name: str
    tool: Literal["onnxruntime", "qnn", "nncf"] = "onnxruntime"
    activations: Literal["uint8", "int8", "uint16"] = "uint8"
    weights: Literal["int8", "uint8"] = "int8"
    per_channel: bool = True
    symmetric: bool = False
    ops: tuple[str, ...] = ()
    float_outputs: tuple[str, ...] = ()
    float_bias: bool = False
    on_cpu: bool = False
    reduced: bool = False

    def __str__(self) -> str:
        how = f"{self.activations} activations, {self.weights} weights{' of 7 bits' if self.reduced else ''}"
        return f"{how}, a scale for each channel" if self.per_channel else how


#: By name. Each was chosen by running it; see ``docs/guides/quantization.md`` for the figures.
STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        # See also `without_kernel`: ONNX Runtime's CPU provider has no integer kernel of ConvTranspose.
        Style(
            name="ort-cpu",
            on_cpu=True,
            ops=("Conv", "Gemm", "MatMul", *_MOVING, *IMAGE),
            float_outputs=("Gemm", "MatMul"),
        ),
        # The CUDA provider has no DequantizeLinear for int32, which a quantized bias would need.
        Style(name="ort-cuda", activations="int8", symmetric=True, ops=HEAVY, float_outputs=HEAVY, float_bias=True),
        Style(name="openvino", on_cpu=True, ops=(*HEAVY, *_MOVING, *IMAGE), float_outputs=("Gemm", "MatMul")),
        Style(name="openvino-nncf", tool="nncf", on_cpu=True),
        # The parser of TensorRT refuses DequantizeLinear of an int32 bias, and takes only symmetric int8.
        Style(name="tensorrt", activations="int8", symmetric=True, ops=HEAVY, float_outputs=HEAVY, float_bias=True),
        # Every node is quantized: what is not would run in fp16, or not at all on the HTP.
        Style(name="qnn", tool="qnn", weights="uint8"),
        Style(name="qnn-u16", tool="qnn", activations="uint16", weights="uint8", per_channel=False),
    )
}


def for_this_cpu(style: Style) -> Style:
    """Return the style as this processor computes it exactly.

    x86 without VNNI adds two products of uint8 and int8 in 16 bits, and cuts off what does not fit: there weights take
    7 bits, whose sums fit.
    """
    if not style.on_cpu or platform.machine().lower() not in ("x86_64", "amd64"):
        return style
    from xpuruntime._core import DeviceManager

    features = DeviceManager.instance().get_all_devices()[0].features
    return style if set(features) & {"avx_vnni", "avx512_vnni"} else msgspec.structs.replace(style, reduced=True)


def without_kernel(proto: onnx.ModelProto, style: Style) -> set[str]:
    """Return the products that ONNX Runtime's CPU provider would compute in floats although they are quantized.

    It has no integer kernel of the operator, of a bias that is computed, or of a constant first operand; and that of a
    MatMul takes no scale for each column where the weights have more than two dimensions.
    """
    if style.name != "ort-cpu":
        return set()
    ranks = {tensor.name: len(tensor.dims) for tensor in proto.graph.initializer}
    found = set()
    for node in proto.graph.node:
        first, second, bias = (*node.input, "", "", "")[:3]
        if (node.op_type in HEAVY and node.op_type not in style.ops) or (
            (first in ranks or ranks.get(second, 0) > 2)
            if node.op_type == "MatMul"
            else node.op_type in ("Conv", "Gemm") and bias and bias not in ranks
        ):
            found.add(node.name)
    return found
