# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The kernels of a decode step as formulas of PyTorch, in the place of Triton's on a CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812


def _normed(x: Any, weight: Any, eps: float) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def ways(rows: int, like: Any) -> tuple[str, ...]:
    return ("a formula",)


class Scaled(NamedTuple):
    rows: torch.Tensor
    squares: torch.Tensor


def product(  # type: ignore[no-untyped-def]
    x, weight, out, *, norm=None, bias=None, residual=None, gated=False, way="", arrived=None, scaled=None, scales=None
) -> Scaled | None:
    if scaled is not None:
        mean = scaled.squares.sum(0)[: len(x), None] / x.shape[1]
        x = (scaled.rows * torch.rsqrt(mean + norm[1])).to(x.dtype)
    elif norm is not None:
        x = _normed(x, *norm)
    made = F.linear(x, weight, bias)
    if gated:
        gate, up = made.chunk(2, -1)
        made = F.silu(gate) * up
    out.copy_(made if residual is None else residual + made)
    return None if scales is None else Scaled(out * scales, out.float().pow(2).sum(1)[None])


def attend(qkv, keys, values, turns, mask, length, position, out, arrived, *, scale, norms, extent) -> None:  # type: ignore[no-untyped-def]
    rows, kv_heads, _, size = keys.shape
    q, k, v = qkv.view(rows, -1, 1, size).split([qkv.shape[1] // size - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = _normed(q, norms[0], norms[2]), _normed(k, norms[1], norms[2])
    cos, sin = (table[position][:, None] for table in turns)

    def turned(x: Any) -> Any:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    slot = length - 1
    keys.index_copy_(2, slot, turned(k))
    values.index_copy_(2, slot, v)
    seen = (mask[:, :extent] != 0) & (torch.arange(extent) <= slot)
    made = F.scaled_dot_product_attention(
        turned(q), keys[:, :, :extent], values[:, :, :extent], seen[:, None, None], scale=scale, enable_gqa=True
    )
    out.copy_(made.reshape(rows, -1))
