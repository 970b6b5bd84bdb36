# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Layer and RMS norms: one node, or the arithmetic that older exporters write."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.model.graph import normal_domain
from xpuruntime.engines.onnxruntime.rewriting.graph import (
    DTYPES,
    Scope,
    Terms,
    attributes,
    number,
    operand,
    same,
    sizes,
)
from xpuruntime.engines.onnxruntime.rewriting.rules import Form, RewriteCandidate

if TYPE_CHECKING:
    import onnx

_NODES = {
    ("", "LayerNormalization"): "layer_norm",
    ("", "RMSNormalization"): "rms_norm",
    ("", "SimplifiedLayerNormalization"): "rms_norm",
    ("com.microsoft", "SimplifiedLayerNormalization"): "rms_norm",
}
_NO_FORM = {
    "SkipLayerNormalization": ("layer_norm", "it adds a residual that it also hands out"),
    "SkipSimplifiedLayerNormalization": ("rms_norm", "it adds a residual that it also hands out"),
}
_OPS = {"layer_norm": "LayerNormalization", "rms_norm": "RMSNormalization"}


class _Parts(NamedTuple):
    kind: str
    x: str
    weight: str
    bias: str
    output: str
    epsilon: float
    nodes: tuple[onnx.NodeProto, ...]
    axis: int = -1


def find_norm(scope: Scope, node: onnx.NodeProto, terms: Terms) -> RewriteCandidate | None:
    """Return what a node is as a norm; ``None`` for other nodes. Arithmetic is found at the division by the root."""
    domain = normal_domain(node.domain)
    if domain == "com.microsoft" and node.op_type in _NO_FORM:
        kind, reason = _NO_FORM[node.op_type]
        return RewriteCandidate(
            node.name, kind, node.op_type, DTYPES.get(scope.type(node.input[0])), {}, refusal=reason
        )
    if (entry := _NODES.get((domain, node.op_type))) is not None:
        return _one_node(scope, node, entry, terms)
    parts = _arithmetic(scope, node) if not domain and node.op_type in ("Div", "Mul") else None
    return None if parts is None else _candidate(scope, node, parts, terms)


def _one_node(scope: Scope, node: onnx.NodeProto, kind: str, terms: Terms) -> RewriteCandidate:
    attrs = attributes(node)
    shape = scope.shape(node.input[0])
    reason = ""
    if shape is None:
        reason = f"the number of dimensions of {node.input[0]!r} is not known before it runs"
    elif any(node.output[1:]):
        reason = "its mean or deviation is read as well"
    elif attrs.get("stash_type", 1) != 1:
        reason = f"stash_type {attrs['stash_type']} asks for another precision inside than fp32"
    if reason:
        return RewriteCandidate(
            node.name, kind, node.op_type, DTYPES.get(scope.type(node.input[0])), {}, refusal=reason
        )
    bias = node.input[2] if len(node.input) > 2 else ""
    epsilon = float(attrs.get("epsilon", 1e-5))
    axis = int(attrs.get("axis", -1))
    assert shape is not None
    axis = axis if axis < 0 else axis - len(shape)
    parts = _Parts(kind, node.input[0], node.input[1], bias, node.output[0], epsilon, (node,), axis)
    return _candidate(scope, node, parts, terms)


def _candidate(scope: Scope, node: onnx.NodeProto, parts: _Parts, terms: Terms) -> RewriteCandidate:
    dtype = DTYPES.get(scope.type(parts.x))
    reason = _misfit(scope, parts, dtype)
    if reason:
        return RewriteCandidate(node.name, parts.kind, node.op_type, dtype, {}, refusal=reason)
    assert dtype is not None
    inputs = (parts.x, parts.weight, parts.bias) if parts.bias else (parts.x, parts.weight)
    form = Form(
        _OPS[parts.kind],
        inputs,
        parts.output,
        {"axis": parts.axis, "epsilon": parts.epsilon},
        tuple(n.name for n in parts.nodes),
        _describer(scope, parts, terms, dtype),
    )
    return RewriteCandidate(node.name, parts.kind, node.op_type, dtype, {}, (form,))


def _misfit(scope: Scope, parts: _Parts, dtype: str | None) -> str:
    if dtype is None:
        return f"{parts.x!r} is not known to hold floating-point numbers"
    shape = scope.shape(parts.x)
    if not shape:
        return f"the number of dimensions of {parts.x!r} is not known before it runs"
    for name in (parts.weight, parts.bias):
        if not name:
            continue
        form = scope.shape(name)
        columns = shape[parts.axis :]
        if form is None or len(form) != len(columns) or not all(map(same, form, columns)):
            return f"{name!r} is not known to have one number for each element of a row"
        if DTYPES.get(scope.type(name)) not in (dtype, "fp32"):
            return f"{name!r} is neither of the type of {parts.x!r} nor fp32"
    if parts.bias and scope.type(parts.bias) != scope.type(parts.weight):
        return f"{parts.weight!r} and {parts.bias!r} are of different types"
    return ""


def _describer(scope: Scope, parts: _Parts, terms: Terms, dtype: str) -> Callable[[int], dict[str, Any]]:
    shape = scope.shape(parts.x)
    assert shape is not None

    def describe(stand_in: int) -> dict[str, Any]:
        known = sizes(shape, stand_in)
        rows, columns = math.prod(known[: parts.axis]), math.prod(known[parts.axis :])
        operands = {"x": operand(dtype, [rows, columns]), "y": operand(dtype, [rows, columns])}
        for slot, name in (("weight", parts.weight), ("bias", parts.bias)):
            if name:
                operands[slot] = operand(DTYPES[scope.type(name)], [columns])
        return terms.describe(parts.kind, operands, {"epsilon": parts.epsilon})

    return describe


