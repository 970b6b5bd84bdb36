# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cases of the gradients of a convolution."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from xpuruntime.testing import op_references_conv as references
from xpuruntime.testing.op_case import DTYPES, Draw, OpCall, OpCase

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

__all__ = ["cases"]

_LAST = (0, 2, 3, 1)

#: What -> shapes of x and the weight, and the rest. `last`: channels last in memory, all three. `layout`: of grad_out.
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
    "never-reached": {"x": (1, 4, 10, 14), "weight": (8, 4, 2, 3), "stride": (3, 4)},
    "uneven-padding": {"x": (1, 4, 9, 10), "weight": (8, 4, 3, 3), "padding": (1, 0, 2, 3)},
    "wide-padding": {"x": (1, 2, 3, 3), "weight": (4, 2, 3, 3), "padding": 5},
    "dilation": {"x": (1, 8, 15, 16), "weight": (8, 8, 3, 3), "dilation": (2, 3), "padding": 2},
    "groups": {"x": (1, 16, 10, 10), "weight": (32, 4, 3, 3), "groups": 4, "padding": 1},
    "depthwise": {"x": (2, 16, 10, 10), "weight": (16, 1, 3, 3), "groups": 16, "padding": 1},
    "large": {"x": (4, 24, 40, 40), "weight": (16, 24, 3, 3), "padding": 1},
    "channels-last": {"x": (2, 16, 14, 14), "weight": (32, 16, 3, 3), "padding": 1, "last": True},
    "channels-last-1x1": {"x": (2, 32, 7, 9), "weight": (24, 32, 1, 1), "last": True},
    "channels-last-stride": {"x": (1, 16, 8, 8), "weight": (16, 16, 3, 3), "stride": 2, "padding": 1, "last": True},
    "channels-last-odd": {"x": (1, 3, 8, 9), "weight": (5, 3, 3, 3), "padding": 1, "last": True},
    "rows-apart": {"x": (1, 8, 9, 10), "weight": (8, 8, 3, 3), "padding": 1, "layout": {"pad": 6}},
    "columns-apart": {"x": (1, 8, 9, 10), "weight": (8, 8, 3, 3), "padding": 1, "layout": {"gap": 1}},
    "no-image": {"x": (0, 8, 9, 10), "weight": (8, 8, 3, 3), "padding": 1},
}


def cases() -> Iterator[OpCase]:
    """Yield the cases."""
    for what, spec in _CASES.items():
        for dtype in DTYPES:
            yield OpCase(
                f"conv_input_gradient/{what}/{dtype}", "conv_input_gradient", "conv2d_input_gradient",
                functools.partial(_build_input, dtype, spec),
            )  # fmt: skip
            yield OpCase(
                f"conv_weight_gradient/{what}/{dtype}", "conv_weight_gradient", "conv2d_weight_gradient",
                functools.partial(_build_weight, dtype, spec),
            )  # fmt: skip


def _pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _window(spec: dict[str, Any]) -> references.Window:
    padding = spec.get("padding", 0)
    pads = padding if isinstance(padding, tuple) and len(padding) == 4 else _pair(padding) * 2
    return references.Window(_pair(spec.get("stride", 1)), pads, _pair(spec.get("dilation", 1)), spec.get("groups", 1))


def _out_shape(spec: dict[str, Any], window: references.Window) -> tuple[int, ...]:
    images, outputs = spec["x"][0], spec["weight"][0]
    sizes = (
        (
            spec["x"][2 + i]
            + window.padding[i]
            + window.padding[2 + i]
            - (spec["weight"][2 + i] - 1) * window.dilation[i]
            - 1
        )
        // window.stride[i]
        + 1
        for i in range(2)
    )
    return (images, outputs, *sizes)


def _build_input(dtype: str, spec: dict[str, Any], random: np.random.Generator) -> OpCall:
    draw, window = Draw(random, dtype), _window(spec)
    grad_out, weight = draw.normal(*_out_shape(spec, window)), draw.normal(*spec["weight"])
    order, size = _LAST if spec.get("last") else None, spec["x"][2:]
    inputs = {
        "grad_out": draw.input(grad_out, order=order, **spec.get("layout", {})),
        "weight": draw.input(weight, order=order),
    }
    expected = references.input_gradient(grad_out, weight, size, window, dtype)
    return OpCall(inputs, {"input_size": size, **_options(spec)}, expected, {"grad_x": 0}, order)


def _build_weight(dtype: str, spec: dict[str, Any], random: np.random.Generator) -> OpCall:
    draw, window = Draw(random, dtype), _window(spec)
    grad_out, x = draw.normal(*_out_shape(spec, window)), draw.normal(*spec["x"])
    order, size = _LAST if spec.get("last") else None, spec["weight"][2:]
    inputs = {
        "grad_out": draw.input(grad_out, order=order, **spec.get("layout", {})),
        "x": draw.input(x, order=order),
    }
    expected = references.weight_gradient(grad_out, x, size, window, dtype)
    return OpCall(inputs, {"kernel_size": size, **_options(spec)}, expected, {"grad_weight": 0}, order)


def _options(spec: dict[str, Any]) -> dict[str, Any]:
    return {key: spec[key] for key in ("stride", "padding", "dilation", "groups") if key in spec}
