# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operations that kernels of other packages serve: one row for each, with what it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.ops.torch_kernels import TorchCall

_HALVES = (
    "it reads one half of cos and sin, and that the other repeats it is seen in eager code alone. Fix: leave rope to "
    "the compiler, or run the model once before a capture"
)


class Operation(NamedTuple):
    """An operation: the names of its operands, and what it computes, by PyTorch's own differentiable operations.

    `reference` is called with the tensors, then with the attributes by name, of which `defaults` are added where a call
    states none. `without_gradient` names operands such as labels, of which kernels compute no gradient. With `large`, a
    call whose gradient is wanted of some operands alone says so to the kernel, by the attribute ``needs``, as others
    are too large to be computed in vain. `linear` are operands whose gradient depends on none of them, nor on outputs:
    these lie in memory as they do, and gradients as those of outputs.
    `part` names an operation of the table that is a part of it: `reference` takes the function for it by that name.
    `results` is the number of its outputs.
    """

    name: str
    operands: tuple[str, ...]
    reference: Callable[..., Any]
    without_gradient: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = MappingProxyType({})
    large: bool = False
    writes: int = 0
    part: str = ""
    linear: tuple[str, ...] = ()
    results: int = 1


def rms_norm(x: Tensor, weight: Tensor | None = None, *, epsilon: float, formula: str = "torch") -> Tensor:
    """Return the RMS norm of rows by one of the formulas that model classes have, bit for bit.

    ``"torch"``: ``(n * w).to(x)``, as ``F.rms_norm``; ``"llama"``: ``w * n.to(x)``; ``"gemma"``:
    ``(n * (1 + w)).to(x)``, where n is the normalized row in float32.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight is None:
        return normal.to(x.dtype)
    if formula == "llama":
        return weight * normal.to(x.dtype)
    return (normal * (1.0 + weight.to(wide.dtype) if formula == "gemma" else weight)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU of a gate times its input."""
    return functional.silu(gate) * up


def geglu(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    """Return GELU of a gate times its input; `approximate` is that of ``F.gelu``."""
    return functional.gelu(gate, approximate=approximate) * up


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, mirrored: bool = False) -> tuple[Tensor, Tensor]:
    """Return queries and keys rotated by position, the halves of the last dimension against each other.

    `cos` and `sin` are broadcast over heads: ``[batch, 1, length, head_dim]`` for ``[batch, heads, length, head_dim]``.
    `mirrored` says that their second halves repeat the first, so that a kernel may read these alone.
    """
    del mirrored
    return q * cos + _rotated(q) * sin, k * cos + _rotated(k) * sin


def is_rotation(call: TorchCall) -> tuple[bool, str]:
    """Say whether a kernel that reads the first halves of cos and sin can serve a call of ``rope``, and if not why."""
    q, k, cos, sin = (call.operands[name] for name in ("q", "k", "cos", "sin"))
    if not call.attributes["mirrored"]:
        return False, _HALVES
    if len({operand.dtype for operand in (q, k, cos, sin)}) > 1:
        return False, "queries, keys, cos and sin have to be of one type"
    batch, _, length, columns = q.shape
    if (k.shape[0], *k.shape[2:]) != (batch, length, columns) or cos.shape != sin.shape:
        return False, "queries and keys have to be alike but for their heads, and cos and sin of one shape"
    if cos.shape not in ((1, 1, length, columns), (batch, 1, length, columns)):
        return False, f"cos is {list(cos.shape)}, and it is used for one row a position, of all sequences or of each"
    return True, ""


def laid_out(x: Tensor, like: Tensor) -> Tensor:
    """Return queries or keys without gaps, the heads of a position beside each other where those of `like` are."""
    if like.dim() == 4 and like.stride(1) < like.stride(2):
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.contiguous()


def _rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def cross_entropy(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean", upcast: bool = False
) -> Tensor:
    """Return the cross entropy of rows of logits with class indices, as ``F.cross_entropy`` computes it.

    With `upcast` it is that of the logits in float32, which the loss is then in.
    """
    rows = functional.log_softmax(logits.float() if upcast else logits, 1)
    return functional.nll_loss(rows, target, ignore_index=ignore_index, reduction=reduction)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    cross_entropy: Callable[..., Tensor] = cross_entropy,
) -> Tensor:
    """Return the cross entropy, in float32 or in float64, of the logits that a linear layer gives for rows."""
    logits = functional.linear(x, weight, bias)
    upcast = logits.dtype not in (torch.float32, torch.float64)
    return cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction, upcast=upcast)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of rows."""
    out: Tensor = torch.ops.aten._softmax.default(x, -1, False)  # ``torch.softmax`` asks the policy
    return out


def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return the products of groups of rows by a matrix each: ``[rows, k]`` by ``[groups, k, n]``.

    `offsets` are int32, and say where each group ends. Rows after the last group are not defined.
    """
    if x.is_meta:
        return x.new_empty(x.shape[0], weight.shape[-1])  # PyTorch's own takes bfloat16 alone there
    if x.dtype != torch.float64:
        out: Tensor = torch.ops.aten._grouped_mm.default(x, weight, offsets)  # ``torch._grouped_mm`` asks the policy
        return out
    ends: list[int] = offsets.tolist()  # PyTorch's own has no float64
    parts = [x[start:end] @ weight[group] for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - ends[-1], weight.shape[-1])])


def cache_update(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, positions: Tensor) -> None:
    """Write new keys and values at positions of a static cache, ``[batch, heads, length, head_dim]``, in place."""
    keys.index_copy_(2, positions, new_keys)
    values.index_copy_(2, positions, new_values)


_LOSS = MappingProxyType({"ignore_index": -100, "reduction": "mean"})
_ROWS = (
    Operation("rms_norm", ("x", "weight"), rms_norm, defaults={"formula": "torch"}),
    Operation("swiglu", ("gate", "up"), swiglu),
    Operation("geglu", ("gate", "up"), geglu, defaults={"approximate": "none"}),
    Operation(
        "rope", ("q", "k", "cos", "sin"), rope, without_gradient=("cos", "sin"), defaults={"mirrored": False},
        linear=("q", "k"), results=2,
    ),
    Operation("softmax", ("x",), softmax),
    Operation(
        "cross_entropy", ("logits", "target"), cross_entropy, without_gradient=("target",),
        defaults={**_LOSS, "upcast": False},
    ),
    Operation(
        "linear_cross_entropy", ("x", "weight", "target", "bias"), linear_cross_entropy, without_gradient=("target",),
        defaults=_LOSS, large=True, part="cross_entropy",
    ),
    Operation("grouped_matmul", ("x", "weight", "offsets"), grouped_matmul, without_gradient=("offsets",)),
    Operation(
        "cache_update", ("keys", "values", "new_keys", "new_values", "positions"), cache_update, writes=2, results=0
    ),
)  # fmt: skip
#: Operation to its row.
OPERATIONS: dict[str, Operation] = {row.name: row for row in _ROWS}
