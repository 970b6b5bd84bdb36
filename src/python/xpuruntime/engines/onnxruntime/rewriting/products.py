# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Patterns of products and activations that a kernel of xpuruntime replaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.model.graph import normal_domain
from xpuruntime.engines.onnxruntime.rewriting.graph import (
    DTYPES,
    Dim,
    Scope,
    Shape,
    Terms,
    attributes,
    known_product,
    number,
    operand,
    same,
    sizes,
)
from xpuruntime.engines.onnxruntime.rewriting.rules import Form, RewriteCandidate

if TYPE_CHECKING:
    import onnx


_NO_FORM = {
    "MatMulNBits": "its weights are packed integers",
    "FusedMatMul": "it is ONNX Runtime's own operator, with factors and batches that xpuruntime's operator lacks",
}


def find_matmul(scope: Scope, node: onnx.NodeProto, terms: Terms) -> RewriteCandidate | None:
    """Return what a node is as a product; ``None`` for other nodes."""
    domain = normal_domain(node.domain)
    if domain == "com.microsoft" and node.op_type in _NO_FORM:
        return _refused(scope, node, _NO_FORM[node.op_type])
    if domain or node.op_type not in ("MatMul", "Gemm"):
        return None
    a, b = scope.shape(node.input[0]), scope.shape(node.input[1])
    reason = _misfit(scope, node, a, b)
    if reason:
        return _refused(scope, node, reason)
    assert a is not None
    assert b is not None
    attrs = attributes(node)
    trans_a, trans_b = bool(attrs.get("transA", 0)), bool(attrs.get("transB", 0))
    single = all(number(d) == 1 for d in b[:-2])  # the core joins the batches of `a` to rows then
    m_dims = (a[-1],) if trans_a else a[:-1] if single else a[-2:-1]
    n_dim = b[-2] if trans_b else b[-1]
    dtype = DTYPES[scope.type(node.input[0])]
    describe = _describer(terms, dtype, a, b, trans_a, trans_b)
    plain: dict[str, Any] = {"activation": "none", "trans_a": int(trans_a), "trans_b": int(trans_b)}
    plain["allow_tf32"] = int(terms.rounds(dtype))
    bias = node.input[2] if len(node.input) > 2 else ""
    output, nodes = node.output[0], [node]
    forms = [Form("MatMul", _inputs(node, bias), output, plain, _names(nodes), describe(bool(bias), "none"))]
    if not bias and (added := find_bias(scope, output, n_dim)) is not None:
        bias, output, nodes = added.value, added.output, [*nodes, *added.nodes]
        forms.append(Form("MatMul", _inputs(node, bias), output, plain, _names(nodes), describe(True, "none")))
    if (tail := find_activation(scope, output)) is not None:
        with_activation = {**plain, "activation": tail.value}
        folded = _names([*nodes, *tail.nodes])
        form = Form(
            "MatMul", _inputs(node, bias), tail.output, with_activation, folded, describe(bool(bias), tail.value)
        )
        forms.append(form)
    facts = {"m": known_product(m_dims), "n": number(n_dim), "k": number(a[-2] if trans_a else a[-1])}
    rounded = "tf32" if terms.rounds(dtype) else dtype
    return RewriteCandidate(node.name, "matmul", node.op_type, rounded, facts, tuple(reversed(forms)))


def _refused(scope: Scope, node: onnx.NodeProto, reason: str) -> RewriteCandidate:
    dtype = DTYPES.get(scope.type(node.input[0]))
    return RewriteCandidate(node.name, "matmul", node.op_type, dtype, {}, refusal=reason)


