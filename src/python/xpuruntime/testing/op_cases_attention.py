# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cases of attention and normalization."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from xpuruntime.testing import op_references
from xpuruntime.testing.op_arrays import DTYPES, Draw, OpCall, OpCase, dropout_factors

_SEED, _OFFSET = 1234567890123, 77

#: What -> (batch, heads, kv_heads, q_length, kv_length, head_dim) and the rest. `view`: [batch, length, heads,
#: head_dim] in memory.
_CASES: dict[str, dict[str, Any]] = {
    "one": {"sizes": (1, 1, 1, 1, 1, 64)},
    "ordinary": {"sizes": (2, 3, 3, 128, 128, 64)},
    "odd-lengths": {"sizes": (2, 2, 2, 67, 131, 64)},
    "head-dim-32": {"sizes": (1, 2, 2, 40, 72, 32)},
    "head-dim-80": {"sizes": (1, 2, 2, 40, 72, 80)},
    "head-dim-96": {"sizes": (1, 2, 2, 40, 72, 96)},
    "head-dim-128": {"sizes": (1, 2, 2, 129, 65, 128)},
    "head-dim-256": {"sizes": (1, 2, 2, 33, 70, 256)},
    "head-dim-40": {"sizes": (1, 2, 2, 33, 70, 40)},
    "head-dim-13": {"sizes": (1, 2, 2, 9, 11, 13)},
    "one-query": {"sizes": (2, 4, 4, 1, 300, 64)},
    "one-key": {"sizes": (1, 2, 2, 33, 1, 64)},
    "causal": {"sizes": (1, 2, 2, 130, 130, 64), "causal": True},
    "causal-more-keys": {"sizes": (1, 2, 2, 33, 100, 64), "causal": "top_left"},
    "causal-bottom-right": {"sizes": (1, 2, 2, 33, 100, 64), "causal": "bottom_right"},
    "causal-bottom-right-more-queries": {"sizes": (1, 2, 2, 100, 33, 64), "causal": "bottom_right"},
    "decoding": {"sizes": (2, 8, 2, 1, 257, 128), "causal": "bottom_right"},
    "grouped": {"sizes": (2, 8, 2, 50, 70, 64)},
    "grouped-causal": {"sizes": (1, 6, 2, 70, 70, 128), "causal": True},
    "one-kv-head": {"sizes": (1, 4, 1, 50, 70, 64)},
    "bool-mask": {"sizes": (2, 2, 2, 40, 72, 64), "mask": "bool"},
    "bool-mask-keys": {"sizes": (2, 2, 2, 40, 72, 64), "mask": "bool", "mask_shape": (2, 1, 1, 72)},
    "bool-mask-two-dimensions": {"sizes": (2, 2, 2, 40, 72, 64), "mask": "bool", "mask_shape": (40, 72)},
    "bool-mask-each-head": {"sizes": (2, 3, 3, 40, 72, 64), "mask": "bool", "mask_shape": (2, 3, 40, 72)},
    "added-mask": {"sizes": (2, 2, 2, 40, 72, 64), "mask": "same"},
    "added-mask-float32": {"sizes": (2, 2, 2, 40, 72, 64), "mask": "float32"},
    "added-mask-odd": {"sizes": (1, 2, 2, 33, 71, 64), "mask": "same"},
    "mask-and-causal": {"sizes": (1, 2, 2, 40, 40, 64), "mask": "bool", "causal": True},
    "grouped-mask": {"sizes": (1, 4, 2, 40, 72, 64), "mask": "bool"},
    "scale": {"sizes": (1, 2, 2, 40, 72, 64), "scale": 0.3},
    "large-scores": {"sizes": (1, 2, 2, 40, 72, 64), "scale": 3.0},
    "dropout": {"sizes": (2, 2, 2, 70, 90, 64), "dropout": 0.2},
    "dropout-causal-grouped": {"sizes": (1, 4, 2, 70, 70, 64), "dropout": 0.5, "causal": True},
    "view": {"sizes": (2, 3, 3, 50, 70, 64), "view": True},
    "view-grouped-causal": {"sizes": (2, 4, 2, 65, 65, 128), "view": True, "causal": True},
    "rows-apart": {"sizes": (1, 2, 2, 50, 70, 64), "layout": {"pad": 64}},
    "columns-apart": {"sizes": (1, 2, 2, 10, 12, 64), "layout": {"gap": 1}},
    "no-key": {"sizes": (1, 2, 2, 5, 0, 64)},
    "no-query": {"sizes": (1, 2, 2, 0, 5, 64)},
    "no-batch": {"sizes": (0, 2, 2, 4, 5, 64)},
}


