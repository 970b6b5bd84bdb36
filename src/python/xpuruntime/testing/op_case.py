# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One op case: a call of a function of `xpuruntime.ops` with random inputs, and what is expected of it.

`OpCase.build` makes fresh inputs from a seed, and what is expected of them in float64 with its bounds (see
`op_references`). Names are ``op/what/dtype``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xpuruntime.testing.op_arrays import Input
from xpuruntime.testing.op_references import Expected, round_to

__all__ = ["DTYPES", "Draw", "OpCall", "OpCase"]


@dataclass(frozen=True)
class OpCall:
    """What a case calls, and what it expects."""

    inputs: dict[str, Input]
    options: dict[str, Any]
    expected: list[Expected]
    outputs: dict[str, int]
    order: tuple[int, ...] | None = None
    weights: Expected | None = None

    @property
    def empty(self) -> bool:
        """Whether no result has an element, so that no kernel is needed."""
        return all(tensor.values.size == 0 for tensor in self.expected)


@dataclass(frozen=True)
class OpCase:
    """One case; see the module's text."""

    name: str
    op: str
    function: str
    build: Callable[..., OpCall] = field(repr=False)
    dropout: bool = False

    def call(self, seed: int = 0, **factors: Any) -> OpCall:
        """Return the call with the inputs of a seed, the same each time."""
        return self.build(np.random.default_rng([seed, zlib.crc32(self.name.encode())]), **factors)


class Draw:
    """Random values as a dtype has them."""

    def __init__(self, random: np.random.Generator, dtype: str) -> None:
        self.random = random
        self.dtype = dtype

    def normal(self, *shape: int, dtype: str | None = None, scale: float = 1.0, offset: float = 0.0) -> Any:
        """Return normally distributed numbers in float64, rounded to the dtype."""
        return round_to(self.random.standard_normal(shape) * scale + offset, dtype or self.dtype)

    def input(self, values: Any, dtype: str | None = None, **layout: Any) -> Input:
        """Return values that are rounded already as an input."""
        return Input(values, dtype or self.dtype, **layout)


#: Dtypes that every operation knows.
DTYPES = ("float64", "float32", "float16", "bfloat16")
