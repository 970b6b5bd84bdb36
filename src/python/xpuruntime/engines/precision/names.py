# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names of precisions in reports: ``"fp16"`` for values of float16, ``"fp32->uint8"`` where input and output differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FLOATS", "main_precision", "meets", "precision_name", "read_and_written"]

#: Precisions that are floating point.
FLOATS = frozenset({"fp64", "fp32", "fp16", "bf16", "fp8"})
#: By name of an element type: the name in reports, and ONNX's where that is another.
_NAMES = {
    "double": "fp64",
    "float64": "fp64",
    "float": "fp32",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8e4m3fn": "fp8",
    "float8e4m3fnuz": "fp8",
    "float8e5m2": "fp8",
    "float8e5m2fnuz": "fp8",
}


def precision_name(dtype: str) -> str:
    """Return the precision of an element type: ``"fp16"`` for ``"float16"``. Integers keep their names."""
    return _NAMES.get(dtype, dtype)


def read_and_written(read: str | None, written: str | None) -> str | None:
    """Return one precision for what is read and what is written, ``"fp32->uint8"`` where these differ."""
    if read is None or written is None or read == written:
        return written or read
    return f"{read}->{written}"


def main_precision(tensors: Iterable[tuple[str | None, int]]) -> str | None:
    """Return the precision that counts among several tensors, given as precision and number of elements.

    It is that of the largest one, and of equally large ones a floating-point one: neither the scales of a quantized
    operator nor the condition of a Where say in what precision it computes. ``None`` where none is known.
    """
    known = [(elements, name in FLOATS, name) for name, elements in tensors if name is not None]
    return max(known, key=lambda one: one[:2])[2] if known else None


def meets(wanted: str | None, ran: str) -> bool:
    """Say whether what ran is the precision asked for; int8 is met by 8 bits with and without a sign."""
    parts = ran.split("->")
    return wanted is None or wanted in parts or (wanted == "int8" and "uint8" in parts)
