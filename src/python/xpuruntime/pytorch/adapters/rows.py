# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overrides for ``softmax`` and ``cross_entropy``, of all that calls PyTorch's functions, as losses of models do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from xpuruntime.pytorch.adapters.in_place import UNUSUAL, decides, is_usual, run_original
from xpuruntime.pytorch.dispatch.overrides.native import Override
from xpuruntime.pytorch.providers.operators import perform

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.pytorch.dispatch.overrides.native import Native

__all__ = ["OVERRIDES"]

#: Of PyTorch's numbers for reductions.
_REDUCTIONS = ("none", "mean", "sum")
_OTHER_ROWS = "it is for the last dimension of floating-point numbers"
_UNSERVED = "it is for rows of logits and class indices, without class weights and label smoothing"


def _cross_entropy(native: Native) -> Callable[..., Any]:
    def cross_entropy_loss(
        keyset: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Any:
        args = (logits, target, weight, reduction, ignore_index, label_smoothing)
        if not decides("cross_entropy", logits):
            return native(keyset, *args)
        rows = logits.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
        why = _UNSERVED if not rows or weight is not None or label_smoothing else ""
        if not why and not torch.compiler.is_compiling() and not is_usual(logits, target):
            why = UNUSUAL
        if why:
            return run_original(
                "cross_entropy", functional.cross_entropy, lambda *inputs: native(keyset, *inputs), args, logits, why
            )
        attributes = {"ignore_index": ignore_index, "reduction": _REDUCTIONS[reduction]}
        return perform("cross_entropy", {"logits": logits, "target": target}, attributes)

    return cross_entropy_loss


def _softmax(native: Native) -> Callable[..., Any]:
    def softmax(keyset: Any, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if not decides("softmax", x):
            return native(keyset, x, dim, dtype)
        why = _OTHER_ROWS if x.dim() < 1 or dim % x.dim() != x.dim() - 1 or not x.is_floating_point() else ""
        if not why and not torch.compiler.is_compiling() and not is_usual(x):
            why = UNUSUAL
        if why:
            run = lambda *inputs: native(keyset, *inputs)  # noqa: E731 - as of a loss
            return run_original("softmax", functional.softmax, run, (x, dim, dtype), x, why)
        return perform("softmax", {"x": x if dtype is None else x.to(dtype)}, {})

    return softmax


OVERRIDES = (
    Override("softmax.int", "softmax", ("CompositeImplicitAutograd",), _softmax),
    Override("cross_entropy_loss", "cross_entropy", ("CompositeImplicitAutograd",), _cross_entropy),
)