def _misfit(scope: Scope, node: onnx.NodeProto, a: Shape | None, b: Shape | None) -> str:
    """Return why xpuruntime's operator is not equivalent to a node; empty where it is."""
    for name in node.input[:2]:
        elem_type = scope.type(name)
        if elem_type == 0:
            return f"the type of {name!r} is not known before it runs"
        if elem_type not in DTYPES:
            return f"{name!r} holds no floating-point numbers"
    for name in node.input[:2]:
        maker = scope.maker(name)
        if maker is not None and maker.op_type == "DequantizeLinear":
            return f"{name!r} is dequantized for it: ONNX Runtime computes it in integers"
    if a is None or b is None:
        return f"the number of dimensions of {node.input[0 if a is None else 1]!r} is not known before it runs"
    if node.op_type == "Gemm":
        return _gemm_misfit(scope, node, b)
    if len(a) < 2 or len(b) < 2:
        return "one of its inputs is a vector"
    if len(a) > 8 or len(b) > 8:
        return "it has more than 8 dimensions"
    return (
        ""
        if _batches_fit(a[:-2], b[:-2])
        else (
            f"its batches ({_text(a)} by {_text(b)}) may have to be repeated along some dimensions and not along others"
        )
    )


def _gemm_misfit(scope: Scope, node: onnx.NodeProto, b: Shape) -> str:
    attrs = attributes(node)
    alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    if alpha != 1.0:
        return f"alpha is {alpha:g}, and the xpuruntime operator has no factor"
    bias = node.input[2] if len(node.input) > 2 else ""
    if not bias:
        return ""
    if beta != 1.0:
        return f"beta is {beta:g}, and the xpuruntime operator has no factor"
    if not is_bias(scope, bias, b[-2] if attrs.get("transB", 0) else b[-1]):
        return f"its bias {bias!r} is no constant vector with one number for each column"
    return ""


def _batches_fit(a: Shape, b: Shape) -> bool:
    ones = [all(number(d) == 1 for d in batch) for batch in (a, b)]
    return any(ones) or (len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True)))


def _text(shape: Shape) -> str:
    return "[" + ", ".join("?" if not d else str(number(d) or min(map(str, d))) for d in shape) + "]"


def _inputs(node: onnx.NodeProto, bias: str) -> tuple[str, ...]:
    return (node.input[0], node.input[1], bias) if bias else (node.input[0], node.input[1])


def _names(nodes: list[onnx.NodeProto]) -> tuple[str, ...]:
    return tuple(n.name for n in nodes)


def _describer(
    terms: Terms, dtype: str, a: Shape, b: Shape, trans_a: bool, trans_b: bool
) -> Callable[[bool, str], Callable[[int], dict[str, Any]]]:
    def of(has_bias: bool, activation: str) -> Callable[[int], dict[str, Any]]:
        def describe(stand_in: int) -> dict[str, Any]:
            left, right = sizes(a, stand_in), sizes(b, stand_in)
            k = left[-2] if trans_a else left[-1]
            n = right[-2] if trans_b else right[-1]
            if number(a[-1]) is None and not trans_a:
                k = right[-1] if trans_b else right[-2]
            batch = max(math.prod(left[:-2]), math.prod(right[:-2]))
            joined = math.prod(right[:-2]) == 1
            m = left[-1] if trans_a else left[-2]
            rows = batch * m if joined else m
            head = [] if joined else [batch]
            operands = {
                "a": operand(dtype, [*head, rows, k], (1, rows) if trans_a else None)
                if joined or len(left) > 2
                else operand(dtype, [rows, k]),
                "b": operand(dtype, [k, n], (1, k) if trans_b else None) if joined else operand(dtype, [*head, k, n]),
                "out": operand(dtype, [*head, rows, n]),
            }
            if has_bias:
                operands["bias"] = operand(dtype, [n])
            return terms.describe("matmul", operands, {"activation": activation, "allow_tf32": terms.rounds(dtype)})

        return describe

    return of