def _arithmetic(scope: Scope, node: onnx.NodeProto) -> _Parts | None:
    """Read ``(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)`` or the same without the mean, at its last step."""
    divided = _divided(scope, node)
    if divided is None:
        return None
    top, root, nodes = divided
    inside = _mean_square(scope, root)
    if inside is None:
        return None
    base, epsilon, square_nodes = inside
    nodes = [*nodes, *square_nodes]
    centred, minus = _centred(scope, base), _centred(scope, top)
    kind, x = ("layer_norm", centred[0]) if centred is not None else ("rms_norm", base)
    if centred is not None:
        if minus is None or minus[0] != x:
            return None
        nodes += [*centred[1], *minus[1]]
    elif top != base:
        return None
    output, weight, bias = node.output[0], "", ""
    scaled = _scaled(scope, output, x, "Mul")
    if scaled is None:
        return None
    nodes.append(scaled[0])
    weight, output = scaled[1], scaled[0].output[0]
    if kind == "layer_norm" and (shifted := _scaled(scope, output, x, "Add")) is not None:
        nodes.append(shifted[0])
        bias, output = shifted[1], shifted[0].output[0]
    unique = list({id(n): n for n in nodes}.values())
    results = [name for n in unique for name in n.output if name and name != output]
    if not all(scope.only(name, unique) for name in results):
        return None
    return _Parts(kind, x, weight, bias, output, epsilon, tuple(unique))


def _divided(scope: Scope, node: onnx.NodeProto) -> tuple[str, onnx.NodeProto, list[onnx.NodeProto]] | None:
    """Return what is divided by a root, and that root: ``t / Sqrt(v)``, ``t * (1 / Sqrt(v))``, ``t * v^-0.5``."""
    if node.op_type == "Div":
        root = scope.maker(node.input[1])
        return (node.input[0], root, [node, root]) if root is not None and root.op_type == "Sqrt" else None
    for top, factor in ((node.input[0], node.input[1]), (node.input[1], node.input[0])):
        inverse = scope.maker(factor)
        if inverse is None:
            continue
        if inverse.op_type == "Pow" and scope.scalar(inverse.input[1]) == -0.5:
            return top, inverse, [node, inverse]
        is_inverse = inverse.op_type == "Reciprocal" or (
            inverse.op_type == "Div" and scope.scalar(inverse.input[0]) == 1.0
        )
        root = scope.maker(inverse.input[-1]) if is_inverse else None
        if root is not None and root.op_type == "Sqrt":
            return top, root, [node, inverse, root]
    return None


def _mean_square(scope: Scope, root: onnx.NodeProto) -> tuple[str, float, list[onnx.NodeProto]] | None:
    """Return what is squared, epsilon and the nodes of ``mean(t^2) + epsilon``."""
    plus = scope.maker(root.input[0])
    if plus is None or plus.op_type != "Add":
        return None
    for inner, constant in ((plus.input[0], plus.input[1]), (plus.input[1], plus.input[0])):
        epsilon, mean = scope.scalar(constant), scope.maker(inner)
        if epsilon is None or mean is None or not _is_row_mean(scope, mean):
            continue
        square = scope.maker(mean.input[0])
        if square is None:
            return None
        if square.op_type == "Pow" and scope.scalar(square.input[1]) == 2.0:
            return square.input[0], epsilon, [plus, mean, square]
        if square.op_type == "Mul" and square.input[0] == square.input[1]:
            return square.input[0], epsilon, [plus, mean, square]
    return None


def _is_row_mean(scope: Scope, node: onnx.NodeProto) -> bool:
    if node.op_type != "ReduceMean" or normal_domain(node.domain):
        return False
    attrs = attributes(node)
    axes = attrs.get("axes")
    if axes is None and len(node.input) > 1:
        value = scope.value(node.input[1])
        axes = None if value is None else [int(v) for v in value.reshape(-1)]
    shape = scope.shape(node.input[0])
    rank = len(shape) if shape is not None else None
    last = axes is not None and (list(axes) == [-1] or (rank is not None and list(axes) == [rank - 1]))
    return last and attrs.get("keepdims", 1) == 1


def _centred(scope: Scope, name: str) -> tuple[str, list[onnx.NodeProto]] | None:
    minus = scope.maker(name)
    if minus is None or minus.op_type != "Sub":
        return None
    mean = scope.maker(minus.input[1])
    if mean is None or not _is_row_mean(scope, mean) or mean.input[0] != minus.input[0]:
        return None
    return minus.input[0], [minus, mean]


def _scaled(scope: Scope, name: str, x: str, op: str) -> tuple[onnx.NodeProto, str] | None:
    readers = scope.readers(name)
    if len(readers) != 1 or readers[0].op_type != op or normal_domain(readers[0].domain):
        return None
    other = readers[0].input[1] if readers[0].input[0] == name else readers[0].input[0]
    tensor, shape = scope.constant(other), scope.shape(x)
    if tensor is None or not shape or list(tensor.dims) != [number(shape[-1])] or not scope.only(name, readers):
        return None
    return readers[0], other