def attention_cases() -> Iterator[OpCase]:
    """Yield the cases."""
    for what, spec in _CASES.items():
        for dtype in DTYPES:
            build = functools.partial(_forward, dtype, spec)
            yield OpCase(f"attention/{what}/{dtype}", "attention", "attention", build, "dropout" in spec)
    for what, spec in _CASES.items():
        for dtype in DTYPES:
            build = functools.partial(_backward, dtype, spec)
            name = f"attention_backward/{what}/{dtype}"
            yield OpCase(name, "attention_backward", "attention_backward", build, "dropout" in spec)


def _mask(draw: Draw, spec: dict[str, Any], inputs: dict[str, Any]) -> Any:
    """Return the mask. One query in three sees a third of the keys; where there are several, one sees none."""
    if "mask" not in spec:
        return None
    batch, _, _, rows, columns, _ = spec["sizes"]
    shape = spec.get("mask_shape", (batch, 1, rows, columns))
    seen = draw.random.random(shape) < 0.6
    if shape[-2] > 1:
        seen[..., 2, :] = False
    if spec["mask"] == "bool":
        inputs["mask"] = draw.input(seen, "bool")
        return seen
    dtype = draw.dtype if spec["mask"] == "same" else "float32"
    added = np.where(seen, op_references.round_to(2 * draw.random.standard_normal(shape), dtype), -np.inf)
    inputs["mask"] = draw.input(added, dtype)
    return added


def _common(draw: Draw, spec: dict[str, Any], factors: Any) -> Any:
    batch, heads, kv_heads, rows, columns, dim = spec["sizes"]
    layout = {"order": (0, 2, 1, 3)} if spec.get("view") else spec.get("layout", {})
    q = draw.normal(batch, heads, rows, dim)
    k, v = draw.normal(batch, kv_heads, columns, dim), draw.normal(batch, kv_heads, columns, dim)
    inputs = {name: draw.input(values, **layout) for name, values in (("q", q), ("k", k), ("v", v))}
    mask = _mask(draw, spec, inputs)
    options: dict[str, Any] = {}
    causal = None
    if "causal" in spec:
        options["is_causal"] = spec["causal"]
        causal = "top_left" if spec["causal"] is True else spec["causal"]
    if "scale" in spec:
        options["scale"] = spec["scale"]
    scale = op_references.in_precision_of(draw.dtype, spec.get("scale", 1 / np.sqrt(dim)))
    if "dropout" in spec:
        options["dropout_p"] = spec["dropout"]
        inputs["rng"] = draw.input(np.array([_SEED, _OFFSET], np.int64), "int64")
        if factors is None:
            factors = dropout_factors(spec["dropout"], _SEED, _OFFSET, (batch, heads, rows, columns))
    return inputs, options, (q, k, v, mask, causal, scale, factors, draw.dtype)


def _weights(q: Any, k: Any, v: Any, mask: Any, causal: Any, scale: float, factors: Any, dtype: str) -> Any:
    if factors is None:
        return None
    units = np.broadcast_to(np.eye(k.shape[2]), (*v.shape[:3], v.shape[2]))
    return op_references.attention(q, k, units, mask, causal, scale, None, dtype)[0]