def find_conv(scope: Scope, node: onnx.NodeProto, terms: Terms) -> RewriteCandidate | None:
    """Return what a node is as a convolution; ``None`` for other nodes."""
    if normal_domain(node.domain) or node.op_type not in ("Conv", "ConvTranspose"):
        return None
    dtype = DTYPES.get(scope.type(node.input[0]))
    x, weight = scope.shape(node.input[0]), scope.shape(node.input[1])
    reason, attrs = _conv_misfit(scope, node, x, weight, dtype)
    if reason:
        return RewriteCandidate(node.name, "conv", node.op_type, dtype, {}, refusal=reason)
    assert dtype is not None
    assert x is not None
    assert weight is not None
    attrs["allow_tf32"] = int(terms.rounds(dtype))
    inputs = tuple(name for name in node.input if name)
    forms = []
    tail = find_activation(scope, node.output[0])
    if tail is not None:
        describe = _conv_describer(terms, dtype, x, weight, attrs, len(inputs) > 2, tail.value)
        names = (node.name, *(n.name for n in tail.nodes))
        forms.append(Form("Conv", inputs, tail.output, {**attrs, "activation": tail.value}, names, describe))
    describe = _conv_describer(terms, dtype, x, weight, attrs, len(inputs) > 2, "none")
    forms.append(Form("Conv", inputs, node.output[0], {**attrs, "activation": "none"}, (node.name,), describe))
    return RewriteCandidate(node.name, "conv", node.op_type, "tf32" if terms.rounds(dtype) else dtype, {}, tuple(forms))


def _conv_misfit(
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
            return f"{name!r} is dequantized for it: ONNX Runtime computes it in integers", {}
    if x is None or weight is None:
        return f"the number of dimensions of {node.input[0 if x is None else 1]!r} is not known before it runs", {}
    if len(x) != 4 or len(weight) != 4:
        return f"it runs over {len(x) - 2} dimensions, and the kernels here over 2", {}
    attrs = attributes(node)
    padding, pads = attrs.get("auto_pad", "NOTSET"), list(attrs.get("pads", (0, 0, 0, 0)))
    if padding == "VALID":
        pads = [0, 0, 0, 0]
    elif padding not in ("", "NOTSET"):
        return f"auto_pad is {padding}: its padding depends on the size of the image; export it with pads", {}
    if min(pads) < 0:
        return "its padding is negative", {}
    if None in (number(weight[2]), number(weight[3])):
        return "the size of its filters is not known before it runs", {}
    return "", {
        "strides": list(attrs.get("strides", (1, 1))),
        "pads": pads,
        "dilations": list(attrs.get("dilations", (1, 1))),
        "group": int(attrs.get("group", 1)),
    }


def _conv_describer(
    terms: Terms, dtype: str, x: Shape, weight: Shape, attrs: dict[str, Any], has_bias: bool, activation: str
) -> Callable[[int], dict[str, Any]]:
    def describe(stand_in: int) -> dict[str, Any]:
        filters = sizes(weight, stand_in)
        image = sizes(x, stand_in)
        image[1] = filters[1] * attrs["group"]
        spatial = []
        for axis in range(2):
            reach = (filters[2 + axis] - 1) * attrs["dilations"][axis] + 1
            padded = image[2 + axis] + attrs["pads"][axis] + attrs["pads"][axis + 2]
            if padded < reach and number(x[2 + axis]) is None:
                image[2 + axis] += reach - padded
                padded = reach
            spatial.append((padded - reach) // attrs["strides"][axis] + 1)
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
            "groups": attrs["group"],
            "stride": attrs["strides"],
            "dilation": attrs["dilations"],
            "padding": attrs["pads"],
        }
        return terms.describe("conv", operands, values)

    return describe


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
        product = _product(scope, name, plus.output[0], first)
        if product is not None:
            nodes += product
            output = product[-1].output[0]
            inside = [name, *(o for n in nodes for o in n.output if o != output)]
            if all(scope.only(tensor, nodes) for tensor in inside):
                return Tail(tuple(nodes), output, "gelu")
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
    constant = scope.scalar(_other(node, name))
    if constant is None or constant == 0 or (node.op_type == "Div" and node.input[0] != name):
        return False
    return abs((constant if node.op_type == "Mul" else 1.0 / constant) - wanted) < 1e-4
