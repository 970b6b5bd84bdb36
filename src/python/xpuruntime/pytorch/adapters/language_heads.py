# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Losses of language models, led to ``linear_cross_entropy``. Logits are computed where anything else reads them."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.adapters.in_place import (
    UNUSUAL,
    AdaptedClasses,
    compiled_decision,
    decides,
    is_usual,
    run_original,
)
from xpuruntime.pytorch.coverage.gaps import CoverageGap, report_gaps
from xpuruntime.pytorch.coverage.operation_table import title_of
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.dispatch.overrides.native import CLASSES, IN_PYTHON, Override
from xpuruntime.pytorch.explanation.requested import requests_other_kernel
from xpuruntime.pytorch.providers.operators import perform

if TYPE_CHECKING:
    from torch import Tensor

_OP = "linear_cross_entropy"
_UNSERVED = "it is for rows of logits and class indices, without class weights and label smoothing"
_READ = "the model computes more of its logits than their cross entropy"
_COMPILED = "its loss is compiled with its logits, which are computed"
_FIX = "leave linear_cross_entropy to eager code, or call torch.nn.functional.linear_cross_entropy"


class _Head:
    """A linear layer's call that has not been computed yet."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, model: type) -> None:
        self.operands = (x, weight, bias)
        self.model = model
        self.inside = True
        kind = x.device.type
        self._records, self._cast = torch.is_grad_enabled(), torch.is_autocast_enabled(kind)
        self._to = torch.get_autocast_dtype(kind)
        self._versions = self._read_versions()
        self._logits: Tensor | None = None
        self._lock = threading.Lock()

    def _read_versions(self) -> tuple[int, ...]:
        return tuple(0 if x is None or x.is_inference() else _private_api.tensor_version(x) for x in self.operands)

    def logits(self) -> Tensor:
        """Return the logits, computed at the first call, with their gradient where it was recorded at that time."""
        with self._lock:
            if self._logits is None:
                if self._versions != self._read_versions():
                    raise UnsupportedOperationError(
                        f"the logits of {self.model.__name__} were not computed, as its loss did without them, and its "
                        "weights have changed since. Fix: read them before the optimizer's step, or leave "
                        "linear_cross_entropy out of the policy",
                        engine="torch",
                    )
                cast = torch.autocast(self.operands[0].device.type, self._to, self._cast)
                with torch.set_grad_enabled(self._records), cast:
                    self._logits = functional.linear(*self.operands)
            return self._logits


class Logits(torch.Tensor):  # type: ignore[misc]
    """Logits of a language model that are computed where they are read. Their cross entropy does without them.

    Whatever is called with them gets the computed tensor, but for changes of type and of leading dimensions.
    """

    head: _Head
    lead: tuple[int, ...]
    kind: torch.dtype

    @classmethod
    def of(cls, head: _Head, lead: tuple[int, ...], kind: torch.dtype) -> Logits:
        """Return logits of a head, with these leading dimensions and this type."""
        logits: Logits = torch.empty((*lead, head.operands[1].shape[0]), dtype=kind, device="meta").as_subclass(cls)
        logits.head, logits.lead, logits.kind = head, lead, kind
        return logits

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lead a cross entropy to its operation, and anything else to the computed tensor."""
        kwargs = kwargs or {}
        logits = args[0] if args and isinstance(args[0], cls) else None
        if logits is not None and function in _READ_AS_THEY_ARE:
            return super().__torch_function__(function, types, args, kwargs)
        if logits is not None and (result := logits._without_logits(function, args[1:], kwargs)) is not NotImplemented:
            return result
        return function(*_computed(args), **_computed(kwargs))

    def _without_logits(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function == _DEVICE:
            return self.head.operands[0].device
        if function is functional.cross_entropy:
            return _loss(self, *args, **kwargs)
        if kwargs:
            return NotImplemented
        if function in (torch.Tensor.view, torch.Tensor.reshape):
            return self._viewed(args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
        if args or function not in (torch.Tensor.float, torch.Tensor.contiguous):
            return NotImplemented
        return Logits.of(self.head, self.lead, torch.float32) if function is torch.Tensor.float else self

    def _viewed(self, shape: Any) -> Any:
        if isinstance(shape, torch.dtype) or not shape or shape[-1] not in (self.head.operands[1].shape[0], -1):
            return NotImplemented
        try:
            lead = torch.empty(self.lead, device="meta").view(shape[:-1]).shape
        except RuntimeError:
            return NotImplemented
        return Logits.of(self.head, tuple(lead), self.kind)

    def computed(self) -> Tensor:
        """Return what they are, as a plain tensor."""
        head = self.head
        if head.inside:
            logits: Tensor = run_original(_OP, head.model, head.logits, (), head.operands[0], _READ)
        else:
            logits = head.logits()
        return logits.to(self.kind).view(*self.lead, logits.shape[-1])


_DEVICE = torch.Tensor.device.__get__
#: Functions and attributes whose results are in the form of the tensor alone.
_READ_AS_THEY_ARE = (
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point,
    torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.ndim.__get__,
)  # fmt: skip


def _computed(value: Any) -> Any:
    if isinstance(value, Logits):
        return value.computed()
    if isinstance(value, dict):
        return {name: _computed(entry) for name, entry in value.items()}
    return type(value)(map(_computed, value)) if type(value) in (list, tuple) else value


def _loss(
    logits: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    rest = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    rows = len(logits.lead) == 1 and target.dim() == 1 and not target.is_floating_point()
    head = logits.head
    x, matrix, bias = head.operands
    if not decides(_OP, x):
        return NotImplemented
    why = _UNSERVED if not rows or weight is not None or label_smoothing or size_average or reduce else ""
    if why or not is_usual(*(operand for operand in (*head.operands, target) if operand is not None)):
        head.inside = False
        run = functools.partial(functional.cross_entropy, logits.computed())
        return run_original(_OP, functional.cross_entropy, run, (target, *rest), x, why or UNUSUAL)
    x, matrix, bias = _under_autocast(x, matrix, bias)
    operands = {"x": x.reshape(-1, x.shape[-1]), "weight": matrix, "target": target, "bias": bias}
    loss: Tensor = perform(_OP, operands, {"ignore_index": ignore_index, "reduction": reduction})
    return loss.to(logits.kind)


def _under_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    like = next(x for x in tensors if x is not None)
    if not torch.is_autocast_enabled(like.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(like.device.type)
    return tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)


class _Rows(torch.Tensor):  # type: ignore[misc]
    """The input of a head that skips its linear layer."""

    call: _Call

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return `Logits` for the linear layer of the head; anything else gets the plain tensor."""
        plain = [x.as_subclass(torch.Tensor) if isinstance(x, cls) else x for x in args]
        if function is functional.linear and isinstance(args[0], cls) and not kwargs:
            x, weight, bias = (*plain, None)[:3]
            if is_usual(*(operand for operand in (x, weight, bias) if operand is not None)):
                return args[0].call.logits(x, weight, bias)
        return function(*plain, **(kwargs or {}))


class _Call:
    """A call of a model with labels: the head runs when something beside the loss reads its logits."""

    def __init__(self, model: type) -> None:
        self._model = model
        self._thread = threading.get_ident()
        self._heads: list[_Head] = []

    def defer(self, _head: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if threading.get_ident() != self._thread or len(inputs) != 1 or type(inputs[0]) is not torch.Tensor:
            return None
        rows: Any = inputs[0].as_subclass(_Rows)
        rows.call = self
        return (rows,)

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Logits:
        head = _Head(x, weight, bias, self._model)
        self._heads.append(head)
        return Logits.of(head, tuple(x.shape[:-1]), _under_autocast(x.new_empty(0))[0].dtype)

    def end(self) -> None:
        for head in self._heads:
            head.inside = False


def _own_forward(kind: type) -> FunctionType | None:
    forward = kind.__dict__.get("forward")
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if not isinstance(forward, FunctionType) or base is None or not issubclass(kind, base):
        return None
    return forward if "labels" in _arguments(forward) else None


def _arguments(function: FunctionType) -> tuple[str, ...]:
    code = inspect.unwrap(function).__code__
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names


def _adapter(original: FunctionType) -> Callable[..., Any]:
    at = _arguments(original).index("labels") - 1

    def report(kind: Any) -> bool:
        active = active_policy()
        if active is not None and requests_other_kernel(_OP, active.kernel_names(_OP)):
            report_gaps([CoverageGap(_OP, title_of(kind), _COMPILED, _FIX)], active)
        return False

    _private_api.mark_constant(report)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs["labels"] if "labels" in kwargs else args[at] if len(args) > at else None
        if not isinstance(labels, torch.Tensor):
            return original(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            report(type(self))
            return original(self, *args, **kwargs)
        head = self.get_output_embeddings() if decides(_OP, labels) else None
        if not isinstance(head, torch.nn.Module):
            return original(self, *args, **kwargs)
        call = _Call(type(self))
        handle = head.register_forward_pre_hook(call.defer)
        try:
            return original(self, *args, **kwargs)
        finally:
            handle.remove()
            call.end()

    return forward


def _function(native: Any) -> Callable[..., Any]:
    decided = compiled_decision(_OP)

    # Traced by Dynamo: nothing but what it can follow, and the function that it takes for a constant.
    @functools.wraps(native)
    def linear_cross_entropy(
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        *,
        linear_bias: Tensor | None = None,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
    ) -> Any:
        def run(*operands: Any) -> Any:
            return native(
                *operands, linear_bias=linear_bias, weight=weight, reduction=reduction, ignore_index=ignore_index,
                label_smoothing=label_smoothing, options=options,
            )  # fmt: skip

        operands = (input, linear_weight, target)
        compiling = torch.compiler.is_compiling()
        if not (decided() if compiling else decides(_OP, input)):
            return run(*operands)
        rows = input.dim() == 2 and linear_weight.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
        why = "" if rows and weight is None and not label_smoothing else _UNSERVED
        if why == "" and not compiling and not is_usual(*operands):
            why = UNUSUAL
        if why != "":
            return run(*operands) if compiling else run_original(_OP, native, run, operands, input, why)
        x, matrix, bias = _under_autocast(input, linear_weight, linear_bias)
        ignored = -100 if ignore_index is None else ignore_index
        loss = perform(
            _OP, {"x": x, "weight": matrix, "target": target, "bias": bias},
            {"ignore_index": ignored, "reduction": reduction},
        )  # fmt: skip
        return loss.to(x.dtype)

    return linear_cross_entropy


OVERRIDES = (
    Override("forward", _OP, (CLASSES,), functools.partial(AdaptedClasses, _own_forward, _adapter)),
    Override(_OP, _OP, (IN_PYTHON,), _function, "torch.nn.functional"),
)
