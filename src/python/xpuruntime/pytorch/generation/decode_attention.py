# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
# ruff: noqa: ANN001, ANN202, N803, N806 - Triton's kernels have no types, and constants as parameters
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels of attention of one query: of a decode step, with what is around it, and of any."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOG2E = tl.constexpr(1.4426950408889634)
#: Queries that a program of attention has, those of a head of keys and room for others.
_QUERIES = tl.constexpr(16)
#: Positions that a program of attention reads at once, those that make another one worth while, and programs of a chip.
_TILE, _LEAST, _PROGRAMS = 64, 96, 256
#: Bytes of keys and values that a program of attention reads at once, at most.
_STAGE = 64 << 10
#: CUDA's number of the attribute of a function that states its division of L1 and shared memory, and functions with it.
_CARVEOUT, _DIVIDED = 9, set[int]()


@triton.jit
def _turned(low, high, cos_low, cos_high, sin_low, sin_high, TYPE: tl.constexpr):
    """Rotate halves by a position, rounded after each product as the formula of the modules is."""
    first = (low * cos_low).to(TYPE).to(tl.float32) - (high * sin_low).to(TYPE).to(tl.float32)
    second = (high * cos_high).to(TYPE).to(tl.float32) + (low * sin_high).to(TYPE).to(tl.float32)
    return first.to(TYPE), second.to(TYPE)


@triton.jit
def _head_norm(low, high, weight, d, eps, HALF: tl.constexpr, axis: tl.constexpr, TYPE: tl.constexpr):
    scale = tl.rsqrt((tl.sum(low * low, axis=axis) + tl.sum(high * high, axis=axis)) / (2 * HALF) + eps)
    if axis == 1:
        scale = scale[:, None]
    low = (low * scale).to(TYPE).to(tl.float32) * tl.load(weight + d).to(tl.float32)
    high = (high * scale).to(TYPE).to(tl.float32) * tl.load(weight + HALF + d).to(tl.float32)
    return low.to(TYPE).to(tl.float32), high.to(TYPE).to(tl.float32)


