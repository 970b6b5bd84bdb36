# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Op cases: calls of `xpuruntime.ops` with random inputs, and their arrays as a kernel gets them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from xpuruntime.errors import InputError
from xpuruntime.testing.op_references import FP8_SUMS, Expected, round_to


@dataclass(frozen=True)
class Input:
    """One input of a case."""

    values: np.ndarray[Any, Any]
    dtype: str
    order: tuple[int, ...] | None = None
    gap: int = 0
    pad: int = 0
    reverse: bool = False
    repeat: bool = False


class Arrays(Protocol):
    """Makes arrays of one library on one device."""

    #: Whether the library has views that run backwards.
    reverses: bool

    @property
    def fp8_sums(self) -> float:
        """What sums of float8 products may be wrong by on the device, as a part of the sum of absolute products."""

    def make(self, input_: Input) -> Any:
        """Return the values in the dtype and layout asked for."""

    def poison(self, shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None) -> Any:
        """Return an array full of 0xFF, which is NaN in every floating-point type."""

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        """Return the values as float64, bool or int64, after all work on them."""

    def dtype(self, array: Any) -> str:
        """Return the name of the dtype."""


def _spread(shape: tuple[int, ...], input_: Input) -> tuple[tuple[int, ...], tuple[slice, ...], tuple[int, ...]]:
    order = input_.order or tuple(range(len(shape)))
    memory = [shape[i] for i in order]
    used = [slice(None)] * len(memory)
    if memory and (input_.gap or input_.pad):
        step = input_.gap + 1
        used[-1] = slice(0, memory[-1] * step, step)
        memory[-1] = memory[-1] * step + input_.pad
    back = tuple(order.index(i) for i in range(len(order)))
    return tuple(memory), tuple(used), back


class NumpyArrays:
    """NumPy arrays on the CPU; bfloat16 and float8 need ``ml_dtypes``."""

    reverses = True
    fp8_sums = 0.0

    def make(self, input_: Input) -> Any:
        """Return the values in the dtype and layout asked for."""
        shape = input_.values.shape[1:] if input_.repeat else input_.values.shape
        values = input_.values[0] if input_.repeat else input_.values
        memory, used, back = _spread(shape, input_)
        array = self._full(memory, input_.dtype)[used].transpose(back)
        if input_.reverse:
            array = array[::-1]
        with np.errstate(over="ignore"):
            array[...] = values.astype(array.dtype)
        return np.broadcast_to(array, input_.values.shape) if input_.repeat else array

    def poison(self, shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None) -> Any:
        """Return an array full of 0xFF."""
        memory, used, back = _spread(shape, Input(np.empty(0), dtype, order=order))
        return self._full(memory, dtype)[used].transpose(back)

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        """Return the values as float64, bool or int64."""
        values = np.asarray(array)
        return values.copy() if values.dtype.kind in "biu" else values.astype(np.float64)

    def dtype(self, array: Any) -> str:
        """Return the name of the dtype."""
        return str(np.asarray(array).dtype)

    @staticmethod
    def _full(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
        plain: Any = dtype
        if dtype in ("bfloat16", "float8_e4m3fn"):
            try:
                import ml_dtypes
            except ImportError as error:
                msg = f"NumPy has no {dtype} without ml_dtypes: pip install ml_dtypes"
                raise InputError(msg) from error
            plain = getattr(ml_dtypes, dtype)
        array = np.empty(shape, plain)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array


class TorchArrays:
    """PyTorch tensors on one device."""

    reverses = False

    def __init__(self, device: str = "cuda") -> None:
        self.device = device

    @property
    def fp8_sums(self) -> float:
        """`FP8_SUMS` on NVIDIA GPUs that add products of float8 with about 14 bits, else 0."""
        import torch

        if torch.device(self.device).type != "cuda" or torch.cuda.get_device_capability(self.device) >= (10, 0):
            return 0.0
        return FP8_SUMS

    def make(self, input_: Input) -> Any:
        """Return the values in the dtype and layout asked for."""
        import torch

        if input_.reverse:
            raise InputError("PyTorch has no views that run backwards")
        shape = input_.values.shape[1:] if input_.repeat else input_.values.shape
        values = input_.values[0] if input_.repeat else input_.values
        memory, used, back = _spread(shape, input_)
        array = self._full(memory, input_.dtype)[used].permute(back)
        array.copy_(torch.from_numpy(np.array(values, order="C")).to(self.device))
        return array.expand(input_.values.shape) if input_.repeat else array

    def poison(self, shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None) -> Any:
        """Return an array full of 0xFF."""
        memory, used, back = _spread(shape, Input(np.empty(0), dtype, order=order))
        return self._full(memory, dtype)[used].permute(back)

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        """Return the values as float64, bool or int64."""
        import torch

        plain = array.double() if array.dtype.is_floating_point else array
        result: np.ndarray[Any, Any] = torch.asarray(plain).cpu().numpy().copy()
        return result

    def dtype(self, array: Any) -> str:
        """Return the name of the dtype."""
        return str(array.dtype).removeprefix("torch.")

    def _full(self, shape: tuple[int, ...], dtype: str) -> Any:
        import torch

        array = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
        if array.numel():
            array.reshape(-1).view(torch.uint8).fill_(0xFF)
        return array


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
        np.broadcast_to(factor, shape).copy()
        for factor in (even, row & ~np.uint64(8), head, np.uint64(offset & 0xFFFFFFFF))
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
