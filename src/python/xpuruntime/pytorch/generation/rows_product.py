# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
# ruff: noqa: ANN001, ANN202, N803, N806 - Triton's kernels have no types, and constants as parameters
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Gluon kernels of a decode step: products of several rows in bfloat16 with what is around them.

Of `rows_product`, weights go from memory straight into the registers of the tensor cores, in whose order each thread
reads 16 bytes of a row: columns are summed in another order than they lie, in both operands alike. Of
`streamed_product`, for Hopper, weights come by TMA: each program keeps as many tiles on their way as its shared memory
holds, and few programs share the columns, so that rows are read seldom.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xpuruntime.pytorch.generation.decode_attention import launch

#: Rows of a weight of which a chip has about one program for each multiprocessor.
_FEW = 2560
#: Rows of a weight that a program of `streamed_product` has, columns that come at once, programs among which columns
#: are split at most, and bytes of shared memory of a program.
_TALL, _BLOCK_K, _PROGRAMS, _ROOM = 64, 128, 128, 216 << 10


@gluon.jit
def _weights(at, start, k, K: gl.constexpr, STEP: gl.constexpr):
    if start + STEP <= K:
        return gl.load(at + start, eviction_policy="evict_first")
    return gl.load(at + start, mask=(start + k < K)[:, None, :], other=0.0, eviction_policy="evict_first")