def _forward(dtype: str, spec: dict[str, Any], random: np.random.Generator, factors: Any = None) -> OpCall:
    inputs, options, numbers = _common(Draw(random, dtype), spec, factors)
    options["return_lse"] = True
    order = (0, 2, 1, 3) if spec.get("view") else None
    return OpCall(inputs, options, op_references.attention(*numbers), {"out": 0}, order, _weights(*numbers))


def _backward(dtype: str, spec: dict[str, Any], random: np.random.Generator, factors: Any = None) -> OpCall:
    draw = Draw(random, dtype)
    inputs, options, numbers = _common(draw, spec, factors)
    out, lse = op_references.attention(*numbers)
    grad = draw.normal(*out.values.shape)
    layout = {"order": (0, 2, 1, 3)} if spec.get("view") else spec.get("layout", {})
    inputs = {
        "grad_out": draw.input(grad, **layout),
        **inputs,
        "out": draw.input(op_references.round_to(out.values, dtype), **layout),
        "lse": draw.input(op_references.round_to(lse.values, "float32"), "float32"),
    }
    expected = op_references.attention_backward(grad, *numbers)
    outputs = {"grad_q": 0, "grad_k": 1, "grad_v": 2}
    return OpCall(inputs, options, expected, outputs, weights=_weights(*numbers))


_SUM = {"residual": True, "stats": True}

#: What -> shape and the rest.
_FORWARD: dict[str, dict[str, Any]] = {
    "one-column": {"shape": (5, 1)},
    "two-columns": {"shape": (5, 2)},
    "odd": {"shape": (7, 63)},
    "one-row": {"shape": (1, 257)},
    "vector": {"shape": (96,), "stats": True},
    "three-dimensions": {"shape": (2, 3, 128), "stats": True},
    "wide": {"shape": (3, 4099)},
    "very-wide": {"shape": (2, 20000)},
    "many-rows": {"shape": (1031, 24)},
    "ordinary": {"shape": (33, 1024), "stats": True},
    "no-rows": {"shape": (0, 64)},
    "residual": {"shape": (9, 768), **_SUM},
    "residual-odd": {"shape": (9, 133), **_SUM},
    "no-weight": {"shape": (6, 80), "weight": None},
    "no-weight-residual": {"shape": (6, 80), "weight": None, **_SUM},
    "weight-float32": {"shape": (6, 96), "weight": "float32", "stats": True},
    "rows-apart": {"shape": (6, 96), "x": {"pad": 32}},
    "rows-apart-odd": {"shape": (6, 96), "x": {"pad": 3}},
    "columns-apart": {"shape": (6, 96), "x": {"gap": 1}},
    "transposed": {"shape": (6, 96), "x": {"order": (1, 0)}},
    "backwards": {"shape": (6, 96), "x": {"reverse": True}},
    "repeated-row": {"shape": (6, 96), "x": {"repeat": True}},
    "large-eps": {"shape": (6, 96), "eps": 0.5},
    "all-equal": {"shape": (4, 96), "scale": 0.0, "offset": 3.0},
    "tiny-values": {"shape": (4, 96), "scale": 2.0**-20, "eps": 0.0},
    "huge-values": {"shape": (4, 96), "scale": 1000.0},
    "far-from-zero": {"shape": (4, 1000), "offset": 50.0, "stats": True},
}

_BACKWARD: dict[str, dict[str, Any]] = {
    "one-column": {"shape": (5, 1)},
    "odd": {"shape": (7, 63)},
    "one-row": {"shape": (1, 257)},
    "three-dimensions": {"shape": (2, 3, 128)},
    "wide": {"shape": (3, 4099)},
    "many-rows": {"shape": (1031, 24)},
    "ordinary": {"shape": (33, 1024)},
    "no-rows": {"shape": (0, 64)},
    "grad-sum": {"shape": (9, 768), "grad_sum": True},
    "grad-sum-odd": {"shape": (9, 133), "grad_sum": True},
    "no-weight": {"shape": (6, 80), "weight": None},
    "weight-float32": {"shape": (6, 96), "weight": "float32"},
    "rows-apart": {"shape": (6, 96), "x": {"pad": 32}},
    "columns-apart": {"shape": (6, 96), "x": {"gap": 1}},
    "transposed": {"shape": (6, 96), "x": {"order": (1, 0)}},
}


