# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Override for ``cross_entropy``, of all that calls ``torch.nn.functional.cross_entropy``, as losses of models do."""

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


OVERRIDES = (Override("cross_entropy_loss", "cross_entropy", ("CompositeImplicitAutograd",), _cross_entropy),)
