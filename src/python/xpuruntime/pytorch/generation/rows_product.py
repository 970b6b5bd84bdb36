# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
# ruff: noqa: ANN001, ANN202, N803, N806 - Triton's kernels have no types, and constants as parameters
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""A Gluon kernel of a decode step: a product of several rows in bfloat16 with all that is around it.

Weights go from memory straight into the registers of the tensor cores, in whose order each thread reads 16 bytes of a
row: columns are summed in another order than they lie, in both operands alike.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xpuruntime.pytorch.generation.decode_attention import launched_early

__all__ = ["rows_product"]

#: Rows of a weight of which a chip has about one program for each multiprocessor.
_FEW = 2560


@gluon.jit
def _weights(at, start, k, K: gl.constexpr, STEP: gl.constexpr):
    if start + STEP <= K:
        return gl.load(at + start, eviction_policy="evict_first")
    return gl.load(at + start, mask=(start + k < K)[:, None, :], other=0.0, eviction_policy="evict_first")


@gluon.jit
def _rows_product(x, norm, weight, bias, residual, out, eps, M, N: gl.constexpr, K: gl.constexpr, NORM: gl.constexpr,
                  BIAS: gl.constexpr, RESIDUAL: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr,
                  BLOCK_K: gl.constexpr, CHAINS: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """Weights are the tall operand, rows the narrow one. Each warp has shares of the columns, in chains of sums.

    A program has 16 rows of the weight; of a gated product, 8 of the gate and the same 8 of what it lets through.
    """
    WARPS: gl.constexpr = gl.num_warps()
    SHARES: gl.constexpr = WARPS * CHAINS
    STEP: gl.constexpr = SHARES * BLOCK_K
    COUNT: gl.constexpr = 8 if GATED else 16
    TYPE: gl.constexpr = weight.dtype.element_ty
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    TALL: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    NARROW: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [8, 4, 1], [1, WARPS, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.SliceLayout(2, PAIRS) if GATED else gl.SliceLayout(0, SUMS)
    share = gl.arange(0, SHARES, layout=gl.SliceLayout(1, gl.SliceLayout(1, TALL)))
    k = share[:, None] * BLOCK_K + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, gl.SliceLayout(1, TALL)))[None, :]
    n = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, TALL)))
    n = gl.minimum(gl.program_id(0) * COUNT + n % COUNT, N - 1) + n // COUNT * N
    at = weight + n[None, :, None].to(gl.int64) * K + k[:, None, :]
    share = gl.arange(0, SHARES, layout=gl.SliceLayout(1, gl.SliceLayout(2, NARROW)))
    x_k = share[:, None] * BLOCK_K + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, gl.SliceLayout(2, NARROW)))[None, :]
    x_row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, NARROW)))
    of = x + x_row[None, None, :] * K + x_k[:, :, None]
    there = (x_row < M)[None, None, :]
    # The first weights are on their way while the kernel in front still runs.
    ahead = _weights(at, 0, k, K, STEP)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    to_n = gl.program_id(0) * COUNT + gl.arange(0, COUNT, layout=gl.SliceLayout(1, OUT))[:, None]
    to_row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))[None, :]
    alive = (to_n < N) & (to_row < M)
    if RESIDUAL:
        kept = gl.load(residual + to_row * N + to_n, mask=alive, other=0.0).to(gl.float32)
    total = gl.zeros([SHARES, 16, ROWS], gl.float32, SUMS)
    squares = gl.zeros([SHARES, ROWS], gl.float32, gl.SliceLayout(1, NARROW))
    for start in gl.static_range(0, K, STEP):
        w = ahead
        if start + STEP < K:
            ahead = _weights(at, start + STEP, k, K, STEP)
        here = start + x_k < K
        value = gl.load(of + start, mask=there & here[:, :, None], other=0.0)
        if NORM:
            wide = value.to(gl.float32)
            squares += gl.sum(wide * wide, axis=1)
            scale = gl.load(norm + start + x_k, mask=here, other=0.0).to(gl.float32)
            value = (wide * scale[:, :, None]).to(TYPE)
        total = gl.nvidia.ampere.mma_v2(w, value, total)
    result = gl.sum(total, axis=0)
    if GATED:
        both = gl.permute(gl.reshape(result, [2, 8, ROWS]), [1, 2, 0])
        result, up = gl.split(gl.convert_layout(both, PAIRS))
    if NORM:
        scale = gl.rsqrt(gl.sum(squares, axis=0) / K + eps)
        scale = gl.convert_layout(scale, gl.SliceLayout(0, OUT))[None, :]
        result *= scale
        if GATED:
            up *= scale
    if BIAS:
        result += gl.load(bias + to_n, mask=to_n < N, other=0.0).to(gl.float32)
    result = result.to(TYPE).to(gl.float32)
    if GATED:
        if BIAS:
            up += gl.load(bias + N + to_n, mask=to_n < N, other=0.0).to(gl.float32)
        result = (result / (1.0 + gl.exp(-result))).to(TYPE).to(gl.float32) * up.to(TYPE).to(gl.float32)
        result = result.to(TYPE).to(gl.float32)
    if RESIDUAL:
        result = (kept + result).to(TYPE).to(gl.float32)
    gl.store(out + to_row * N + to_n, result.to(out.dtype.element_ty), mask=alive)


def _tiles(rows, count, columns, gated):
    """Return what was fastest on an H200: as many bytes on their way as fit, and several programs at a time."""
    few = count <= _FEW
    if gated:
        block, chains, warps = (128, 2, 4) if rows <= 8 else (256, 1, 4)
    elif rows > (16 if few else 8):
        block, chains, warps = 256, 1, 8 if few else 4
    else:
        block, chains, warps = (128, 2, 8) if few and columns > 4096 and rows <= 8 else (512, 1, 4)
    return {"BLOCK_K": block, "CHAINS": chains, "num_warps": warps}


def rows_product(x, weight, out, *, norm, bias, residual, gated, tiles=None) -> None:
    """Write a product as `product` of the other kernels does."""
    rows, columns = x.shape
    count = weight.shape[0] // (2 if gated else 1)
    scale, eps = norm or (x, 0.0)
    tiles = tiles or _tiles(rows, weight.shape[0], columns, gated)
    _rows_product[triton.cdiv(count, 8 if gated else 16),](
        x, scale, weight, x if bias is None else bias, x if residual is None else residual, out, eps, rows, N=count,
        K=columns, NORM=norm is not None, BIAS=bias is not None, RESIDUAL=residual is not None, GATED=gated,
        ROWS=max(8, triton.next_power_of_2(rows)), **tiles, **launched_early(x),
    )  # fmt: skip
