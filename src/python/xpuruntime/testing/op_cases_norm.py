# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cases of layer norm, RMS norm and their gradients."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.testing import op_references
from xpuruntime.testing.op_case import DTYPES, Draw, OpCall, OpCase

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cases"]

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


def cases() -> Iterator[OpCase]:
    """Yield the cases."""
    for rms in (False, True):
        op = "rms_norm" if rms else "layer_norm"
        for what, spec in _FORWARD.items():
            for dtype in DTYPES:
                yield OpCase(f"{op}/{what}/{dtype}", op, op, functools.partial(_forward, rms, dtype, spec))
        op += "_backward"
        for what, spec in _BACKWARD.items():
            for dtype in DTYPES:
                yield OpCase(f"{op}/{what}/{dtype}", op, op, functools.partial(_backward, rms, dtype, spec))


def _forward(rms: bool, dtype: str, spec: dict[str, Any], random: np.random.Generator) -> OpCall:
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
        expected = [one for one in expected if one.name in ("out", "sum")]
    return OpCall(inputs, options, expected, outputs)


def _backward(rms: bool, dtype: str, spec: dict[str, Any], random: np.random.Generator) -> OpCall:
    draw = Draw(random, dtype)
    shape = spec["shape"]
    x, grad = draw.normal(*shape), draw.normal(*shape)
    stats = {one.name: one.values for one in op_references.norm(x, None, None, None, 1e-5, rms, dtype)}
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
