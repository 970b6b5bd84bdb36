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

rows_product: Any
try:
    from xpuruntime.pytorch.generation.rows_product import rows_product
except ImportError:  # this Triton has no Gluon, or none with these tensor cores
    rows_product = None

__all__ = ["attend", "product", "splits_for", "ways"]

_LOG2E = tl.constexpr(1.4426950408889634)
#: Positions of the cache that a program of attention reads at once.
_TILE = 64
_WARPS = 4
#: Bytes of keys and values that a program of attention reads at once, at most.
_STAGE = 64 << 10
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
def _with_tile(low, high, key_low, key_high, value, seen, most, weight, total, factor, TYPE: tl.constexpr):
    """Go on with softmax and its product over a tile of the cache; `most` is the largest score so far."""
    scores = tl.dot(low, tl.trans(key_low), input_precision="ieee")
    scores = tl.dot(high, tl.trans(key_high), scores, input_precision="ieee") * factor
    scores = tl.where(seen[None, :], scores, -float("inf"))
    higher = tl.maximum(most, tl.max(scores, axis=1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    shares = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(most - safe)
    total = tl.dot(shares.to(TYPE), value, total * shrink[:, None], input_precision="ieee")
    return higher, weight * shrink + tl.sum(shares, axis=1), total


@triton.jit
def _tile_of(keys, values, mask, first, end, t, d, whole, HALF: tl.constexpr):
    there = first + t < end
    at = (first + t)[:, None] * (2 * HALF)
    key_low = tl.load(keys + at + d[None, :], mask=there[:, None], other=0.0)
    key_high = tl.load(keys + at + HALF + d[None, :], mask=there[:, None], other=0.0)
    value = tl.load(values + at + whole[None, :], mask=there[:, None], other=0.0)
    seen = there & (tl.load(mask + first + t, mask=there, other=0) != 0)
    return key_low, key_high, value, seen


@triton.jit
def _attend(qkv, keys, values, cos, sin, mask, length, position, q_norm, k_norm, out, partial, arrived, scale, eps,
            room, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
            SPLITS: tl.constexpr, NORM: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """One new token: rotate it, put it into the cache, and attend to what is there."""
    TYPE: tl.constexpr = keys.dtype.element_ty
    HEAD: tl.constexpr = 2 * HALF
    QUERIES: tl.constexpr = 16
    place = tl.program_id(0)
    split = tl.program_id(1)
    batch = place // KV_HEADS
    head = place % KV_HEADS
    g = tl.arange(0, QUERIES)
    d = tl.arange(0, HALF)
    whole = tl.arange(0, HEAD)
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
    keys += place.to(tl.int64) * room * HEAD
    values += place.to(tl.int64) * room * HEAD
    mask += batch.to(tl.int64) * room
    first_low, first_high, first_value, first_seen = _tile_of(keys, values, mask, begin, end, t, d, whole, HALF)
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
    most = tl.full([QUERIES], -float("inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, HEAD], tl.float32)
    if split == 0:
        new = token + (GROUP * KV_HEADS + head) * HEAD
        new_low, new_high = tl.load(new + d).to(tl.float32), tl.load(new + HALF + d).to(tl.float32)
        if NORM:
            new_low, new_high = _head_norm(new_low, new_high, k_norm, d, eps, HALF, 0, TYPE)
        new_low, new_high = _turned(new_low, new_high, cos_low, cos_high, sin_low, sin_high, TYPE)
        new_value = tl.load(new + KV_HEADS * HEAD + whole)
        tl.store(keys + slot * HEAD + d, new_low)
        tl.store(keys + slot * HEAD + HALF + d, new_high)
        tl.store(values + slot * HEAD + whole, new_value)
        most = tl.sum(low.to(tl.float32) * new_low.to(tl.float32)[None, :], axis=1)
        most += tl.sum(high.to(tl.float32) * new_high.to(tl.float32)[None, :], axis=1)
        most *= factor
        weight += 1.0
        total += new_value.to(tl.float32)[None, :]
    most, weight, total = _with_tile(
        low, high, first_low, first_high, first_value, first_seen, most, weight, total, factor, TYPE
    )
    for start in tl.range(begin + TILE, end, TILE, num_stages=3):
        key_low, key_high, value, seen = _tile_of(keys, values, mask, start, end, t, d, whole, HALF)
        most, weight, total = _with_tile(low, high, key_low, key_high, value, seen, most, weight, total, factor, TYPE)
    to = out + (place * GROUP + g[:, None]) * HEAD + whole[None, :]
    if SPLITS == 1:
        tl.store(to, (total / weight[:, None]).to(TYPE), mask=alive)
    else:
        PIECE: tl.constexpr = GROUP * (HEAD + 2)
        piece = partial + (place * SPLITS + split) * PIECE
        tl.store(piece + g[:, None] * HEAD + whole[None, :], total, mask=alive)
        tl.store(piece + GROUP * HEAD + g, most, mask=g < GROUP)
        tl.store(piece + GROUP * (HEAD + 1) + g, weight, mask=g < GROUP)
        tl.debug_barrier()
        if tl.atomic_add(arrived + place, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            # The last to arrive puts the pieces together, in their order, so that the bits are always the same.
            tl.store(arrived + place, 0)
            most = tl.full([QUERIES], -float("inf"), tl.float32)
            weight = tl.zeros([QUERIES], tl.float32)
            total = tl.zeros([QUERIES, HEAD], tl.float32)
            for number in tl.static_range(SPLITS):
                piece = partial + (place * SPLITS + number) * PIECE
                other = tl.load(piece + GROUP * HEAD + g, mask=g < GROUP, other=0.0, cache_modifier=".cg")
                added = tl.load(piece + GROUP * (HEAD + 1) + g, mask=g < GROUP, other=1.0, cache_modifier=".cg")
                there = tl.load(piece + g[:, None] * HEAD + whole[None, :], mask=alive, other=0.0, cache_modifier=".cg")
                higher = tl.maximum(most, other)
                shrink, grow = tl.exp2(most - higher), tl.exp2(other - higher)
                total = total * shrink[:, None] + there * grow[:, None]
                weight = weight * shrink + added * grow
                most = higher
            tl.store(to, (total / weight[:, None]).to(TYPE), mask=alive)


def _early(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0))


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
    if (way or ways(rows, x.dtype)[0]) == _LIBRARY:
        x = x if norm is None else F.rms_norm(x, (columns,), *norm)
        added = residual if bias is None else bias if residual is None else residual + bias
        if gated:
            gate, up = F.linear(x, weight, bias).chunk(2, -1)
            torch.mul(F.silu(gate), up, out=out)
        elif out.dtype != x.dtype:
            out.copy_(F.linear(x, weight, added))
        elif added is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(added, x, weight.t(), out=out)
        return
    early = _early(x)
    if rows > 1:
        rows_product(x, weight, out, norm=norm, bias=bias, residual=residual, gated=gated, early=early)
        return
    count = weight.shape[0] // (2 if gated else 1)
    scale, eps = norm or (x, 0.0)
    _row_product[triton.cdiv(count, _BLOCK_N),](
        x, scale, weight, x if bias is None else bias, x if residual is None else residual, out, eps, N=count,
        K=columns, NORM=norm is not None, BIAS=bias is not None, RESIDUAL=residual is not None, GATED=gated,
        BLOCK_N=_BLOCK_N, BLOCK_K=2048 if norm is None else 1024, num_warps=2 if gated else 4, EARLY=early,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def splits_for(rows: int, kv_heads: int, extent: int) -> int:
    """Return how many programs share the positions of a head: enough for the chip, none with less than a tile."""
    return max(1, min(-(-extent // _TILE), 16, -(-264 // (rows * kv_heads))))


def attend(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
    length: torch.Tensor,
    position: torch.Tensor,
    out: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor],
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
    scratch : tuple of torch.Tensor
        Float32 for the pieces of split heads, and zeros that count who has arrived.
    """
    rows, kv_heads, room, size = keys.shape
    group = qkv.shape[1] // (kv_heads * size) - 2
    splits = splits_for(rows, kv_heads, extent)
    early = _early(qkv)
    q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
    tile = min(_TILE, _STAGE // (2 * size * keys.element_size()))
    _attend[rows * kv_heads, splits](
        qkv, keys, values, *turns, mask, length, position, q_norm, k_norm, out, *scratch, scale, eps, room,
        KV_HEADS=kv_heads, GROUP=group, HALF=size // 2, SPLITS=splits, NORM=norms is not None,
        TILE=tile, EARLY=early, num_warps=_WARPS, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
