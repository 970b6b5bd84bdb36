# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Two-dimensional convolutions, with the activation that follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.graph import normal_domain
from xpuruntime.engines.onnxruntime.rewriting.activation import find_activation
from xpuruntime.engines.onnxruntime.rewriting.graph import DTYPES, Scope, Shape, attributes, number
from xpuruntime.engines.onnxruntime.rewriting.operands import Terms, operand, sizes
from xpuruntime.engines.onnxruntime.rewriting.records import Form, RewriteCandidate

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx

__all__ = ["find_conv"]


def find_conv(scope: Scope, node: onnx.NodeProto, terms: Terms) -> RewriteCandidate | None:
    """Return what a node is as a convolution; ``None`` for other nodes."""
    if normal_domain(node.domain) or node.op_type not in ("Conv", "ConvTranspose"):
        return None
    dtype = DTYPES.get(scope.type(node.input[0]))
    x, weight = scope.shape(node.input[0]), scope.shape(node.input[1])
    reason, given = _misfit(scope, node, x, weight, dtype)
    if reason:
        return RewriteCandidate(node.name, "conv", node.op_type, dtype, {}, refusal=reason)
    assert dtype is not None
    assert x is not None
    assert weight is not None
    given["allow_tf32"] = int(terms.rounds(dtype))
    inputs = tuple(name for name in node.input if name)
    forms = []
    tail = find_activation(scope, node.output[0])
    if tail is not None:
        describe = _describer(terms, dtype, x, weight, given, len(inputs) > 2, tail.value)
        names = (node.name, *(n.name for n in tail.nodes))
        forms.append(Form("Conv", inputs, tail.output, {**given, "activation": tail.value}, names, describe))
    describe = _describer(terms, dtype, x, weight, given, len(inputs) > 2, "none")
    forms.append(Form("Conv", inputs, node.output[0], {**given, "activation": "none"}, (node.name,), describe))
    return RewriteCandidate(node.name, "conv", node.op_type, "tf32" if terms.rounds(dtype) else dtype, {}, tuple(forms))


def _misfit(
    scope: Scope, node: onnx.NodeProto, x: Shape | None, weight: Shape | None, dtype: str | None
) -> tuple[str, dict[str, Any]]:
    """Return why xpuruntime's operator is not equivalent to a node, empty where it is; and its attributes."""
    if node.op_type == "ConvTranspose":
        return "a transposed convolution is an operation of its own, which has no kernels here", {}
    if dtype is None:
        return f"{node.input[0]!r} is not known to hold floating-point numbers", {}
    for name in node.input[:2]:
        maker = scope.maker(name)
        if maker is not None and maker.op_type == "DequantizeLinear":
            return f"{name!r} is dequantised for it: ONNX Runtime computes it in integers", {}
    if x is None or weight is None:
        return f"the number of dimensions of {node.input[0 if x is None else 1]!r} is not known before it runs", {}
    if len(x) != 4 or len(weight) != 4:
        return f"it runs over {len(x) - 2} dimensions, and the kernels here over 2", {}
    given = attributes(node)
    padding, pads = given.get("auto_pad", "NOTSET"), list(given.get("pads", (0, 0, 0, 0)))
    if padding == "VALID":
        pads = [0, 0, 0, 0]
    elif padding not in ("", "NOTSET"):
        return f"auto_pad is {padding}: its padding depends on the size of the image; export it with pads", {}
    if min(pads) < 0:
        return "its padding is negative", {}
    if None in (number(weight[2]), number(weight[3])):
        return "the size of its filters is not known before it runs", {}
    return "", {
        "strides": list(given.get("strides", (1, 1))),
        "pads": pads,
        "dilations": list(given.get("dilations", (1, 1))),
        "group": int(given.get("group", 1)),
    }


def _describer(
    terms: Terms, dtype: str, x: Shape, weight: Shape, given: dict[str, Any], has_bias: bool, activation: str
) -> Callable[[int], dict[str, Any]]:
    def describe(stand_in: int) -> dict[str, Any]:
        filters = sizes(weight, stand_in)
        image = sizes(x, stand_in)
        image[1] = filters[1] * given["group"]
        spatial = []
        for axis in range(2):
            reach = (filters[2 + axis] - 1) * given["dilations"][axis] + 1
            padded = image[2 + axis] + given["pads"][axis] + given["pads"][axis + 2]
            if padded < reach and number(x[2 + axis]) is None:
                image[2 + axis] += reach - padded
                padded = reach
            spatial.append((padded - reach) // given["strides"][axis] + 1)
        operands = {
            "x": operand(dtype, image),
            "weight": operand(dtype, filters),
            "out": operand(dtype, [image[0], filters[0], *spatial]),
        }
        if has_bias:
            operands["bias"] = operand(dtype, [filters[0]])
        values = {
            "activation": activation,
            "allow_tf32": terms.rounds(dtype),
            "groups": given["group"],
            "stride": given["strides"],
            "dilation": given["dilations"],
            "padding": given["pads"],
        }
        return terms.describe("conv", operands, values)

    return describe
