# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
# ruff: noqa: ANN001, ANN202, N803, N806 - Triton's kernels have no types, and constants as parameters
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of a decode step: a product with all that is around it, and attention of one query.

Each reads the weights that it can before it waits for the kernel in front of it (programmatic dependent launch).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - as PyTorch calls it
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xpuruntime.pytorch.dispatch.context import arch_of
from xpuruntime.pytorch.generation import decode_attention
from xpuruntime.pytorch.generation.decode_attention import launch

rows_product: Any
try:
    from xpuruntime.pytorch.generation.rows_product import rows_product, streamed_product
    from xpuruntime.pytorch.generation.short_attention import attend_short, is_short
except ImportError:  # this Triton has no Gluon, or none with these tensor cores
    rows_product = None

#: Rows of a weight that a program of a product of one row has.
_BLOCK_N = 4
_OWN, _STREAMED, _LIBRARY = "a kernel of its own", "a kernel that loads by TMA", "cuBLAS"


class Scaled(NamedTuple):
    """What a norm begins with: rows times its weight, and sums of their squares, parts by rows up to a power of two."""

    rows: torch.Tensor
    squares: torch.Tensor


@triton.jit
def _row_product(x, norm, weight, bias, residual, out, eps, N: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr,
                 BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_K: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """One row of activations: each weight is read once, straight into registers."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    at = weight + n[:, None].to(tl.int64) * K + k[None, :]
    rows = n[:, None] < N
    PARTS: tl.constexpr = BLOCK_K // 8
    TYPE: tl.constexpr = weight.dtype.element_ty
    # The first weights are on their way while the kernel in front still runs.
    first = tl.load(at, mask=rows & (k[None, :] < K), other=0.0, eviction_policy="evict_first")
    if GATED:
        first_up = tl.load(at + N * K, mask=rows & (k[None, :] < K), other=0.0, eviction_policy="evict_first")
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32) if BIAS else 0.0
    added_up = tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32) if BIAS and GATED else 0.0
    kept = tl.load(residual + n, mask=n < N, other=0.0).to(tl.float32) if RESIDUAL else 0.0
    total = tl.zeros([BLOCK_N, PARTS], tl.float32)
    total_up = tl.zeros([BLOCK_N, PARTS], tl.float32)
    squares = tl.zeros([PARTS], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        here = start + k < K
        if start == 0:
            w = first
        else:
            w = tl.load(at + start, mask=rows & here[None, :], other=0.0, eviction_policy="evict_first")
        value = tl.load(x + start + k, mask=here, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(value * value, [PARTS, 8]), axis=1)
            value *= tl.load(norm + start + k, mask=here, other=0.0).to(tl.float32)
        total += tl.sum(tl.reshape(w.to(tl.float32) * value[None, :], [BLOCK_N, PARTS, 8]), axis=2)
        if GATED:
            if start == 0:
                w = first_up
            else:
                w = tl.load(at + N * K + start, mask=rows & here[None, :], other=0.0, eviction_policy="evict_first")
            total_up += tl.sum(tl.reshape(w.to(tl.float32) * value[None, :], [BLOCK_N, PARTS, 8]), axis=2)
    value = tl.sum(total, axis=1)
    up = tl.sum(total_up, axis=1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        value *= scale
        up *= scale
    # Rounded as the single modules do.
    value = (value + added).to(TYPE).to(tl.float32)
    if GATED:
        up = (up + added_up).to(TYPE).to(tl.float32)
        value = ((value / (1.0 + tl.exp(-value))).to(TYPE).to(tl.float32) * up).to(TYPE).to(tl.float32)
    tl.store(out + n, (kept + value).to(TYPE).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _norm_rows(x, norm, out, squares, eps, K: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
               EARLY: tl.constexpr):  # fmt: skip
    """Norm a row, rounded twice as the modules do, or only scale it, and sum its squares."""
    k = tl.arange(0, BLOCK)
    scale = tl.load(norm + k, mask=k < K, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    offset = tl.program_id(0) * K + k
    value = tl.load(x + offset, mask=k < K, other=0.0).to(tl.float32)
    total = tl.sum(value * value, axis=0)
    if SCALED:
        tl.store(squares + tl.program_id(0), total)
    else:
        value = (value * tl.rsqrt(total / K + eps)).to(scale.dtype).to(tl.float32)
    tl.store(out + offset, (value * scale.to(tl.float32)).to(scale.dtype), mask=k < K)


@triton.jit
def _gate_rows(both, out, N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = both + tl.program_id(0) * (2 * N) + n
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(at, mask=n < N, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + tl.program_id(0) * N + n, active * tl.load(at + N, mask=n < N, other=0.0), mask=n < N)


def ways(rows: int, like: torch.Tensor) -> tuple[str, ...]:
    """Return how products of so many rows can be computed, of tensors of this type and device."""
    tensor_cores = rows_product is not None and like.dtype == torch.bfloat16
    own = (_OWN,) if rows == 1 or tensor_cores else ()
    return (*own, *((_STREAMED,) if tensor_cores and arch_of(like.device) == "sm90" else ()), _LIBRARY)


def attend(
    qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *operands: Any, extent: int, **around: Any
) -> None:
    """Attend as `decode_attention.attend` says, to a short text by the kernel that has it on the chip at once."""
    if rows_product is not None and is_short(keys, extent):
        attend_short(qkv, keys, values, *operands[:-1], extent=extent, **around)
    else:
        decode_attention.attend(qkv, keys, values, *operands, extent=extent, **around)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, scaled: bool) -> Scaled:
    rows, columns = x.shape
    made = Scaled(torch.empty_like(x), x.new_empty(1, max(8, triton.next_power_of_2(rows)), dtype=torch.float32))
    block = triton.next_power_of_2(columns)
    launch(_norm_rows, (rows,), x, x, weight, *made, eps, K=columns, BLOCK=block, SCALED=scaled, num_warps=8)
    return made


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    way: str = "",
    arrived: torch.Tensor | None = None,
    scaled: Scaled | None = None,
    scales: torch.Tensor | None = None,
) -> Scaled | None:
    """Write ``norm(x) @ weight.T + bias`` into `out`, gated or added to a residual, which may be `out` itself.

    `arrived` is what `streamed_product` has to have. `scaled` is what an earlier product has made of `x`, and `scales`
    the weight of the norm that follows, for which it may return what that begins with.
    """
    rows, columns = x.shape
    way = way or ways(rows, x)[0]
    if way == _LIBRARY:
        if norm is not None:
            x = _norm(x, *norm, scaled=False).rows
        added = residual if bias is None else bias if residual is None else residual + bias
        if gated:
            both, block = F.linear(x, weight, bias), 1024
            launch(_gate_rows, (rows, triton.cdiv(out.shape[1], block)), x, both, out, N=out.shape[1], BLOCK=block)
        elif out.dtype != x.dtype:
            out.copy_(F.linear(x, weight, added))
        elif added is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(added, x, weight.t(), out=out)
        return None
    if rows > 1 or way == _STREAMED:
        around: dict[str, Any] = {"bias": bias, "residual": residual, "gated": gated, "scales": scales}
        around |= {"squares": None, "eps": 0.0}
        if norm is not None:
            x, around["squares"] = scaled or _norm(x, *norm, scaled=True)
            around["eps"] = norm[1]
        if way == _STREAMED:
            made = streamed_product(x, weight, out, arrived=arrived, **around)
        else:
            made = rows_product(x, weight, out, **around)
        return None if made is None else Scaled(*made)
    count = weight.shape[0] // (2 if gated else 1)
    scale, eps = norm or (x, 0.0)
    launch(
        _row_product, (triton.cdiv(count, _BLOCK_N),), x,
        x, scale, weight, x if bias is None else bias, x if residual is None else residual, out, eps, N=count,
        K=columns, NORM=norm is not None, BIAS=bias is not None, RESIDUAL=residual is not None, GATED=gated,
        BLOCK_N=_BLOCK_N, BLOCK_K=2048 if norm is None else 1024, num_warps=2 if gated else 4,
    )  # fmt: skip
    return None