@triton.jit
def _with_tile(low, high, key_low, key_high, value, seen, added, most, weight, total, factor,
               TYPE: tl.constexpr):  # fmt: skip
    scores = tl.dot(low, tl.trans(key_low), input_precision="ieee")
    scores = tl.dot(high, tl.trans(key_high), scores, input_precision="ieee") * factor
    scores = tl.where(seen, scores + added, -float("inf"))
    higher = tl.maximum(most, tl.max(scores, axis=1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    shares = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(most - safe)
    total = tl.dot(shares.to(TYPE), value, total * shrink[:, None], input_precision="ieee")
    return higher, weight * shrink + tl.sum(shares, axis=1), total


@triton.jit
def _store(out, lse, batch_head, most, weight, total, GROUP: tl.constexpr, HEAD: tl.constexpr, LSE: tl.constexpr):
    g = tl.arange(0, _QUERIES)
    to = out + (batch_head * GROUP + g[:, None]) * HEAD + tl.arange(0, HEAD)[None, :]
    # A query that sees no key has no weights.
    normalized = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    tl.store(to, normalized.to(out.dtype.element_ty), mask=g[:, None] < GROUP)
    if LSE:
        tl.store(lse + batch_head * GROUP + g, (most + tl.log2(weight)) / _LOG2E, mask=g < GROUP)


@triton.jit
def _end(out, lse, partial, arrived, batch_head, split, most, weight, total, GROUP: tl.constexpr, HEAD: tl.constexpr,
         SPLITS: tl.constexpr, LSE: tl.constexpr):  # fmt: skip
    """Store what a program has made of a head, or put the pieces of all programs together."""
    if SPLITS == 1:
        _store(out, lse, batch_head, most, weight, total, GROUP, HEAD, LSE)
    else:
        PIECE: tl.constexpr = GROUP * (HEAD + 2)
        g = tl.arange(0, _QUERIES)
        columns = tl.arange(0, HEAD)
        alive = g[:, None] < GROUP
        piece = partial + (batch_head * SPLITS + split) * PIECE
        tl.store(piece + g[:, None] * HEAD + columns[None, :], total, mask=alive)
        tl.store(piece + GROUP * HEAD + g, most, mask=g < GROUP)
        tl.store(piece + GROUP * (HEAD + 1) + g, weight, mask=g < GROUP)
        tl.debug_barrier()
        if tl.atomic_add(arrived + batch_head, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            # The last to arrive puts the pieces together, in their order, so that the bits are always the same.
            tl.store(arrived + batch_head, 0)
            most = tl.full([_QUERIES], -float("inf"), tl.float32)
            weight = tl.zeros([_QUERIES], tl.float32)
            total = tl.zeros([_QUERIES, HEAD], tl.float32)
            for number in tl.static_range(SPLITS):
                piece = partial + (batch_head * SPLITS + number) * PIECE
                other = tl.load(piece + GROUP * HEAD + g, mask=g < GROUP, other=0.0, cache_modifier=".cg")
                added = tl.load(piece + GROUP * (HEAD + 1) + g, mask=g < GROUP, other=1.0, cache_modifier=".cg")
                there = tl.load(
                    piece + g[:, None] * HEAD + columns[None, :], mask=alive, other=0.0, cache_modifier=".cg"
                )
                higher = tl.maximum(most, other)
                safe = tl.where(higher == -float("inf"), 0.0, higher)
                shrink, grow = tl.exp2(most - safe), tl.exp2(other - safe)
                total = total * shrink[:, None] + there * grow[:, None]
                weight = weight * shrink + added * grow
                most = higher
            _store(out, lse, batch_head, most, weight, total, GROUP, HEAD, LSE)


@triton.jit
def _tile_of(keys, values, mask, first, end, t, d, columns, HALF: tl.constexpr):
    there = first + t < end
    at = (first + t)[:, None] * (2 * HALF)
    key_low = tl.load(keys + at + d[None, :], mask=there[:, None], other=0.0)
    key_high = tl.load(keys + at + HALF + d[None, :], mask=there[:, None], other=0.0)
    value = tl.load(values + at + columns[None, :], mask=there[:, None], other=0.0)
    seen = there & (tl.load(mask + first + t, mask=there, other=0) != 0)
    return key_low, key_high, value, seen[None, :]


@triton.jit
def _attend(qkv, keys, values, cos, sin, mask, length, position, q_norm, k_norm, out, partial, arrived, scale, eps,
            room, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
            SPLITS: tl.constexpr, NORM: tl.constexpr, TILE: tl.constexpr,
            EARLY: tl.constexpr):  # fmt: skip
    """One new token: rotate it, put it into the cache, and attend to what is there."""
    TYPE: tl.constexpr = keys.dtype.element_ty
    HEAD: tl.constexpr = 2 * HALF
    batch_head = tl.program_id(0)
    split = tl.program_id(1)
    batch = batch_head // KV_HEADS
    head = batch_head % KV_HEADS
    g = tl.arange(0, _QUERIES)
    d = tl.arange(0, HALF)
    columns = tl.arange(0, HEAD)
    t = tl.arange(0, TILE)
    alive = g[:, None] < GROUP
    # What earlier steps have written is read before the wait: no kernel of this step writes it.
    slot = tl.load(length) - 1
    turn = tl.load(position + batch) * HEAD
    cos_low, cos_high = tl.load(cos + turn + d).to(tl.float32), tl.load(cos + turn + HALF + d).to(tl.float32)
    sin_low, sin_high = tl.load(sin + turn + d).to(tl.float32), tl.load(sin + turn + HALF + d).to(tl.float32)
    share = tl.cdiv(tl.cdiv(slot, SPLITS), TILE) * TILE
    begin = split * share
    end = tl.minimum(begin + share, slot)
    keys += batch_head.to(tl.int64) * room * HEAD
    values += batch_head.to(tl.int64) * room * HEAD
    mask += batch.to(tl.int64) * room
    first_low, first_high, first_value, first_seen = _tile_of(keys, values, mask, begin, end, t, d, columns, HALF)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = qkv + batch * ((GROUP + 2) * KV_HEADS * HEAD)
    at = token + (head * GROUP + g[:, None]) * HEAD + d[None, :]
    low = tl.load(at, mask=alive, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=alive, other=0.0).to(tl.float32)
    if NORM:
        low, high = _head_norm(low, high, q_norm, d, eps, HALF, 1, TYPE)
    low, high = _turned(low, high, cos_low, cos_high, sin_low, sin_high, TYPE)
    factor = scale * _LOG2E
    most = tl.full([_QUERIES], -float("inf"), tl.float32)
    weight = tl.zeros([_QUERIES], tl.float32)
    total = tl.zeros([_QUERIES, HEAD], tl.float32)
    if split == 0:
        new = token + (GROUP * KV_HEADS + head) * HEAD
        new_low, new_high = tl.load(new + d).to(tl.float32), tl.load(new + HALF + d).to(tl.float32)
        if NORM:
            new_low, new_high = _head_norm(new_low, new_high, k_norm, d, eps, HALF, 0, TYPE)
        new_low, new_high = _turned(new_low, new_high, cos_low, cos_high, sin_low, sin_high, TYPE)
        new_value = tl.load(new + KV_HEADS * HEAD + columns)
        tl.store(keys + slot * HEAD + d, new_low)
        tl.store(keys + slot * HEAD + HALF + d, new_high)
        tl.store(values + slot * HEAD + columns, new_value)
        most = tl.sum(low.to(tl.float32) * new_low.to(tl.float32)[None, :], axis=1)
        most += tl.sum(high.to(tl.float32) * new_high.to(tl.float32)[None, :], axis=1)
        most *= factor
        weight += 1.0
        total += new_value.to(tl.float32)[None, :]
    most, weight, total = _with_tile(
        low, high, first_low, first_high, first_value, first_seen, 0.0, most, weight, total, factor, TYPE
    )
    for start in tl.range(begin + TILE, end, TILE, num_stages=3):
        key_low, key_high, value, seen = _tile_of(keys, values, mask, start, end, t, d, columns, HALF)
        most, weight, total = _with_tile(
            low, high, key_low, key_high, value, seen, 0.0, most, weight, total, factor, TYPE
        )
    _end(out, out, partial, arrived, batch_head, split, most, weight, total, GROUP, HEAD, SPLITS, False)


@triton.jit
def _one_query(q, keys, values, mask, out, lse, partial, arrived, scale, length, q_row, q_head, k_row, k_head, k_place,
               v_row, v_head, v_place, m_row, m_head, m_place, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
               HALF: tl.constexpr, SPLITS: tl.constexpr, MASK: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Attend by one query of a row to keys and values anywhere in memory."""
    TYPE: tl.constexpr = keys.dtype.element_ty
    HEAD: tl.constexpr = 2 * HALF
    batch_head = tl.program_id(0)
    split = tl.program_id(1)
    batch = (batch_head // KV_HEADS).to(tl.int64)
    head = (batch_head % KV_HEADS).to(tl.int64)
    g = tl.arange(0, _QUERIES)
    d = tl.arange(0, HALF)
    columns = tl.arange(0, HEAD)
    t = tl.arange(0, TILE)
    at = q + batch * q_row + (head * GROUP + g[:, None]) * q_head + d[None, :]
    low = tl.load(at, mask=g[:, None] < GROUP, other=0.0)
    high = tl.load(at + HALF, mask=g[:, None] < GROUP, other=0.0)
    keys += batch * k_row + head * k_head
    values += batch * v_row + head * v_head
    mask += batch * m_row + (head * GROUP + g[:, None]) * m_head
    most = tl.full([_QUERIES], -float("inf"), tl.float32)
    weight = tl.zeros([_QUERIES], tl.float32)
    total = tl.zeros([_QUERIES, HEAD], tl.float32)
    share = tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE
    end = tl.minimum(split * share + share, length)
    for start in tl.range(split * share, end, TILE, num_stages=3):
        here = (start + t).to(tl.int64)
        there = here < end
        key_low = tl.load(keys + here[:, None] * k_place + d[None, :], mask=there[:, None], other=0.0)
        key_high = tl.load(keys + here[:, None] * k_place + HALF + d[None, :], mask=there[:, None], other=0.0)
        value = tl.load(values + here[:, None] * v_place + columns[None, :], mask=there[:, None], other=0.0)
        seen = there[None, :]
        added = 0.0
        if MASK != 0:
            stated = tl.load(mask + here[None, :] * m_place, mask=there[None, :] & (g[:, None] < GROUP), other=0)
            if MASK == 1:
                seen = seen & (stated != 0)
            else:
                added = stated.to(tl.float32) * _LOG2E
        most, weight, total = _with_tile(
            low, high, key_low, key_high, value, seen, added, most, weight, total, scale * _LOG2E, TYPE
        )
    _end(out, lse, partial, arrived, batch_head, split, most, weight, total, GROUP, HEAD, SPLITS, True)


def launch(kernel: Any, grid: tuple[int, ...], tensor: torch.Tensor, *operands: Any, **constants: Any) -> None:
    """Launch a kernel of a decode step on the device of a tensor.

    It begins before the one in front has ended, where the device can. On Hopper, whose products take most of a
    multiprocessor's memory as shared, all kernels divide it so: the division changes only while nothing runs there, and
    then no kernel begins early.
    """
    major = torch.cuda.get_device_capability(tensor.device)[0] if tensor.is_cuda else 0
    early = {"EARLY": True, "launch_pdl": True} if major >= 9 else {"EARLY": False}
    made = kernel[grid](*operands, **constants, **early)
    if major == 9 and made.function not in _DIVIDED and (driver := _driver()) is not None:
        driver.cuFuncSetAttribute(ctypes.c_void_p(made.function), _CARVEOUT, 100)
        _DIVIDED.add(made.function)


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def splits_for(rows: int, kv_heads: int, extent: int) -> int:
    """Return how many programs share the positions of a head: enough for the chip, none with little to do."""
    return max(1, min(extent // _LEAST, 16, _PROGRAMS // (rows * kv_heads)))


def _shape(splits: int, head_bytes: int) -> dict[str, int]:
    return {"SPLITS": splits, "TILE": min(_TILE if splits > 1 else 2 * _TILE, _STAGE // (2 * head_bytes))}


def attend(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
    length: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
    arrived: torch.Tensor,
    *,
    scale: float,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    extent: int,
) -> None:
    """Rotate queries and keys of one token a row, write its keys and values into the cache, and attend up to there.

    Parameters
    ----------
    qkv : torch.Tensor
        Rows by queries, keys and values of all heads.
    keys, values : torch.Tensor
        The cache: rows, heads, positions, and the size of a head.
    turns : tuple of torch.Tensor
        Cosines and sines by position.
    length : torch.Tensor
        How many tokens there are with this one, which is put into the last place.
    arrived : torch.Tensor
        Zeros that count which pieces of a split head have arrived.
    """
    rows, kv_heads, room, size = keys.shape
    group = qkv.shape[1] // (kv_heads * size) - 2
    splits = splits_for(rows, kv_heads, extent)
    pieces = qkv.new_empty(splits * out.numel() // size * (size + 2), dtype=torch.float32)
    q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
    launch(
        _attend, (rows * kv_heads, splits), qkv,
        qkv, keys, values, *turns, mask, length, position, q_norm, k_norm, out, pieces, arrived, scale, eps, room,
        KV_HEADS=kv_heads, GROUP=group, HALF=size // 2, NORM=norms is not None,
        **_shape(splits, size * keys.element_size()),
    )  # fmt: skip


def attend_to_all(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of one query a row and head, and the logarithms of its sums.

    The mask has four dimensions, is true where a key is seen, or is added.
    """
    rows, heads, _, size = q.shape
    kv_heads, length = keys.shape[1:3]
    splits = splits_for(rows, kv_heads, length)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(rows, heads, 1, dtype=torch.float32, device=q.device)
    pieces = torch.empty(splits * rows * heads * (size + 2), dtype=torch.float32, device=q.device)
    arrived = torch.zeros(rows * kv_heads, dtype=torch.int32, device=q.device)
    steps = (0, 0, 0)
    if mask is not None:
        steps = mask.expand(rows, heads, 1, length).stride()
        steps = (steps[0], steps[1], steps[3])
    _one_query[rows * kv_heads, splits](
        q, keys, values, q if mask is None else mask, out, lse, pieces, arrived, scale, length, q.stride(0),
        q.stride(1), *keys.stride()[:3], *values.stride()[:3], *steps, KV_HEADS=kv_heads, GROUP=heads // kv_heads,
        HALF=size // 2, MASK=0 if mask is None else 1 if mask.dtype == torch.bool else 2,
        **_shape(splits, size * keys.element_size()),
    )  # fmt: skip
    return out, lse
