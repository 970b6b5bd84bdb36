# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cases of convolution."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from xpuruntime.testing import op_references
from xpuruntime.testing.op_case import DTYPES, Draw, OpCall, OpCase

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

__all__ = ["cases"]

_LAST = (0, 2, 3, 1)

#: What -> shapes of x and the weight, and the rest. `last`: channels last in memory, x, weight and result.
_CASES: dict[str, dict[str, Any]] = {
    "3x3": {"x": (2, 16, 14, 14), "weight": (32, 16, 3, 3), "padding": 1},
    "3x3-odd": {"x": (2, 3, 9, 11), "weight": (5, 3, 3, 3), "padding": 1},
    "1x1": {"x": (2, 32, 7, 9), "weight": (24, 32, 1, 1)},
    "1x1-stride": {"x": (1, 8, 9, 9), "weight": (16, 8, 1, 1), "stride": 2},
    "7x7-stride": {"x": (1, 3, 33, 33), "weight": (16, 3, 7, 7), "stride": 2, "padding": 3},
    "even-kernel": {"x": (1, 4, 8, 9), "weight": (6, 4, 2, 4)},
    "long-kernel": {"x": (1, 4, 16, 6), "weight": (8, 4, 5, 1), "padding": (2, 0)},
    "whole-image": {"x": (2, 8, 5, 6), "weight": (4, 8, 5, 6)},
    "one-pixel": {"x": (3, 8, 1, 1), "weight": (4, 8, 1, 1)},
    "uneven-stride": {"x": (1, 4, 11, 13), "weight": (8, 4, 3, 3), "stride": (2, 3), "padding": 1},
    "uneven-padding": {"x": (1, 4, 9, 10), "weight": (8, 4, 3, 3), "padding": (1, 0, 2, 3)},
    "wide-padding": {"x": (1, 2, 3, 3), "weight": (4, 2, 3, 3), "padding": 5},
    "dilation": {"x": (1, 8, 15, 16), "weight": (8, 8, 3, 3), "dilation": (2, 3), "padding": 2},
    "groups": {"x": (1, 16, 10, 10), "weight": (32, 4, 3, 3), "groups": 4, "padding": 1},
    "depthwise": {"x": (2, 16, 10, 10), "weight": (16, 1, 3, 3), "groups": 16, "padding": 1},
    "bias": {"x": (2, 8, 10, 10), "weight": (16, 8, 3, 3), "bias": True, "padding": 1},
    "bias-relu": {"x": (2, 8, 10, 10), "weight": (16, 8, 3, 3), "bias": True, "activation": "relu", "padding": 1},
    "relu": {"x": (2, 8, 10, 10), "weight": (16, 8, 3, 3), "activation": "relu", "padding": 1},
    "bias-silu": {"x": (1, 8, 6, 6), "weight": (8, 8, 3, 3), "bias": True, "activation": "silu"},
    "bias-gelu": {"x": (1, 8, 6, 6), "weight": (8, 8, 3, 3), "bias": True, "activation": "gelu"},
    "channels-last": {"x": (2, 16, 14, 14), "weight": (32, 16, 3, 3), "padding": 1, "last": True},
    "channels-last-1x1": {"x": (2, 32, 7, 9), "weight": (24, 32, 1, 1), "last": True},
    "channels-last-bias-relu": {
        "x": (1, 16, 8, 8), "weight": (16, 16, 3, 3), "bias": True, "activation": "relu", "stride": 2, "last": True,
    },
    "channels-last-relu": {
        "x": (2, 16, 8, 8), "weight": (32, 16, 3, 3), "activation": "relu", "padding": 1, "last": True,
    },
    "channels-last-bias-silu": {
        "x": (2, 16, 8, 8), "weight": (32, 16, 3, 3), "bias": True, "activation": "silu", "padding": 1, "last": True,
    },
    "channels-last-bias-gelu": {
        "x": (2, 16, 8, 8), "weight": (32, 16, 3, 3), "bias": True, "activation": "gelu", "padding": 1, "last": True,
    },
    "channels-last-odd": {"x": (1, 3, 8, 9), "weight": (5, 3, 3, 3), "padding": 1, "last": True},
    "rows-apart": {"x": (1, 8, 9, 10), "weight": (8, 8, 3, 3), "padding": 1, "layout": {"pad": 6}},
    "columns-apart": {"x": (1, 8, 9, 10), "weight": (8, 8, 3, 3), "padding": 1, "layout": {"gap": 1}},
    "no-image": {"x": (0, 8, 9, 10), "weight": (8, 8, 3, 3), "padding": 1},
}  # fmt: skip


def cases() -> Iterator[OpCase]:
    """Yield the cases."""
    for what, spec in _CASES.items():
        for dtype in DTYPES:
            yield OpCase(f"conv/{what}/{dtype}", "conv", "conv2d", functools.partial(_build, dtype, spec))


def _pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _build(dtype: str, spec: dict[str, Any], random: np.random.Generator) -> OpCall:
    draw = Draw(random, dtype)
    x, weight = draw.normal(*spec["x"]), draw.normal(*spec["weight"])
    order = _LAST if spec.get("last") else None
    inputs = {
        "x": draw.input(x, order=order, **spec.get("layout", {})),
        "weight": draw.input(weight, order=order),
    }
    bias = draw.normal(spec["weight"][0]) if spec.get("bias") else None
    if bias is not None:
        inputs["bias"] = draw.input(bias)
    options: dict[str, Any] = {
        key: spec[key] for key in ("stride", "padding", "dilation", "groups", "activation") if key in spec
    }
    padding = spec.get("padding", 0)
    pads = padding if isinstance(padding, tuple) and len(padding) == 4 else _pair(padding) * 2
    expected = op_references.conv2d(
        x, weight, bias, _pair(spec.get("stride", 1)), pads, _pair(spec.get("dilation", 1)), spec.get("groups", 1),
        spec.get("activation"), dtype,
    )  # fmt: skip
    return OpCall(inputs, options, expected, {"out": 0}, order)
