# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cases of attention and its gradient."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.testing import op_references
from xpuruntime.testing.op_case import DTYPES, Draw, OpCall, OpCase
from xpuruntime.testing.op_philox import dropout_factors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cases"]

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


def cases() -> Iterator[OpCase]:
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
    """Return the weights before dropout, where there is one."""
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
