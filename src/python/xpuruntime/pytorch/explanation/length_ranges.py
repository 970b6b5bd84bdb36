# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ranges of lengths: what keeps the evidence of generation from growing with its tokens and prompts.

A range ends at a power of two and begins above the one before. Outside of training, the lengths of an attention count
by their range, and so do the sizes of batched products, which an attention is made of that is not fused. In a prefill
the rows do of all operations.
"""

from __future__ import annotations

from typing import TypeAlias

from xpuruntime.pytorch.attention.call import last_of_range, phase_of

__all__ = ["kv_range", "phase_of_call", "ranged"]

Shapes: TypeAlias = "tuple[tuple[int, ...], ...]"

#: Calls of attention by queries, keys and values that are ``[..., length, head_dim]``.
_ATTENTIONS = ("scaled_dot_product_attention", "xpuruntime::attention")
_TRAINING = ("train", "backward")
_MATRIX = 2


def phase_of_call(op: str, name: str, phase: str, shapes: Shapes) -> str:
    """Return the phase of a recorded call: of an attention, its sizes may say more than what runs around it."""
    lengths = _lengths(op, name, shapes)
    return phase if lengths is None else phase_of(phase, *lengths)


def kv_range(op: str, name: str, phase: str, shapes: Shapes) -> str:
    """Return the range in which the keys and values of an attention lie, such as ``"33..64"``; of others nothing."""
    lengths = _lengths(op, name, shapes)
    if lengths is None or phase in _TRAINING or lengths[1] < 1:
        return ""
    last = last_of_range(lengths[1])
    return f"{last // 2 + 1}..{last}"


def ranged(op: str, name: str, phase: str, shapes: Shapes) -> Shapes:
    """Return shapes in which each length that tells no kinds of calls apart is the last of its range."""
    if phase in _TRAINING:
        return shapes
    if _lengths(op, name, shapes) is not None:
        dense = [(*shape[:-2], last_of_range(shape[-2]), shape[-1]) for shape in shapes[:3]]
        return (*dense, *(tuple(map(last_of_range, shape)) for shape in shapes[3:]))  # a mask has both lengths
    if op == "matmul" and max(map(len, shapes), default=0) > _MATRIX:
        return tuple((shape[0], *map(last_of_range, shape[1:])) for shape in shapes if shape)
    if phase != "prefill":
        return shapes
    if op == "matmul":
        rows = next((shape[0] for shape in shapes if len(shape) == _MATRIX), 0)
        return tuple((last_of_range(rows), *shape[1:]) if shape[:1] == (rows,) else shape for shape in shapes)
    return tuple((*map(last_of_range, shape[:-1]), *shape[-1:]) for shape in shapes)


def _lengths(op: str, name: str, shapes: Shapes) -> tuple[int, int] | None:
    """Return how many queries and keys an attention has, where its shapes say it."""
    if op != "attention" or name not in _ATTENTIONS or len(shapes) < 2 or min(map(len, shapes[:2])) < _MATRIX:
        return None
    return shapes[0][-2], shapes[1][-2]
