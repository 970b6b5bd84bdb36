# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""MatMul and Gemm, with the bias and the activation that follow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.graph import normal_domain
from xpuruntime.engines.onnxruntime.rewriting.activation import find_activation, find_bias, is_bias
from xpuruntime.engines.onnxruntime.rewriting.graph import DTYPES, Scope, Shape, attributes, number
from xpuruntime.engines.onnxruntime.rewriting.operands import Terms, known_product, operand, same, sizes
from xpuruntime.engines.onnxruntime.rewriting.records import Form, RewriteCandidate

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx

__all__ = ["find_matmul"]

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
    given = attributes(node)
    trans_a, trans_b = bool(given.get("transA", 0)), bool(given.get("transB", 0))
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
            return f"{name!r} is dequantised for it: ONNX Runtime computes it in integers"
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
    given = attributes(node)
    alpha, beta = given.get("alpha", 1.0), given.get("beta", 1.0)
    if alpha != 1.0:
        return f"alpha is {alpha:g}, and the xpuruntime operator has no factor"
    bias = node.input[2] if len(node.input) > 2 else ""
    if not bias:
        return ""
    if beta != 1.0:
        return f"beta is {beta:g}, and the xpuruntime operator has no factor"
    if not is_bias(scope, bias, b[-2] if given.get("transB", 0) else b[-1]):
        return f"its bias {bias!r} is no constant vector with one number for each column"
    return ""


def _batches_fit(a: Shape, b: Shape) -> bool:
    """Whether the batches are alike, or one of the two is a single matrix."""
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
    """Return what describes the product with or without bias and activation."""

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
