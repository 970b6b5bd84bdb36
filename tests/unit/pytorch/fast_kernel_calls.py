# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls of the operators that fast kernels serve, and their expected results."""

from __future__ import annotations

import torch

F = torch.nn.functional
OPS = ("layer_norm", "rms_norm", "attention")
#: Of which no call here is.
ELSEWHERE = [{"match": {"op": op, "dtype": "fp8"}, "use": "cpu.reference"} for op in OPS]
#: Operators and dispatch keys of which the addon has kernels on the CPU, beside products.
BY_ADDON = (
    ("native_layer_norm", "CPU"),
    ("native_layer_norm_backward", "CPU"),
    ("_fused_rms_norm", "CPU"),
    ("scaled_dot_product_attention", "CompositeImplicitAutograd"),
)
FORMS = (
    "layer_norm", "layer_norm without columns", "layer_norm of two", "layer_norm_backward", "rms_norm",
    "rms_norm with eps", "sdpa", "sdpa masked", "sdpa causal", "sdpa grouped",
)  # fmt: skip


def call(form, dtype=torch.float32):
    torch.manual_seed(0)
    packet, _, how = form.partition(" ")
    if packet == "sdpa":
        q, k, v = (torch.randn(2, 4, 5, 8).to(dtype) for _ in range(3))
        more = {
            "masked": {"attn_mask": torch.randn(5, 5).to(dtype)},
            "causal": {"is_causal": True, "scale": 0.5},
            "grouped": {"enable_gqa": True},
        }.get(how, {})
        if how == "grouped":
            k, v = k[:, :2], v[:, :2]
        return lambda: F.scaled_dot_product_attention(q, k, v, **more)
    x = torch.randn(2, 3, 8).to(dtype)
    sizes = (3, 8) if how == "of two" else (8,)
    weight, bias = torch.randn(sizes).to(dtype), torch.randn(sizes).to(dtype)
    if packet == "rms_norm":
        return lambda: torch.ops.aten._fused_rms_norm(x, sizes, weight, 0.5 if how else None)
    if packet == "layer_norm_backward":
        _, mean, rstd = torch.native_layer_norm(x, sizes, weight, bias, 1e-5)
        grad = torch.randn_like(x)
        backward = torch.ops.aten.native_layer_norm_backward
        return lambda: backward(grad, x, sizes, mean, rstd, weight, bias, [True, False, True])
    columns = (None, None) if how == "without columns" else (weight, bias)
    return lambda: torch.native_layer_norm(x, sizes, *columns, 1e-5)


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        found, expected = [found], [expected]
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
            continue
        assert torch.equal(one, other)
        assert (one.dtype, one.stride(), one.device) == (other.dtype, other.stride(), other.device)