def norm_cases() -> Iterator[OpCase]:
    """Yield the cases."""
    for rms in (False, True):
        op = "rms_norm" if rms else "layer_norm"
        for what, spec in _FORWARD.items():
            for dtype in DTYPES:
                yield OpCase(f"{op}/{what}/{dtype}", op, op, functools.partial(_norm_forward, rms, dtype, spec))
        op += "_backward"
        for what, spec in _BACKWARD.items():
            for dtype in DTYPES:
                yield OpCase(f"{op}/{what}/{dtype}", op, op, functools.partial(_norm_backward, rms, dtype, spec))


def _norm_forward(rms: bool, dtype: str, spec: dict[str, Any], random: np.random.Generator) -> OpCall:
    draw = Draw(random, dtype)
    shape = spec["shape"]
    x = draw.normal(*shape, scale=spec.get("scale", 1.0), offset=spec.get("offset", 0.0))
    if spec.get("x", {}).get("repeat"):
        x = np.broadcast_to(x[:1], x.shape)
    inputs = {"x": draw.input(x, **spec.get("x", {}))}
    weight_dtype = spec.get("weight", dtype)
    weight = bias = residual = None
    if weight_dtype is not None:
        weight = draw.normal(shape[-1], dtype=weight_dtype)
        inputs["weight"] = draw.input(weight, weight_dtype)
        if not rms:
            bias = draw.normal(shape[-1], dtype=weight_dtype)
            inputs["bias"] = draw.input(bias, weight_dtype)
    options: dict[str, Any] = {"eps": spec.get("eps", 1e-5), "return_stats": spec.get("stats", False)}
    outputs = {"out": 0}
    if spec.get("residual"):
        residual = draw.normal(*shape)
        inputs["residual"] = draw.input(residual)
        options["return_sum"] = True
        outputs["sum_out"] = 1
    expected = op_references.norm(x, weight, bias, residual, options["eps"], rms, dtype)
    if not options["return_stats"]:
        expected = [result for result in expected if result.name in ("out", "sum")]
    return OpCall(inputs, options, expected, outputs)


def _norm_backward(rms: bool, dtype: str, spec: dict[str, Any], random: np.random.Generator) -> OpCall:
    draw = Draw(random, dtype)
    shape = spec["shape"]
    x, grad = draw.normal(*shape), draw.normal(*shape)
    stats = {result.name: result.values for result in op_references.norm(x, None, None, None, 1e-5, rms, dtype)}
    stats_dtype = op_references.stats_dtype(dtype)
    mean = None if rms else op_references.round_to(stats["mean"], stats_dtype)
    rstd = op_references.round_to(stats["rstd"], stats_dtype)
    inputs = {"grad_out": draw.input(grad), "x": draw.input(x, **spec.get("x", {}))}
    if mean is not None:
        inputs["mean"] = draw.input(mean, stats_dtype)
    inputs["rstd"] = draw.input(rstd, stats_dtype)
    weight_dtype = spec.get("weight", dtype)
    weight = grad_sum = None
    if weight_dtype is not None:
        weight = draw.normal(shape[-1], dtype=weight_dtype)
        inputs["weight"] = draw.input(weight, weight_dtype)
    if spec.get("grad_sum"):
        grad_sum = draw.normal(*shape)
        inputs["grad_sum"] = draw.input(grad_sum)
    has_bias = not rms and weight is not None
    expected = op_references.norm_backward(
        grad, x, mean, rstd, weight, grad_sum, has_bias, dtype, weight_dtype or dtype
    )
    return OpCall(inputs, {"has_bias": True} if has_bias else {}, expected, {"grad_x": 0})
