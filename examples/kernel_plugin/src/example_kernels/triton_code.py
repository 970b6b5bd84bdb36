# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
# ruff: noqa: ANN001, ANN201, D103, N803 - Triton gives arguments their types, and has names of its own
"""The part that needs Triton to be imported."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["layer_norm"]


@triton.jit
def layer_norm(x, weight, bias, y, mean, rstd, x_stride, y_stride, columns, epsilon, BLOCK: tl.constexpr):
    # One program a row. 64 bits, for rows times stride may be more than 32 have.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    middle = tl.sum(values, axis=0) / columns
    centred = tl.where(inside, values - middle, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + epsilon)
    result = centred * scale
    # What is None is known when this is compiled.
    if weight is not None:
        result = result * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        result = result + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + at, result.to(y.dtype.element_ty), mask=inside)
    if mean is not None:
        tl.store(mean + row, middle)
    if rstd is not None:
        tl.store(rstd + row, scale)
