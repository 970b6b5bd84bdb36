# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Style`: the form of quantized graph that an engine needs, and the table of them."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from xpuruntime.engines.observation import folded_unit
from xpuruntime.engines.precision.types import meets

if TYPE_CHECKING:
    import onnx

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.quantization.quantized import QuantizedModel
    from xpuruntime.evidence.records import Unit

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


#: By name. Each was chosen by running it; see ``docs/results/small-models.md`` for the figures.
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
    names = set()
    for node in proto.graph.node:
        first, second, bias = (*node.input, "", "", "")[:3]
        if (node.op_type in HEAVY and node.op_type not in style.ops) or (
            (first in ranks or ranks.get(second, 0) > 2)
            if node.op_type == "MatMul"
            else node.op_type in ("Conv", "Gemm") and bias and bias not in ranks
        ):
            names.add(node.name)
    return names


#: What the quantizers add to the name of a value.
_ENDINGS = ("_DequantizeLinear_Output", "_QuantizeLinear_Output", "_QuantizeLinear_Input", "_quantized")
#: What ONNX Runtime adds to the name of a node that it moved to another layout or made twice.
_ADDED = re.compile(r"(_token_[0-9]+|_nhwc|_nchwc|/duplicated|#[0-9]+)+$")
_INTEGERS = {"int8", "uint8", "uint16"}
_COMPUTED = "computed before the graph was quantized"


def in_source_terms(units: Sequence[Unit], quantized: QuantizedModel, model: ModelInfo) -> tuple[Unit, ...]:
    """Return units that name nodes of the model, each node exactly once."""
    tensors = {name for node in model.nodes for name in node.outputs if name}
    ruled, kind = _ruled(quantized), "uint16" if quantized.style.activations == "uint16" else "int8"
    requested = {node.name: "fp32" if node.name in ruled else kind for node in model.nodes if node.op in HEAVY}
    light = {name: kind for name in quantized.quantized_nodes if name not in requested}
    claimed = _claims(units, quantized)
    held = {name for names in claimed.values() for name in names}
    taken: dict[str, None] = {}
    told: list[Unit] = []
    for index, unit in enumerate(units):
        joined = (*claimed.get(index, ()), *(name for name in unit.source_nodes if name not in held))
        own = _sources(joined, quantized)
        new = tuple(name for name in own if name not in taken)
        taken.update(dict.fromkeys(new))
        if unit.relation == "folded" and unit.source_nodes and not own:
            continue  # a pair that quantizing put in and the engine's optimizer took out
        serves = (*(name for name in own if name not in new), *_sources(unit.serves, quantized))
        told.append(_told(unit, new, tuple(dict.fromkeys(serves)), tensors, requested, light))
    engine = units[0].engine if units else ""
    for node in model.nodes:
        if node.name not in taken:
            told.append(folded_unit(node, engine, _COMPUTED))
    return tuple(told)


def source_tensor(name: str, tensors: Iterable[str]) -> str | None:
    """Return the value of the source that a value of the quantized graph stands for; ``None`` where there is none."""
    known = tensors if isinstance(tensors, (set, frozenset, dict)) else set(tensors)
    while name not in known:
        ending = next((ending_ for ending_ in _ENDINGS if name.endswith(ending_)), None)
        if ending is None:
            return None
        name = name.removesuffix(ending)
    return name


def _claims(units: Sequence[Unit], quantized: QuantizedModel) -> dict[int, tuple[str, ...]]:
    # Return the nodes of the quantized graph that a unit has for its own by its name; the first unit of a name has it.
    # Optimizers that change layouts rename values, by which units are joined otherwise, and only add to names of nodes.
    claims: dict[int, tuple[str, ...]] = {}
    seen: set[str] = set()
    for index, unit in enumerate(units):
        name = _ADDED.sub("", unit.id)
        if name in quantized.regions and name not in seen and unit.relation != "folded":
            seen.add(name)
            claims[index] = (name,)
    return claims


def _ruled(quantized: QuantizedModel) -> set[str]:
    return {node.name for node in quantized.left_nodes if node.by_rule or node.unserved}


def _sources(names: Iterable[str], quantized: QuantizedModel) -> tuple[str, ...]:
    return tuple(dict.fromkeys(source for name in names for source in quantized.regions.get(name, ())))


def _told(
    unit: Unit,
    own: tuple[str, ...],
    serves: tuple[str, ...],
    tensors: set[str],
    requested: dict[str, str],
    light: dict[str, str],
) -> Unit:
    relation, status, wanted = unit.relation, unit.status, unit.precision_requested
    if relation not in ("opaque", "folded"):
        relation = "inserted" if not own else "exact" if len(own) == 1 else "fused"
    ran = unit.precision_run or ""
    named = {requested[name] for name in own or serves if name in requested}
    if not named and _INTEGERS.intersection(ran.split("->")):
        named = {light[name] for name in own or serves if name in light}
    if named and wanted in (None, "fp32", "int8"):
        elsewhere = status == "substituted" and meets(wanted, ran)  # it is for something else, such as its device
        wanted = next(iter(named - {"fp32"}), "fp32")
        if status in ("honoured", "substituted") and unit.precision_run:
            status = "honoured" if meets(wanted, ran) and not elsewhere else "substituted"
    return msgspec.structs.replace(
        unit,
        relation=relation,
        source_nodes=own,
        serves=serves,
        outputs=tuple(dict.fromkeys(t for name in unit.outputs if (t := source_tensor(name, tensors)) is not None)),
        precision_requested=wanted if own or serves else None,
        status=status,
    )
