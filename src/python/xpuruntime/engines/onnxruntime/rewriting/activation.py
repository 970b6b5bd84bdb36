# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Epilogue of a product: the bias that is added and the activation, one node or the several of an exporter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.engines.model.graph import normal_domain
from xpuruntime.engines.onnxruntime.rewriting.graph import attributes, number

if TYPE_CHECKING:
    import onnx

    from xpuruntime.engines.onnxruntime.rewriting.graph import Dim, Scope

__all__ = ["Tail", "find_activation", "find_bias"]

_CLOSE = 1e-6
_FACTORS = 8


class Tail(NamedTuple):
    """What follows: the nodes, what they make, and the activation or the bias that they are."""

    nodes: tuple[onnx.NodeProto, ...]
    output: str
    value: str


def find_bias(scope: Scope, name: str, columns: Dim) -> Tail | None:
    """Find the Add of a vector that has one constant number for each of `columns`, as the only reader of a tensor."""
    readers = scope.readers(name)
    if len(readers) != 1 or readers[0].op_type != "Add" or normal_domain(readers[0].domain):
        return None
    add = readers[0]
    other = add.input[1] if add.input[0] == name else add.input[0]
    if not scope.only(name, [add]) or not is_bias(scope, other, columns):
        return None
    return Tail((add,), add.output[0], other)


def is_bias(scope: Scope, name: str, columns: Dim) -> bool:
    """Whether a tensor is a constant vector with one number for each column."""
    tensor = scope.constant(name)
    return tensor is not None and len(tensor.dims) == 1 and number(columns) == tensor.dims[0]


def find_activation(scope: Scope, name: str) -> Tail | None:
    """Find an activation as the only use of a tensor."""
    readers = scope.readers(name)
    if len(readers) == 1:
        return _one_node(scope, name, readers[0])
    return _silu(scope, name, readers) or _gelu(scope, name, readers)


def _one_node(scope: Scope, name: str, node: onnx.NodeProto) -> Tail | None:
    key = (normal_domain(node.domain), node.op_type)
    word = None
    if key == ("", "Relu"):
        word = "relu"
    elif key == ("", "Gelu"):
        word = {"none": "gelu", "tanh": "gelu_tanh"}.get(attributes(node).get("approximate", "none"))
    elif key == ("com.microsoft", "Gelu"):
        word = "gelu"
    elif key == ("com.microsoft", "FastGelu") and len([i for i in node.input if i]) == 1:
        word = "gelu_tanh"
    elif (key == ("", "Swish") and attributes(node).get("alpha", 1.0) == 1.0) or (
        key == ("com.microsoft", "QuickGelu") and attributes(node).get("alpha", 1.702) == 1.0
    ):
        word = "silu"
    if word is None or not scope.only(name, [node]):
        return None
    return Tail((node,), node.output[0], word)


def _silu(scope: Scope, name: str, readers: list[onnx.NodeProto]) -> Tail | None:
    """``x * Sigmoid(x)``."""
    gate = next((n for n in readers if n.op_type == "Sigmoid" and not normal_domain(n.domain)), None)
    product = next((n for n in readers if n.op_type == "Mul" and not normal_domain(n.domain)), None)
    if gate is None or product is None or len(readers) != 2 or set(product.input) != {name, gate.output[0]}:
        return None
    if not scope.only(name, readers) or not scope.only(gate.output[0], [product]):
        return None
    return Tail((gate, product), product.output[0], "silu")


def _gelu(scope: Scope, name: str, readers: list[onnx.NodeProto]) -> Tail | None:
    """``0.5 * x * (1 + Erf(x / sqrt(2)))``, the factors in any order."""
    inner = next((n for n in readers if n.op_type in ("Div", "Mul") and _erf_of(scope, n) is not None), None)
    if inner is None or not _is_factor(scope, inner, name, math.sqrt(0.5)):
        return None
    erf = _erf_of(scope, inner)
    assert erf is not None
    plus = _next(scope, erf.output[0], "Add")
    if plus is None or scope.scalar(_other(plus, erf.output[0])) != 1.0:
        return None
    nodes = [inner, erf, plus]
    for first in [n for n in readers if n is not inner]:
        found = _product(scope, name, plus.output[0], first)
        if found is not None:
            nodes += found
            made = found[-1].output[0]
            inside = [name, *(o for n in nodes for o in n.output if o != made)]
            if all(scope.only(tensor, nodes) for tensor in inside):
                return Tail(tuple(nodes), made, "gelu")
    return None


def _product(scope: Scope, name: str, gate: str, first: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """Return the multiplications that make ``0.5 * name * gate``, from the first that reads `name` to the last."""
    factor, nodes, seen_gate, current, node = 1.0, [], False, name, first
    for _ in range(_FACTORS):
        if node.op_type not in ("Mul", "Div") or normal_domain(node.domain):
            return None
        other = _other(node, current)
        halved = scope.scalar(other)
        extra: list[onnx.NodeProto] = []
        if halved is not None and (node.op_type == "Mul" or node.input[0] == current):
            factor *= halved if node.op_type == "Mul" else 1.0 / halved
        elif node.op_type == "Mul" and not seen_gate:
            share, extra = _scaled_gate(scope, other, gate)
            if share is None:
                return None
            factor, seen_gate = factor * share, True
        else:
            return None
        nodes += [*extra, node]
        if seen_gate and abs(factor - 0.5) < _CLOSE:
            return nodes
        current = node.output[0]
        after = scope.readers(current)
        if len(after) != 1:
            return None
        node = after[0]
    return None


def _scaled_gate(scope: Scope, name: str, gate: str) -> tuple[float | None, list[onnx.NodeProto]]:
    """Return the factor with which a tensor is the gate, 1 for the gate itself, and the node between them."""
    if name == gate:
        return 1.0, []
    node = scope.maker(name)
    if node is not None and node.op_type == "Mul" and gate in node.input:
        return scope.scalar(_other(node, gate)), [node]
    return None, []


def _erf_of(scope: Scope, node: onnx.NodeProto) -> onnx.NodeProto | None:
    return _next(scope, node.output[0], "Erf")


def _next(scope: Scope, name: str, op: str) -> onnx.NodeProto | None:
    readers = scope.readers(name)
    fits = len(readers) == 1 and readers[0].op_type == op and not normal_domain(readers[0].domain)
    return readers[0] if fits else None


def _other(node: onnx.NodeProto, name: str) -> str:
    return str(node.input[1] if node.input[0] == name else node.input[0])


def _is_factor(scope: Scope, node: onnx.NodeProto, name: str, wanted: float) -> bool:
    """Whether a node multiplies a tensor by `wanted`."""
    constant = scope.scalar(_other(node, name))
    if constant is None or constant == 0 or (node.op_type == "Div" and node.input[0] != name):
        return False
    return abs((constant if node.op_type == "Mul" else 1.0 / constant) - wanted) < 1e-4
