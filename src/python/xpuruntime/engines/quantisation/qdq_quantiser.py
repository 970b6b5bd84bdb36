# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ONNX Runtime's static quantizer, driven by a `Style`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.quantisation.aliases import Aliases
from xpuruntime.engines.quantisation.style import HEAVY, IMAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import onnx

    from xpuruntime.engines.quantisation.preparing import Prepared
    from xpuruntime.engines.quantisation.style import Style

__all__ = ["quantise_qdq"]


def quantise_qdq(
    prepared: Prepared, samples: Iterable[dict[str, Any]], style: Style, leave: Sequence[str], folder: Path
) -> onnx.ModelProto:
    """Return the prepared graph with QuantizeLinear and DequantizeLinear around the nodes of the style."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    aliases = Aliases(prepared.proto)
    aliased = aliases.apply(prepared.proto)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._samples: Iterator[dict[str, Any]] = iter(samples)

        def get_next(self) -> dict[str, Any] | None:
            sample = next(self._samples, None)
            return None if sample is None else {aliases.of[name]: value for name, value in sample.items()}

    types = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8, "uint16": QuantType.QUInt16}
    source, out = folder / "aliased.onnx", folder / "quantised.onnx"
    source.write_bytes(aliased.SerializeToString(deterministic=True))
    given = str(source)
    activations, weights = types[style.activations], types[style.weights]
    if style.tool == "qnn":
        from onnxruntime.quantization import quantize
        from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

        overrides = _channels_of_convolutions(aliased, leave, QuantType.QInt8) if style.per_channel else None
        config = get_qnn_qdq_config(
            given,
            Reader(),
            activation_type=activations,
            weight_type=weights,
            init_overrides=overrides,
            add_qtype_converts=False,
            nodes_to_exclude=list(leave),
        )
        config.op_types_to_quantize = sorted(config.op_types_to_quantize)
        quantize(given, str(out), config)
    else:
        exclude = sorted({*leave, *_outside_images(prepared.proto)})
        quantize_static(
            given,
            str(out),
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(style.ops),
            per_channel=style.per_channel,
            reduce_range=style.reduced,
            activation_type=activations,
            weight_type=weights,
            nodes_to_exclude=exclude,
            extra_options={
                "ActivationSymmetric": style.symmetric,
                "WeightSymmetric": style.weights == "int8",
                "OpTypesToExcludeOutputQuantization": list(style.float_outputs),
                "QuantizeBias": not style.float_bias,
            },
        )
    proto = onnx.load(str(out))
    aliases.undo(proto)
    return proto


def _channels_of_convolutions(
    proto: onnx.ModelProto, leave: Sequence[str], kind: Any
) -> dict[str, list[dict[str, Any]]]:
    """Return overrides that give each channel of a convolution's weights a scale of its own."""
    constant = {tensor.name for tensor in proto.graph.initializer}
    readers: dict[str, set[str]] = {}
    for node in proto.graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    axes = {"Conv": 0, "ConvTranspose": 1}
    return {
        node.input[1]: [{"quant_type": kind, "axis": axes[node.op_type], "symmetric": True}]
        for node in proto.graph.node
        if node.op_type in axes
        and node.name not in leave
        and node.input[1] in constant
        and len(readers[node.input[1]]) == 1
    }


def _outside_images(proto: onnx.ModelProto) -> set[str]:
    """Return the additions, multiplications and poolings that stand between other things than convolutions.

    Between two convolutions the values are integers already. Elsewhere, as beside the products of a transformer, they
    would only lose digits.
    """
    makers = {output: node for node in proto.graph.node for output in node.output if output}
    inside: dict[str, bool] = {}

    def from_convolution(name: str) -> bool:
        node = makers.get(name)
        if node is None or node.op_type not in _IMAGE_PATH:
            return False
        if node.name not in inside:
            inside[node.name] = False
            inside[node.name] = node.op_type in _CONVOLUTIONS or all(
                from_convolution(one) for one in node.input if one in makers
            )
        return inside[node.name]

    return {
        node.name
        for node in proto.graph.node
        if node.op_type in IMAGE and not (any(n in makers for n in node.input) and from_convolution(node.output[0]))
    }


_CONVOLUTIONS = ("Conv", "ConvTranspose")
_IMAGE_PATH = frozenset({*_CONVOLUTIONS, *IMAGE, "Relu", "Clip", "Concat", "MaxPool"})
assert set(_CONVOLUTIONS) <= set(HEAVY)
