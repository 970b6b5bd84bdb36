# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cases of convolutions, their gradients, and products."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from xpuruntime.testing import op_references
from xpuruntime.testing.op_arrays import DTYPES, Draw, OpCall, OpCase

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


def conv_cases() -> Iterator[OpCase]:
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
    expected = op_references.conv2d(x, weight, bias, *_window(spec), spec.get("activation"), dtype)
    return OpCall(inputs, options, expected, {"out": 0}, order)


#: What -> shapes of x and the weight, and the rest. `last`: channels last in memory, all three. `layout`: of grad_out.
_GRADIENTS: dict[str, dict[str, Any]] = {
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


def conv_gradient_cases() -> Iterator[OpCase]:
    """Yield the cases."""
    for what, spec in _GRADIENTS.items():
        for dtype in DTYPES:
            yield OpCase(
                f"conv_input_gradient/{what}/{dtype}", "conv_input_gradient", "conv2d_input_gradient",
                functools.partial(_build_input, dtype, spec),
            )  # fmt: skip
            yield OpCase(
                f"conv_weight_gradient/{what}/{dtype}", "conv_weight_gradient", "conv2d_weight_gradient",
                functools.partial(_build_weight, dtype, spec),
            )  # fmt: skip


def _window(spec: dict[str, Any]) -> op_references.Window:
    padding = spec.get("padding", 0)
    pads = padding if isinstance(padding, tuple) and len(padding) == 4 else _pair(padding) * 2
    return op_references.Window(
        _pair(spec.get("stride", 1)), pads, _pair(spec.get("dilation", 1)), spec.get("groups", 1)
    )


def _out_shape(spec: dict[str, Any], window: op_references.Window) -> tuple[int, ...]:
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
    expected = op_references.input_gradient(grad_out, weight, size, window, dtype)
    return OpCall(inputs, {"input_size": size, **_options(spec)}, expected, {"grad_x": 0}, order)


def _build_weight(dtype: str, spec: dict[str, Any], random: np.random.Generator) -> OpCall:
    draw, window = Draw(random, dtype), _window(spec)
    grad_out, x = draw.normal(*_out_shape(spec, window)), draw.normal(*spec["x"])
    order, size = _LAST if spec.get("last") else None, spec["weight"][2:]
    inputs = {
        "grad_out": draw.input(grad_out, order=order, **spec.get("layout", {})),
        "x": draw.input(x, order=order),
    }
    expected = op_references.weight_gradient(grad_out, x, size, window, dtype)
    return OpCall(inputs, {"kernel_size": size, **_options(spec)}, expected, {"grad_weight": 0}, order)


def _options(spec: dict[str, Any]) -> dict[str, Any]:
    return {key: spec[key] for key in ("stride", "padding", "dilation", "groups") if key in spec}


_TURNED = (1, 0)

#: What -> m, n, k and the rest: layouts of a, b and out, bias, activation, batches.
_MATMULS: dict[str, dict[str, Any]] = {
    "one": {"m": 1, "n": 1, "k": 1},
    "one-row": {"m": 1, "n": 33, "k": 65},
    "one-column": {"m": 33, "n": 1, "k": 65},
    "k-one": {"m": 17, "n": 19, "k": 1},
    "k-zero": {"m": 5, "n": 6, "k": 0},
    "k-zero-bias": {"m": 5, "n": 6, "k": 0, "bias": True, "activation": "relu"},
    "m-zero": {"m": 0, "n": 6, "k": 4},
    "n-zero": {"m": 5, "n": 0, "k": 4},
    "odd": {"m": 7, "n": 13, "k": 29},
    "primes": {"m": 127, "n": 61, "k": 251},
    "one-more-than-a-tile": {"m": 129, "n": 65, "k": 257},
    "aligned": {"m": 64, "n": 128, "k": 256},
    "long-k": {"m": 3, "n": 5, "k": 4099},
    "skinny-1": {"m": 1, "n": 256, "k": 512},
    "skinny-16": {"m": 16, "n": 192, "k": 320},
    "skinny-64": {"m": 64, "n": 128, "k": 1024},
    "skinny-odd": {"m": 5, "n": 257, "k": 1001},
    "a-transposed": {"m": 48, "n": 40, "k": 56, "a": {"order": _TURNED}},
    "b-transposed": {"m": 48, "n": 40, "k": 56, "b": {"order": _TURNED}},
    "both-transposed": {"m": 33, "n": 17, "k": 21, "a": {"order": _TURNED}, "b": {"order": _TURNED}},
    "out-transposed": {"m": 48, "n": 40, "k": 56, "order": _TURNED},
    "rows-apart": {"m": 24, "n": 40, "k": 16, "a": {"pad": 8}, "b": {"pad": 16}},
    "rows-apart-odd": {"m": 9, "n": 10, "k": 11, "a": {"pad": 3}, "b": {"pad": 1}},
    "columns-apart": {"m": 9, "n": 10, "k": 11, "a": {"gap": 1}},
    "backwards": {"m": 9, "n": 10, "k": 11, "a": {"reverse": True}},
    "repeated-row": {"m": 9, "n": 16, "k": 24, "a": {"repeat": True}},
    "batch": {"m": 9, "n": 16, "k": 24, "batch_a": (3,), "batch_b": (3,)},
    "batch-odd-transposed": {
        "m": 9, "n": 13, "k": 7, "batch_a": (3,), "batch_b": (3,), "b": {"order": (0, 2, 1)},
    },
    "batch-of-a": {"m": 8, "n": 16, "k": 24, "batch_a": (3,)},
    "batch-of-b": {"m": 8, "n": 16, "k": 24, "batch_b": (3,)},
    "batch-one": {"m": 8, "n": 16, "k": 24, "batch_a": (1,), "batch_b": (4,)},
    "batch-two-dimensions": {"m": 8, "n": 16, "k": 24, "batch_a": (2, 3), "batch_b": (2, 3)},
    "batch-inside": {"m": 8, "n": 16, "k": 24, "batch_a": (3,), "batch_b": (3,), "a": {"order": (1, 0, 2)}},
    "batch-zero": {"m": 8, "n": 16, "k": 24, "batch_a": (0,), "batch_b": (0,)},
    "bias": {"m": 20, "n": 40, "k": 32, "bias": True},
    "bias-odd": {"m": 7, "n": 13, "k": 29, "bias": True},
    "bias-batch": {"m": 8, "n": 16, "k": 24, "batch_a": (3,), "batch_b": (3,), "bias": True},
    "relu": {"m": 20, "n": 40, "k": 32, "activation": "relu"},
    "gelu": {"m": 20, "n": 40, "k": 32, "activation": "gelu"},
    "gelu-tanh": {"m": 20, "n": 40, "k": 32, "activation": "gelu_tanh"},
    "silu": {"m": 20, "n": 40, "k": 32, "activation": "silu"},
    "bias-relu": {"m": 20, "n": 40, "k": 32, "bias": True, "activation": "relu"},
    "bias-gelu": {"m": 20, "n": 40, "k": 32, "bias": True, "activation": "gelu"},
    "bias-gelu-tanh": {"m": 21, "n": 48, "k": 32, "bias": True, "activation": "gelu_tanh"},
    "bias-silu-odd": {"m": 21, "n": 39, "k": 31, "bias": True, "activation": "silu"},
    "gelu-far-out": {"m": 16, "n": 16, "k": 64, "scale": 40.0, "activation": "gelu"},
    "tiny-values": {"m": 16, "n": 32, "k": 48, "scale": 2.0**-6},
    "huge-values": {"m": 16, "n": 32, "k": 48, "scale": 100.0},
    "nan-stays-in-its-row": {"m": 16, "n": 32, "k": 48, "nan": True},
}  # fmt: skip


def matmul_cases() -> Iterator[OpCase]:
    """Yield the cases."""
    for what, spec in _MATMULS.items():
        for dtype in DTYPES:
            yield _case(what, dtype, spec)
    for what in ("aligned", "odd", "bias-gelu-tanh"):
        for dtype in ("float16", "bfloat16"):
            yield _case(f"{what}-to-float32", dtype, {**_MATMULS[what], "out_dtype": "float32"})
    fp8 = {"m": 32, "n": 48, "k": 64, "b": {"order": _TURNED}}
    for out_dtype in ("bfloat16", "float16", "float32"):
        yield _case(f"fp8-to-{out_dtype}", "float8_e4m3fn", {**fp8, "out_dtype": out_dtype})
    yield _case("fp8-scaled", "float8_e4m3fn", {**fp8, "scales": True})
    yield _case("fp8-odd", "float8_e4m3fn", {"m": 7, "n": 13, "k": 29, "scales": True})


def _case(what: str, dtype: str, spec: dict[str, Any]) -> OpCase:
    return OpCase(f"matmul/{what}/{dtype}", "matmul", "matmul", functools.partial(_build_matmul, dtype, spec))


def _build_matmul(dtype: str, spec: dict[str, Any], random: np.random.Generator) -> OpCall:
    draw = Draw(random, dtype)
    m, n, k, scale = spec["m"], spec["n"], spec["k"], spec.get("scale", 1.0)
    a = draw.normal(*spec.get("batch_a", ()), m, k, scale=scale)
    b = draw.normal(*spec.get("batch_b", ()), k, n, scale=scale)
    if spec.get("a", {}).get("repeat"):
        a = np.broadcast_to(a[:1], a.shape)
    if spec.get("nan"):
        a[3, 5] = np.nan
    fp8 = dtype.startswith("float8")
    out_dtype = spec.get("out_dtype", "bfloat16" if fp8 else dtype)
    inputs = {"a": draw.input(a, **spec.get("a", {})), "b": draw.input(b, **spec.get("b", {}))}
    bias = draw.normal(n) if spec.get("bias") else None
    if bias is not None:
        inputs["bias"] = draw.input(bias)
    factor = 1.0
    if spec.get("scales"):
        inputs["scale_a"] = draw.input(np.array([0.375]), "float32")
        inputs["scale_b"] = draw.input(np.array([3.0]), "float32")
        factor = 1.125
    options = {"activation": spec["activation"]} if "activation" in spec else {}
    if out_dtype != ("bfloat16" if fp8 else dtype):
        options["out_dtype"] = out_dtype
    expected = op_references.matmul(a, b, bias, spec.get("activation"), dtype, out_dtype, factor)
    return OpCall(inputs, options, expected, {"out": 0}, spec.get("order"))
