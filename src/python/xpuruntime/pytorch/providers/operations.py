# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operations that kernels of other packages serve: one row for each, with what it computes."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

__all__ = ["OPERATIONS", "Operation", "rms_norm"]


class Operation(NamedTuple):
    """An operation: the names of its operands, and what it computes, by PyTorch's own differentiable operations.

    `reference` is called with the tensors, then with the attributes by name, of which `defaults` are added where a call
    states none. `without_gradient` names operands such as labels.
    """

    name: str
    operands: tuple[str, ...]
    reference: Callable[..., Any]
    without_gradient: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = MappingProxyType({})


def rms_norm(x: Tensor, weight: Tensor | None = None, *, epsilon: float, formula: str = "torch") -> Tensor:
    """Return the RMS norm of rows by one of the formulas that model classes have, bit for bit.

    ``"torch"``: ``(n * w).to(x)``, as ``F.rms_norm``; ``"llama"``: ``w * n.to(x)``; ``"gemma"``:
    ``(n * (1 + w)).to(x)``, where n is the normalised row in float32.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight is None:
        return normal.to(x.dtype)
    if formula == "llama":
        return weight * normal.to(x.dtype)
    return (normal * (1.0 + weight.to(wide.dtype) if formula == "gemma" else weight)).to(x.dtype)


#: Operation to its row.
OPERATIONS: dict[str, Operation] = {
    row.name: row for row in (Operation("rms_norm", ("x", "weight"), rms_norm, defaults={"formula": "torch"}),)
}
