# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operations described for the kernels: what a node will bring, with a stand-in for sizes that are not known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.onnxruntime.rewriting.graph import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.engines.onnxruntime.rewriting.graph import Dim, Shape

__all__ = ["Terms", "known_product", "operand", "same", "sizes"]

_NAMES = {"fp32": "float32", "fp16": "float16", "fp64": "float64", "bf16": "bfloat16", "bool": "bool"}


class Terms(NamedTuple):
    """What holds for every node of a session."""

    device: str
    allow_tf32: bool = False
    deterministic: bool = False

    def describe(
        self, op: str, operands: dict[str, dict[str, Any]], attributes: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return an operation as `KernelRegistry.supports` takes it."""
        given = dict(attributes or {}, deterministic=self.deterministic)
        for one in operands.values():
            one["alignment"] = 256 if self.device.startswith("cuda") else 64
        return {"op": op, "phase": "infer", "device": self.device, "operands": operands, "attributes": given}

    def rounds(self, dtype: str | None) -> bool:
        """Whether products of this type may be rounded to TF32."""
        return self.allow_tf32 and dtype == "fp32" and self.device.startswith("cuda")


def operand(dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> dict[str, Any]:
    """Return one operand, contiguous unless strides are given."""
    made: dict[str, Any] = {"dtype": _NAMES[dtype], "shape": tuple(shape)}
    if strides is not None:
        made["strides"] = tuple(strides)
    return made


def sizes(shape: Shape, stand_in: int) -> list[int]:
    """Return the sizes of a shape, with `stand_in` for those that are not known."""
    return [found if (found := number(dim)) is not None else stand_in for dim in shape]


def known_product(shape: Shape) -> int | None:
    """Return the product of all sizes, or ``None`` where one is not known."""
    numbers = [number(dim) for dim in shape]
    return math.prod(n for n in numbers if n is not None) if None not in numbers else None


def same(a: Dim, b: Dim) -> bool:
    """Whether two dimensions are known to have one size."""
    return bool(a & b)