@gluon.jit
def _norm_factor(squares, parts, row, eps, K: gl.constexpr, NORM: gl.constexpr, ROWS: gl.constexpr,
                 LAYOUT: gl.constexpr):  # fmt: skip
    """Return what the norm multiplies rows by, whose squares programs in front have summed in parts."""
    factor = 1.0
    if NORM:
        MOST: gl.constexpr = triton.next_power_of_2((K + 15) // 16)
        part = gl.arange(0, MOST, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        sums = gl.load(squares + part * ROWS + row, mask=part < parts, other=0.0)
        factor = gl.rsqrt(gl.sum(sums, axis=0) / K + eps)[None, :]
    return factor


@gluon.jit
def _kept(residual, n, row, alive, N: gl.constexpr, RESIDUAL: gl.constexpr):
    return gl.load(residual + row * N + n, mask=alive, other=0.0).to(gl.float32) if RESIDUAL else 0.0


@gluon.jit
def _finish(result, up, kept, n, row, alive, bias, out, factor, squares, scales, scaled, N: gl.constexpr,
            BIAS: gl.constexpr, RESIDUAL: gl.constexpr, GATED: gl.constexpr, SCALED: gl.constexpr,
            TYPE: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """Do what comes after the sums, rounded as the single modules do, and begin the norm that follows."""
    result *= factor
    if BIAS:
        result += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
    result = result.to(TYPE).to(gl.float32)
    if GATED:
        up *= factor
        if BIAS:
            up += gl.load(bias + N + n, mask=n < N, other=0.0).to(gl.float32)
        result = (result / (1.0 + gl.exp(-result))).to(TYPE).to(gl.float32) * up.to(TYPE).to(gl.float32)
        result = result.to(TYPE).to(gl.float32)
    if RESIDUAL:
        result = (kept + result).to(TYPE).to(gl.float32)
    gl.store(out + row * N + n, result.to(out.dtype.element_ty), mask=alive)
    if SCALED:
        scale = gl.load(scales + n, mask=n < N, other=0.0).to(gl.float32)
        gl.store(scaled + row * N + n, (result * scale).to(TYPE), mask=alive)
        sums = gl.sum(gl.where(alive, result * result, 0.0), axis=0)[None, :]
        gl.store(squares + gl.program_id(0) * ROWS + row, sums)


@gluon.jit(do_not_specialize=["parts"])
def _rows_product(x, weight, bias, residual, out, squares, scales, scaled, parts, eps, M, N: gl.constexpr,
                  K: gl.constexpr, NORM: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, GATED: gl.constexpr,
                  SCALED: gl.constexpr, ROWS: gl.constexpr, BLOCK_K: gl.constexpr, CHAINS: gl.constexpr,
                  EARLY: gl.constexpr):  # fmt: skip
    """Weights are the tall operand, rows the narrow one. Each warp has shares of the columns, in chains of sums."""
    # A program has 16 rows of the weight; of a gated product, 8 of the gate and the same 8 of what it lets through.
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
    factor = _norm_factor(squares, parts, to_row, eps, K, NORM, ROWS, OUT)
    kept = _kept(residual, to_n, to_row, alive, N, RESIDUAL)
    total = gl.zeros([SHARES, 16, ROWS], gl.float32, SUMS)
    for start in gl.static_range(0, K, STEP):
        w = ahead
        if start + STEP < K:
            ahead = _weights(at, start + STEP, k, K, STEP)
        here = start + x_k < K
        value = gl.load(of + start, mask=there & here[:, :, None], other=0.0)
        total = gl.nvidia.ampere.mma_v2(w, value, total)
    result = gl.sum(total, axis=0)
    if GATED:
        both = gl.permute(gl.reshape(result, [2, 8, ROWS]), [1, 2, 0])
        result, up = gl.split(gl.convert_layout(both, PAIRS))
    else:
        up = result
    _finish(
        result, up, kept, to_n, to_row, alive, bias, out, factor, squares, scales, scaled, N, BIAS, RESIDUAL, GATED,
        SCALED, TYPE, ROWS,
    )  # fmt: skip


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


def _around(x, out, parts, *, bias, residual, gated, squares, eps, scales):
    """Return operands and constants of what is around a product, and what it makes for the norm that follows."""
    rows, count = out.shape
    padded, scaled = _padded(rows), None
    if scales is not None:
        scaled = torch.empty_like(out), out.new_empty(parts, padded, dtype=torch.float32)
    operands = (
        x if bias is None else bias, x if residual is None else residual, out,
        scaled[1] if squares is None and scaled else x if squares is None else squares,
        scales if scaled else x, scaled[0] if scaled else x, 0 if squares is None else squares.shape[0], eps, rows,
    )  # fmt: skip
    constants = {
        "N": count, "K": x.shape[1], "NORM": squares is not None, "BIAS": bias is not None,
        "RESIDUAL": residual is not None, "GATED": gated, "SCALED": scaled is not None,
    }  # fmt: skip
    return operands, constants, scaled


def _padded(rows):
    return max(8, triton.next_power_of_2(rows))


def rows_product(x, weight, out, *, gated, tiles=None, **around: Any) -> Any:
    """Write a product as `product` of the other kernels does, and return what the norm that follows begins with."""
    parts = triton.cdiv(out.shape[1], 8 if gated else 16)
    operands, constants, scaled = _around(x, out, parts, gated=gated, **around)
    tiles = tiles or _tiles(x.shape[0], weight.shape[0], x.shape[1], gated)
    launch(_rows_product, (parts,), x, x, weight, *operands, ROWS=_padded(x.shape[0]), **tiles, **constants)
    return scaled


@gluon.jit
def _multiply(tiles, rows, slot, total, up, HALVES: gl.constexpr):
    narrow = rows.index(slot).permute((1, 0))
    total = warpgroup_mma(tiles.index(HALVES * slot), narrow, total, is_async=True)
    if HALVES == 2:
        up = warpgroup_mma(tiles.index(HALVES * slot + 1), narrow, up, is_async=True)
    return total, up


@gluon.jit(do_not_specialize=["parts"])
def _streamed_product(weight, x, partial, arrived, bias, residual, out, squares, scales, scaled, parts, eps, M,
                      N: gl.constexpr, K: gl.constexpr, NORM: gl.constexpr, BIAS: gl.constexpr,
                      RESIDUAL: gl.constexpr, GATED: gl.constexpr, SCALED: gl.constexpr, SPLITS: gl.constexpr,
                      STAGES: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """Weights are the tall operand of the tensor cores, rows the narrow one."""
    TYPE: gl.constexpr = weight.dtype
    TALL: gl.constexpr = weight.block_type.shape[0]
    BLOCK_K: gl.constexpr = weight.block_type.shape[1]
    ROWS: gl.constexpr = x.block_type.shape[0]
    HALVES: gl.constexpr = 2 if GATED else 1
    STEPS: gl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLITS - 1) // SPLITS
    AHEAD: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    BYTES: gl.constexpr = HALVES * weight.block_type.nbytes + x.block_type.nbytes
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    tile = gl.program_id(0)
    split = gl.program_id(1)
    first_n = tile * TALL
    first_k = split * (STEPS * BLOCK_K)
    tiles = gl.allocate_shared_memory(TYPE, [HALVES * AHEAD, TALL, BLOCK_K], weight.layout)
    rows = gl.allocate_shared_memory(TYPE, [AHEAD, ROWS, BLOCK_K], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(AHEAD):
        mbarrier.init(full.index(stage), count=1)
    # Weights are on their way while the kernel in front still runs.
    for stage in gl.static_range(AHEAD):
        mbarrier.expect(full.index(stage), BYTES)
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                weight, [half * N + first_n, first_k + stage * BLOCK_K], full.index(stage),
                tiles.index(HALVES * stage + half),
            )  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    for stage in gl.static_range(AHEAD):
        tma.async_copy_global_to_shared(x, [0, first_k + stage * BLOCK_K], full.index(stage), rows.index(stage))
    n = first_n + gl.arange(0, TALL, layout=gl.SliceLayout(1, SUMS))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS))[None, :]
    alive = (n < N) & (row < M)
    factor = _norm_factor(squares, parts, row, eps, K, NORM, ROWS, SUMS)
    kept = _kept(residual, n, row, alive, N, RESIDUAL)
    total = gl.zeros([TALL, ROWS], gl.float32, SUMS)
    up = gl.zeros([TALL, ROWS], gl.float32, SUMS)
    if AHEAD == STEPS:
        for step in gl.static_range(STEPS):
            mbarrier.wait(full.index(step), 0)
            total, up = _multiply(tiles, rows, step, total, up, HALVES)
        total, up = warpgroup_mma_wait(0, deps=(total, up))
    else:
        for step in range(STEPS):
            slot = step % AHEAD
            mbarrier.wait(full.index(slot), step // AHEAD & 1)
            total, up = _multiply(tiles, rows, slot, total, up, HALVES)
            total, up = warpgroup_mma_wait(0, deps=(total, up))
            more = step + AHEAD < STEPS
            k = first_k + (step + AHEAD) * BLOCK_K
            mbarrier.expect(full.index(slot), BYTES, more)
            for half in gl.static_range(HALVES):
                tma.async_copy_global_to_shared(
                    weight, [half * N + first_n, k], full.index(slot), tiles.index(HALVES * slot + half), more
                )
            tma.async_copy_global_to_shared(x, [0, k], full.index(slot), rows.index(slot), more)
    last = True
    if SPLITS > 1:
        PIECE: gl.constexpr = HALVES * TALL * ROWS
        to = partial + tile * (SPLITS * PIECE) + (n - first_n) * ROWS + row
        gl.store(to + split * PIECE, total)
        if GATED:
            gl.store(to + split * PIECE + TALL * ROWS, up)
        gl.thread_barrier()
        last = gl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if last:
        # The last to arrive sums the pieces in their order, so that the bits are always the same.
        if SPLITS > 1:
            gl.store(arrived + tile, 0)
            total = gl.zeros([TALL, ROWS], gl.float32, SUMS)
            up = gl.zeros([TALL, ROWS], gl.float32, SUMS)
            for number in gl.static_range(SPLITS):
                total += gl.load(to + number * PIECE, cache_modifier=".cg")
                if GATED:
                    up += gl.load(to + number * PIECE + TALL * ROWS, cache_modifier=".cg")
        _finish(
            total, up, kept, n, row, alive, bias, out, factor, squares, scales, scaled, N, BIAS, RESIDUAL, GATED,
            SCALED, TYPE, ROWS,
        )  # fmt: skip


def _streamed_tiles(rows, count, columns, gated):
    """Return what was fastest in steps of 8 and 32 rows on an H200: few programs with much on its way each."""
    programs, block = triton.cdiv(count, _TALL), _BLOCK_K
    if gated:
        splits, stages = 1, 5
    elif count <= _FEW:
        most = (_PROGRAMS if rows <= 8 else _PROGRAMS // 2) // programs
        splits, stages = triton.next_power_of_2(max(1, min(most, triton.cdiv(columns, block) // 4)) + 1) // 2, 8
    else:
        splits, stages = 1, 4
        block *= 2 if programs <= 2 * _PROGRAMS else 1
    steps = triton.cdiv(triton.cdiv(columns, block), splits)
    return _TALL, block, splits, min(stages, steps, _ROOM // (2 * block * (_TALL * (1 + gated) + rows)))


def streamed_product(x, weight, out, *, arrived, gated, tiles=None, **around: Any) -> Any:
    """Write a product as `rows_product` does.

    `arrived` has zeros, of which there is one for 64 rows of the weight: they count who has summed a share of columns.
    """
    padded, count = _padded(x.shape[0]), out.shape[1]
    tall, block, splits, stages = tiles or _streamed_tiles(padded, count, x.shape[1], gated)
    parts = triton.cdiv(count, tall)
    operands, constants, scaled = _around(x, out, parts, gated=gated, **around)
    shares, narrow = (
        TensorDescriptor.from_tensor(tensor, shape, gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16))
        for tensor, shape in ((weight, [tall, block]), (x, [padded, block]))
    )
    pieces = x.new_empty(0 if splits == 1 else parts * splits * tall * padded * (1 + gated), dtype=torch.float32)
    launch(
        _streamed_product, (parts, splits), x, shares, narrow, pieces, arrived, *operands, SPLITS=splits,
        STAGES=stages, num_warps=4, **constants,
    )  # fmt: skip
    return scaled
