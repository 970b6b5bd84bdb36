# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
# ruff: noqa: ANN001, ANN202, N803, N806, RUF005, SIM108 - Triton's kernels have no types, and constants as parameters
# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator, no-untyped-call"
"""A Gluon kernel of a decode step for Hopper: attention to a short text in bfloat16, with what is around it.

All keys and values of a head come by TMA while the kernel in front still runs, so that nothing but arithmetic comes
after it. Keys are the tall operand of the tensor cores, queries the narrow one.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xpuruntime.pytorch.dispatch.context import arch_of
from xpuruntime.pytorch.generation.decode_attention import launch

_LOG2E = gl.constexpr(1.4426950408889634)
#: Elements of keys that come at once, and bytes of shared memory of a program beside what it holds.
_TILE, _OWN = 8192, 2048


@gluon.jit
def _turned(at, d, alive, cos, sin, weight, eps, HEAD: gl.constexpr, NORM: gl.constexpr, TYPE: gl.constexpr):
    """Norm and rotate rows of a head, rounded as the modules do."""
    HALF: gl.constexpr = HEAD // 2
    other = (d + HALF) % HEAD
    value = gl.load(at + d, mask=alive, other=0.0).to(gl.float32)
    turned = gl.load(at + other, mask=alive, other=0.0).to(gl.float32)
    if NORM:
        factor = gl.rsqrt(gl.sum(value * value, axis=1) / HEAD + eps)[:, None]
        value = (value * factor).to(TYPE).to(gl.float32) * gl.load(weight + d).to(gl.float32)
        value = value.to(TYPE).to(gl.float32)
        turned = (turned * factor).to(TYPE).to(gl.float32) * gl.load(weight + other).to(gl.float32)
        turned = turned.to(TYPE).to(gl.float32)
    turned = (turned * sin).to(TYPE).to(gl.float32)
    return ((value * cos).to(TYPE).to(gl.float32) + gl.where(d < HALF, -turned, turned)).to(TYPE)


@gluon.jit
def _attend_short(qkv, all_keys, all_values, keys, values, cos, sin, mask, length, position, q_norm, k_norm, out,
                  scale, eps, room, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, TILES: gl.constexpr,
                  QUERIES: gl.constexpr, NORM: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """One new token: rotate it, put it into the cache, and attend to what is there."""
    TYPE: gl.constexpr = all_keys.dtype
    TILE: gl.constexpr = all_keys.block_type.shape[0]
    HEAD: gl.constexpr = all_keys.block_type.shape[1]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, QUERIES, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    QUERY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, HEAD], TYPE)
    SHARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, TILE], TYPE)
    batch_head = gl.program_id(0)
    batch = batch_head // KV_HEADS
    head = batch_head % KV_HEADS
    key_tiles = gl.allocate_shared_memory(TYPE, [TILES, TILE, HEAD], all_keys.layout)
    value_tiles = gl.allocate_shared_memory(TYPE, [TILES, TILE, HEAD], all_values.layout)
    query = gl.allocate_shared_memory(TYPE, [QUERIES, HEAD], QUERY)
    shared = gl.allocate_shared_memory(TYPE, [TILES, QUERIES, TILE], SHARE)
    full = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for tile in gl.static_range(TILES):
        mbarrier.init(full.index(tile), count=1)
    # What earlier steps have written is read before the wait: no kernel of this step writes it.
    slot = gl.load(length).to(gl.int32) - 1
    for tile in gl.static_range(TILES):
        there = tile * TILE < slot
        mbarrier.expect(full.index(tile), 2 * all_keys.block_type.nbytes, there)
        at = batch_head * room + tile * TILE
        tma.async_copy_global_to_shared(all_keys, [at, 0], full.index(tile), key_tiles.index(tile), there)
        tma.async_copy_global_to_shared(all_values, [at, 0], full.index(tile), value_tiles.index(tile), there)
        if not there:
            value_tiles.index(tile).store(gl.zeros([TILE, HEAD], TYPE, ROWS))
    turn = gl.load(position + batch) * HEAD
    d = gl.arange(0, HEAD, layout=gl.SliceLayout(0, ROWS))[None, :]
    g = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, ROWS))[:, None]
    row_cos, row_sin = gl.load(cos + turn + d).to(gl.float32), gl.load(sin + turn + d).to(gl.float32)
    t = gl.arange(0, TILE, layout=gl.SliceLayout(1, SUMS))
    seen = ()
    for tile in gl.static_range(TILES):
        at = tile * TILE + t
        seen = seen + (gl.load(mask + batch.to(gl.int64) * room + at, mask=at < slot, other=0) != 0,)
    if EARLY:
        gdc_launch_dependents()
    rest = gl.arange(0, TILE, layout=gl.SliceLayout(1, ROWS))[:, None]
    for tile in gl.static_range(TILES):
        # What lies beyond may be no number, which a share of zero does not hide.
        if (tile * TILE < slot) & (slot < (tile + 1) * TILE):
            mbarrier.wait(full.index(tile), 0)
            values_there = value_tiles.index(tile).load(ROWS)
            kept = gl.where(tile * TILE + rest < slot, values_there, 0.0).to(TYPE)
            value_tiles.index(tile).store(kept)
    if EARLY:
        gdc_wait()
    token = qkv + batch * ((GROUP + 2) * KV_HEADS * HEAD)
    q = _turned(token + (head * GROUP + g) * HEAD, d, g < GROUP, row_cos, row_sin, q_norm, eps, HEAD, NORM, TYPE)
    query.store(q)
    new = token + (GROUP * KV_HEADS + head) * HEAD
    key = _turned(new + 0 * g, d, g < QUERIES, row_cos, row_sin, k_norm, eps, HEAD, NORM, TYPE)
    n = gl.arange(0, HEAD, layout=gl.SliceLayout(1, SUMS))
    value = gl.load(new + KV_HEADS * HEAD + n)
    place = batch_head.to(gl.int64) * room * HEAD + slot * HEAD
    gl.store(keys + place + d + 0 * g, key, mask=g == 0)
    gl.store(values + place + n, value)
    factor = scale * _LOG2E
    own = gl.sum(q.to(gl.float32) * key.to(gl.float32), axis=1) * factor
    own = gl.convert_layout(own, gl.SliceLayout(0, SUMS))
    fence_async_shared()
    narrow = query.permute((1, 0))
    scores = ()
    for tile in gl.static_range(TILES):
        mbarrier.wait(full.index(tile), 0, tile * TILE < slot)
        zeros = gl.zeros([TILE, QUERIES], gl.float32, SUMS)
        scores = scores + (warpgroup_mma(key_tiles.index(tile), narrow, zeros, is_async=True),)
    if TILES == 1:
        scores = (warpgroup_mma_wait(0, deps=scores),)
    else:
        scores = warpgroup_mma_wait(0, deps=scores)
    peak = gl.full([TILE, QUERIES], -float("inf"), gl.float32, SUMS)
    for tile in gl.static_range(TILES):
        peak = gl.maximum(peak, gl.where(seen[tile][:, None], scores[tile] * factor, -float("inf")))
    most = gl.maximum(gl.max(peak, axis=0), own)
    share = gl.exp2(own - most)
    weight = gl.zeros([TILE, QUERIES], gl.float32, SUMS)
    for tile in gl.static_range(TILES):
        shares = gl.exp2(gl.where(seen[tile][:, None], scores[tile] * factor, -float("inf")) - most[None, :])
        weight += shares
        shared.index(tile).store(gl.permute(shares.to(TYPE), (1, 0)))
    fence_async_shared()
    total = value.to(gl.float32)[:, None] * share[None, :]
    for tile in gl.static_range(TILES):
        wide = value_tiles.index(tile).permute((1, 0))
        total = warpgroup_mma(wide, shared.index(tile).permute((1, 0)), total, is_async=True)
    weights = gl.sum(weight, axis=0) + share
    total = warpgroup_mma_wait(0, deps=(total,))
    row = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, SUMS))[None, :]
    to = out + (batch_head * GROUP + row) * HEAD + n[:, None]
    gl.store(to, (total / weights[None, :]).to(out.dtype.element_ty), mask=row < GROUP)


def is_short(keys: torch.Tensor, extent: int) -> bool:
    """Say whether all heads of a cache fit on the chip at once, up to an extent."""
    rows, kv_heads, _, size = keys.shape
    if keys.dtype != torch.bfloat16 or size not in (64, 128) or arch_of(keys.device) != "sm90":
        return False
    # Beside keys and values, a program has 16 queries, and their shares of the positions.
    tile = _TILE // size
    room = triton.cdiv(extent, tile) * tile * (4 * size + 32) + 32 * size + _OWN
    chip = torch.cuda.get_device_properties(keys.device)
    return bool(rows * kv_heads <= chip.multi_processor_count * (chip.shared_memory_per_multiprocessor // room))


def attend_short(qkv, keys, values, turns, mask, length, position, out, *, scale, norms, extent) -> None:
    """Do what `attend` of the other kernels does."""
    rows, kv_heads, room, size = keys.shape
    group = qkv.shape[1] // (kv_heads * size) - 2
    shape = [_TILE // size, size]
    form = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)
    tiles = (TensorDescriptor.from_tensor(cache.view(-1, size), shape, form) for cache in (keys, values))
    q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
    launch(
        _attend_short, (rows * kv_heads,), qkv,
        qkv, *tiles, keys, values, *turns, mask, length, position, q_norm, k_norm, out, scale, eps, room,
        KV_HEADS=kv_heads, GROUP=group, TILES=triton.cdiv(extent, shape[0]), QUERIES=8 if group <= 8 else 16,
        NORM=norms is not None, num_warps=4,
    )  # fmt: skip
