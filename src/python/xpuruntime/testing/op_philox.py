# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`dropout_factors`: which attention weights a dropout drops whose random numbers are given."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["dropout_factors"]


def dropout_factors(p: float, seed: int, offset: int, shape: tuple[int, int, int, int]) -> np.ndarray[Any, Any]:
    """Return what multiplies each attention weight: 0 or ``1 / (1 - p)``, by Philox4x32-10.

    The counter is (column & ~1, row & ~8, batch * heads + head, offset) in 32 bits each, the key the halves of `seed`
    with the upper half of `offset` added bit by bit; the word is 2 * (row / 8 % 2) + column % 2.
    """
    p = float(np.float32(p))
    batch, heads, rows, columns = shape
    mask32 = np.uint64(0xFFFFFFFF)
    head = np.arange(batch * heads, dtype=np.uint64).reshape(batch, heads, 1, 1)
    row = np.arange(rows, dtype=np.uint64).reshape(1, 1, rows, 1)
    column = np.arange(columns, dtype=np.uint64)
    even = column & ~np.uint64(1)
    counter = [
        np.broadcast_to(one, shape).copy() for one in (even, row & ~np.uint64(8), head, np.uint64(offset & 0xFFFFFFFF))
    ]
    key = [seed & 0xFFFFFFFF, (seed >> 32 & 0xFFFFFFFF) ^ (offset >> 32 & 0xFFFFFFFF)]
    for _ in range(10):
        a, b = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (b >> np.uint64(32)) ^ counter[1] ^ np.uint64(key[0]),
            b & mask32,
            (a >> np.uint64(32)) ^ counter[3] ^ np.uint64(key[1]),
            a & mask32,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    word = 2 * ((row >> np.uint64(3)) & np.uint64(1)) + (column & np.uint64(1))
    chosen = np.choose(np.broadcast_to(word, shape).astype(np.int64), counter)
    return np.where(chosen >= np.uint64(int(p * 2.0**32)), 1 / (1 - p), 0.0)
