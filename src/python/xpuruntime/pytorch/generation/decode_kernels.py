# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
# ruff: noqa: ANN001, ANN202, N803, N806 - Triton's kernels have no types, and constants as parameters
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of a decode step: a product with all that is around it, and attention of one query.

Each reads the weights that it can before it waits for the kernel in front of it (programmatic dependent launch).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as PyTorch calls it
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xpuruntime.pytorch.generation.decode_attention import attend, launched_early, splits_for

rows_product: Any
try:
    from xpuruntime.pytorch.generation.rows_product import rows_product
except ImportError:  # this Triton has no Gluon, or none with these tensor cores
    rows_product = None

__all__ = ["attend", "product", "splits_for", "ways"]

#: Rows of a weight that a program of a product of one row has.
_BLOCK_N = 4
_LIBRARY = "cuBLAS"


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
def _norm_rows(x, norm, out, eps, K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Norm a row, rounded twice as the modules do."""
    k = tl.arange(0, BLOCK)
    scale = tl.load(norm + k, mask=k < K, other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    offset = tl.program_id(0) * K + k
    value = tl.load(x + offset, mask=k < K, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / K + eps)
    tl.store(out + offset, value.to(scale.dtype) * scale, mask=k < K)


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


def ways(rows: int, dtype: torch.dtype) -> tuple[str, ...]:
    """Return how products of so many rows can be computed."""
    own = rows == 1 or (rows_product is not None and dtype == torch.bfloat16)
    return ("a kernel of its own", _LIBRARY) if own else (_LIBRARY,)


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
) -> None:
    """Write ``norm(x) @ weight.T + bias`` into `out`, gated or added to a residual, which may be `out` itself."""
    rows, columns = x.shape
    at_once = launched_early(x)
    if (way or ways(rows, x.dtype)[0]) == _LIBRARY:
        if norm is not None:
            x, before = torch.empty_like(x), x
            block = triton.next_power_of_2(columns)
            _norm_rows[rows,](before, norm[0], x, norm[1], K=columns, BLOCK=block, num_warps=8, **at_once)
        added = residual if bias is None else bias if residual is None else residual + bias
        if gated:
            both, block = F.linear(x, weight, bias), 1024
            _gate_rows[rows, triton.cdiv(out.shape[1], block)](both, out, N=out.shape[1], BLOCK=block, **at_once)
        elif out.dtype != x.dtype:
            out.copy_(F.linear(x, weight, added))
        elif added is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(added, x, weight.t(), out=out)
        return
    if rows > 1:
        rows_product(x, weight, out, norm=norm, bias=bias, residual=residual, gated=gated)
        return
    count = weight.shape[0] // (2 if gated else 1)
    scale, eps = norm or (x, 0.0)
    _row_product[triton.cdiv(count, _BLOCK_N),](
        x, scale, weight, x if bias is None else bias, x if residual is None else residual, out, eps, N=count,
        K=columns, NORM=norm is not None, BIAS=bias is not None, RESIDUAL=residual is not None, GATED=gated,
        BLOCK_N=_BLOCK_N, BLOCK_K=2048 if norm is None else 1024, num_warps=2 if gated else 4, **at_once,
    )  # fmt: skip
