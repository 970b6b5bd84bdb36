# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cases of matmul."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.testing import op_references
from xpuruntime.testing.op_case import DTYPES, Draw, OpCall, OpCase

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cases"]

_TURNED = (1, 0)

#: What -> m, n, k and the rest: layouts of a, b and out, bias, activation, batches.
_CASES: dict[str, dict[str, Any]] = {
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


def cases() -> Iterator[OpCase]:
    """Yield the cases."""
    for what, spec in _CASES.items():
        for dtype in DTYPES:
            yield _case(what, dtype, spec)
    for what in ("aligned", "odd", "bias-gelu-tanh"):
        for dtype in ("float16", "bfloat16"):
            yield _case(f"{what}-to-float32", dtype, {**_CASES[what], "out_dtype": "float32"})
    fp8 = {"m": 32, "n": 48, "k": 64, "b": {"order": _TURNED}}
    for out_dtype in ("bfloat16", "float16", "float32"):
        yield _case(f"fp8-to-{out_dtype}", "float8_e4m3fn", {**fp8, "out_dtype": out_dtype})
    yield _case("fp8-scaled", "float8_e4m3fn", {**fp8, "scales": True})
    yield _case("fp8-odd", "float8_e4m3fn", {"m": 7, "n": 13, "k": 29, "scales": True})


def _case(what: str, dtype: str, spec: dict[str, Any]) -> OpCase:
    return OpCase(f"matmul/{what}/{dtype}", "matmul", "matmul", functools.partial(_build, dtype, spec))


def _build(dtype: str, spec: dict[str, Any], random: np.random.Generator) -> OpCall:
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
