# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Product`: one call of a matrix product of PyTorch's, in the one form that all of them have."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.pytorch import _private_api

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.ops.call_context import CallContext

_op_matmul = _core.op_matmul
is_deterministic = _private_api.is_deterministic
fp32_precision = _private_api.fp32_precision

#: Types that a policy for matmul decides. Products of integers and of complex numbers stay PyTorch's own.
FLOATS = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
_HALVES = frozenset((torch.float16, torch.bfloat16))
_NUMBERS = frozenset((int, float, bool))
#: Larger factors do not fit the type that PyTorch computes in, which refuses them.
_LARGEST = {torch.float64: float(torch.finfo(torch.float64).max)}
_LARGEST_FLOAT = float(torch.finfo(torch.float32).max)


class GemmPlan:
    """How xpuruntime kernels do calls of one kind."""

    __slots__ = ("adds", "copies", "direct", "dtype", "folds", "has_tf32", "out_dtype", "plain", "scales", "shape")

    def __init__(self, product: Product) -> None:
        a, b, c = product.a, product.b, product.c
        self.shape = (*a.shape[:-1], b.shape[-1])
        self.dtype = product.out_dtype or a.dtype
        self.copies = (not _readable(a), not _readable(b))
        uses = c is not None and product.beta != 0
        self.scales = product.alpha != 1
        n = b.shape[-1]
        self.folds = (
            c is not None
            and product.beta == 1
            and not self.scales
            and self.dtype == a.dtype
            and c.dtype == a.dtype
            and c.numel() == n
            and (c.dim() == 0 or c.shape[-1] == n)
        )
        self.adds = uses and not self.folds
        out = product.out
        self.direct = out is not None and tuple(out.shape) == self.shape and out.is_contiguous()
        self.has_tf32 = a.dtype is torch.float32 and a.device.type == "cuda"
        self._settle(a.dtype)

    def _settle(self, dtype: torch.dtype) -> None:
        self.plain = not self.adds and not self.scales
        wide = self.dtype if self.plain else torch.float32 if dtype in _HALVES else dtype
        self.out_dtype = None if wide == dtype else "float32"
        self.direct = self.direct and self.plain

    def is_quick(self, product: Product) -> bool:
        """Say whether xpuruntime kernels take the arrays of such calls as they are, and no switch but determinism."""
        c = product.c
        return (
            self.plain
            and self.out_dtype is None
            and not any(self.copies)
            and (product.out is None or self.direct)
            and (c is None or (self.folds and c.dim() == 1 and c.is_contiguous()))
            and not self.has_tf32
        )

    def unfolded(self) -> GemmPlan:
        """Return one by which the addend is added afterwards, for a kernel that adds none."""
        other = copy.copy(self)
        other.folds, other.adds = False, True
        other._settle(self.dtype)
        return other


@dataclass(slots=True, eq=False, repr=False)
class Product:
    """``activation(beta * c + alpha * (a @ b))`` of matrices, or of batches of them."""

    a: Tensor
    b: Tensor
    c: Tensor | None = None
    rank: int = field(kw_only=True)
    beta: Any = 1
    alpha: Any = 1
    activation: str | None = None
    out_dtype: torch.dtype | None = None
    out: Tensor | None = None

    @property
    def native(self) -> bool:
        """Whether PyTorch's own kernel is to be called whatever the policy says.

        So it is for what is no product of floats, for an empty one, where nothing is multiplied (``alpha=0``), for
        factors that are not finite, and for arguments that PyTorch refuses, in its own words.
        """
        a, b, c, out = self.a, self.b, self.c, self.out
        if a.dim() != self.rank or b.dim() != self.rank:
            return True
        if a.dtype not in FLOATS or a.numel() == 0 or b.numel() == 0 or self.alpha == 0:
            return True
        if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
            return True
        if b.dtype != a.dtype or b.device != a.device:
            return True
        if type(self.beta) not in _NUMBERS or type(self.alpha) not in _NUMBERS:
            return True
        largest = _LARGEST.get(a.dtype, _LARGEST_FLOAT)
        if not (abs(self.beta) <= largest and abs(self.alpha) <= largest):  # neither if one is nan
            return True
        dtype = self.out_dtype or a.dtype
        if dtype != a.dtype and not (dtype == torch.float32 and a.dtype in _HALVES):
            return True
        if c is not None:
            shape = (*a.shape[:-1], b.shape[-1])
            fits = c.dim() <= len(shape) and all(
                have in (1, want) for have, want in zip(reversed(c.shape), reversed(shape), strict=False)
            )
            if not fits or c.device != a.device or c.dtype not in (dtype, a.dtype):
                return True
            if out is not None and c is out and out.shape != shape:  # in place, nothing is expanded
                return True
        return out is not None and (out.dtype != dtype or out.device != a.device or _shares_within(out))

    def compute(self, plan: GemmPlan, context: CallContext, phase: str | None) -> Tensor:
        """Compute it by xpuruntime kernels."""
        a, b, out = self.a, self.b, self.out
        if plan.copies[0]:
            a = a.contiguous()
        if plan.copies[1]:
            b = b.contiguous()
        bias = None
        if plan.folds:
            assert self.c is not None
            bias = self.c.reshape(-1).contiguous()
        # PyTorch leaves open what comes of an `out` that shares memory with an operand; here it is the product.
        into = out if plan.direct and out is not None and not _overlap(out, a, b, bias) else None
        activation = self.activation if plan.plain else None
        result = _op_matmul(context, a, b, bias, None, None, into, activation, plan.out_dtype, phase, None)
        if not plan.plain:
            result = self._finish(result, plan)
        if out is None or into is not None:
            return result
        return _private_api.resize_out()(out, plan.shape).copy_(result)

    def _finish(self, result: Tensor, plan: GemmPlan) -> Tensor:
        if plan.scales:
            result.mul_(float(self.alpha))
        if plan.adds:
            assert self.c is not None
            result.add_(self.c, alpha=float(self.beta))
        if self.activation == "relu":
            result.relu_()
        elif self.activation is not None:
            torch.ops.aten.gelu_(result, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return result.to(plan.dtype)


def _readable(matrix: Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    by_rows = across == 1 and (down >= columns or rows == 1)
    return bool(by_rows or (down == 1 and (across >= rows or columns == 1)))


def _shares_within(out: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True))


def _overlap(out: Tensor, *operands: Tensor | None) -> bool:
    first, last = _span(out)
    spans = (_span(operand) for operand in operands if operand is not None)
    return any(start < last and first < end for start, end in spans)


def _span(x: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()
