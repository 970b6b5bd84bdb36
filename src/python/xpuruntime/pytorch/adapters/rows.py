# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overrides for ``softmax``, ``cross_entropy`` and products of groups, of all that calls PyTorch's functions.

Losses of transformers first make a copy of the logits in float32. A kernel that computes in float32 anyway gets the
logits themselves, and their gradient is in their type, as after that copy.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.adapters.in_place import UNUSUAL, compiled_decision, decides, is_usual, run_original
from xpuruntime.pytorch.dispatch.context import active_policy, capturing, is_compiling
from xpuruntime.pytorch.dispatch.overrides.native import CLASSES, IN_PYTHON, Override
from xpuruntime.pytorch.providers.bound import alignment_of
from xpuruntime.pytorch.providers.operators import perform, takes

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.pytorch.dispatch.overrides.native import Native

#: Of PyTorch's numbers for reductions.
_REDUCTIONS = ("none", "mean", "sum")
_OTHER_ROWS = "it is for the last dimension of floating-point numbers"
_OTHER_GROUPS = "it is for groups of rows that end at offsets, without a bias and another type of the output"
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
        if not why and not is_compiling() and not is_usual(logits, target):
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
        if not why and not is_compiling() and not is_usual(x):
            why = UNUSUAL
        if why:
            run = lambda *inputs: native(keyset, *inputs)  # noqa: E731 - as of a loss
            return run_original("softmax", functional.softmax, run, (x, dim, dtype), x, why)
        return perform("softmax", {"x": x if dtype is None else x.to(dtype)}, {})

    return softmax


def _grouped_products(native: Any) -> Callable[..., Any]:
    decided = compiled_decision("grouped_matmul")

    # Traced by Dynamo: nothing but what it can follow, and the function that it takes for a constant.
    def _grouped_mm(
        input: Tensor,
        mat2: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Any:
        compiling = torch.compiler.is_compiling()
        if not (decided() if compiling else decides("grouped_matmul", input)):
            return native(input, mat2, offs=offs, bias=bias, out_dtype=out_dtype)
        groups = offs is not None and input.dim() == 2 and mat2.dim() == 3
        why = "" if groups and bias is None and out_dtype in (None, input.dtype) else _OTHER_GROUPS
        if why == "" and not compiling and not is_usual(input, mat2, offs):
            why = UNUSUAL
        if why == "":
            return perform("grouped_matmul", {"x": input, "weight": mat2, "offsets": offs}, {})
        if compiling:
            return native(input, mat2, offs=offs, bias=bias, out_dtype=out_dtype)
        run = lambda *operands: native(*operands, offs=offs, bias=bias, out_dtype=out_dtype)  # noqa: E731 - as above
        return run_original("grouped_matmul", functional.grouped_mm, run, (input, mat2), input, why)

    return _grouped_mm


class _NotUpcast(TorchFunctionMode):  # type: ignore[misc]
    """Keeps the logits of a loss in their type, and asks for the loss in float32."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self._logits = logits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function is torch.Tensor.float and args[0] is self._logits:
            return self._logits
        if function is functional.cross_entropy and args and args[0].dtype == self._logits.dtype:
            named = {name: value for name, value in named.items() if value is not None}
            if not named.get("label_smoothing"):
                named.pop("label_smoothing", None)
            plain = len(args) == 2 and named.keys() <= {"ignore_index", "reduction"}
            if plain and args[0].dim() == 2 and args[1].dim() == 1 and not args[1].is_floating_point():
                return perform("cross_entropy", {"logits": args[0], "target": args[1]}, {**named, "upcast": True})
            return function(args[0].float(), *args[1:], **named)
        return function(*args, **named)


def _loss(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        logits = args[0] if len(args) > 0 else kwargs.get("logits")
        if torch.compiler.is_compiling() or not isinstance(logits, torch.Tensor) or not _keeps(logits):
            return original(*args, **kwargs)
        with _NotUpcast(logits):
            return original(*args, **kwargs)

    return loss


def _keeps(logits: Tensor) -> bool:
    if logits.dtype not in (torch.float16, torch.bfloat16) or not decides("cross_entropy", logits):
        return False
    active = active_policy()
    if active is None or not is_usual(logits):
        return False
    key = (
        "logits", logits.dtype, logits.device, logits.shape, logits.stride(), alignment_of(logits),
        logits.requires_grad, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), capturing(),
        *_private_api.compile_stance(), *active.call_context(),
    )  # fmt: skip
    keeps: bool | None = active.adapted_calls.get(key)
    return active.keep_adapted(key, _takes(logits)) if keeps is None else keeps


def _takes(logits: Tensor) -> bool:
    rows = logits.detach().flatten(0, -2).requires_grad_(logits.requires_grad)
    target = torch.empty(rows.shape[0], dtype=torch.int64, device=rows.device)
    return takes("cross_entropy", {"logits": rows, "target": target}, {"upcast": True})


class _Losses:
    """The losses of transformers that copy their logits, replaced in its table until `remove`."""

    def __init__(self, placed: tuple[Override, str]) -> None:
        self.override, self.key = placed
        self._table: dict[str, Any] = getattr(sys.modules[self.override.module], self.override.name, {})
        self._replaced = {name: (loss, _loss(loss)) for name, loss in self._table.items() if _copies(loss)}
        self._table.update((name, ours) for name, (_, ours) in self._replaced.items())

    @property
    def title(self) -> str:
        return f"{len(self._replaced)} losses of transformers" if self._replaced else ""

    def remove(self) -> None:
        """Give the table its own back, unless another library has replaced ours since."""
        for name, (theirs, ours) in self._replaced.items():
            if self._table.get(name) is ours:
                self._table[name] = theirs


def _copies(loss: Any) -> bool:
    return isinstance(loss, FunctionType) and {"float", "fixed_cross_entropy"} <= set(loss.__code__.co_names)


OVERRIDES = (
    Override("softmax.int", "softmax", ("CompositeImplicitAutograd",), _softmax),
    Override("cross_entropy_loss", "cross_entropy", ("CompositeImplicitAutograd",), _cross_entropy),
    Override("_grouped_mm", "grouped_matmul", (IN_PYTHON,), _grouped_products, "torch"),
    Override("LOSS_MAPPING", "cross_entropy", (CLASSES,), _Losses, "transformers.loss.loss_utils"),
)
