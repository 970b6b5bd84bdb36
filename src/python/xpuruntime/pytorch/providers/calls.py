# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls of an operation: attributes as text, outputs without data, and the parts that calls of one route share."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.ops.torch_kernels import Saved
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.providers.bound import call_of, dense_like
from xpuruntime.pytorch.providers.operations import OPERATIONS, laid_out

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.pytorch.providers.bound import BoundKernel
    from xpuruntime.pytorch.providers.operations import Operation

PLAIN = (torch.Tensor, torch.nn.Parameter)


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Say whether tensors are nothing but tensors. A loop, since a generator costs more than what it asks."""
    for x in tensors:  # noqa: SIM110
        if type(x) not in PLAIN:
            return False
    return True


def text_of(op: str, attributes: Mapping[str, Any]) -> str:
    """Return the attributes of a call as text, with those of the table that it leaves out."""
    stated = {**OPERATIONS[op].defaults, **attributes}
    return "; ".join([f"{name}={value!r}" for name, value in stated.items()])  # Dynamo traces no json.dumps


@functools.lru_cache(maxsize=1024)
def call_text(op: str, present: tuple[bool, ...], attributes: tuple[tuple[str, Any], ...]) -> tuple[str, str]:
    """Return the names of the operands that a call has, and its attributes, as text."""
    names = [name for name, there in zip(OPERATIONS[op].operands, present, strict=True) if there]
    return ",".join(names), text_of(op, dict(attributes))


@functools.lru_cache(maxsize=1024)
def options_of(attributes: str) -> dict[str, Any]:
    """Return the attributes that a text states."""
    pairs = (part.partition("=") for part in attributes.split("; ") if part)
    return {name: ast.literal_eval(value) for name, _, value in pairs}


class CallPlan:
    """What calls of one route have in common, so that nothing of it is found out for each."""

    __slots__ = ("attributes", "backward_call", "call", "grads", "kept", "like", "names", "operation", "place", "word")

    def __init__(
        self, op: str, place: BoundKernel, tensors: Sequence[Tensor], names: str, attributes: str, phase: str
    ) -> None:
        operation = OPERATIONS[op]
        self.operation, self.place, self.word = operation, place, place.word
        self.names, self.attributes = names, attributes
        self.call = call_by(place, phase, tensors, names, attributes)
        self.backward_call = call_by(place, "backward", tensors, names, attributes)
        self.like = outputs_like(op, tensors, names, attributes)
        wanted = zip(tensors, with_gradient(operation, names, attributes), strict=True)
        self.grads = [dense_like(x) if has else None for x, has in wanted]
        #: What stands for inputs, and for outputs, that no gradient reads.
        self.kept: tuple[list[Tensor | None], list[Tensor] | None] = ([None] * len(tensors), None)
        if operation.linear:
            named = zip(names.split(","), tensors, strict=True)
            inputs = [without_data(x).requires_grad_() if name in operation.linear else None for name, x in named]
            self.kept = inputs, [tensors[0].new_empty((), dtype=x.dtype).expand(x.shape) for x in self.like]

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs, and behind them what the kernel keeps for its gradient."""
        with _private_api.below_autograd():
            outputs, extra = self.place.run_forward(self.call, tensors, self.like)
        return (*outputs, *extra)

    def backward(
        self, grads: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs, in their order."""
        n = self.operation.results
        saved = Saved(tuple(tensors), tuple(kept[:n]), tuple(kept[n:]))
        like = self.grads
        if self.operation.linear and not self.place.kernel.alone:
            like = gradients_like(self.operation, tensors, self.names, self.attributes, grads)
        return self.place.run_backward(self.backward_call, saved, grads, like)  # which may use autograd itself


def reference(
    op: str, tensors: Sequence[Tensor], names: str, attributes: str, part: Callable[..., Any] | None = None
) -> list[Tensor]:
    """Return an operation by PyTorch's own ones, a part of it by another function where there is one for it."""
    places, options = _arguments_of(op, names, attributes)
    if part is not None:
        options = {**options, OPERATIONS[op].part: part}
    results = OPERATIONS[op].reference(*[None if at is None else tensors[at] for at in places], **options)
    return [results] if isinstance(results, torch.Tensor) else list(results or ())


@functools.lru_cache(maxsize=1024)
def _arguments_of(op: str, names: str, attributes: str) -> tuple[list[int | None], dict[str, Any]]:
    present = names.split(",")
    places = [present.index(name) if name in present else None for name in OPERATIONS[op].operands]
    return places, {name: value for name, value in options_of(attributes).items() if name != "needs"}


def outputs_like(op: str, tensors: Sequence[Tensor], names: str, attributes: str) -> list[Tensor]:
    """Return the outputs of an operation without data, all of them dense."""
    if are_plain(tensors):
        known = _outputs_like if _private_api.dispatch_modes() == 0 else _outputs_like.__wrapped__
        return list(known(op, tuple((x.shape, x.stride(), x.dtype) for x in tensors), names, attributes))
    with torch.no_grad():
        return _formed(op, tensors, names, attributes)


@functools.lru_cache(maxsize=4096)
def _outputs_like(op: str, kinds: tuple[Any, ...], names: str, attributes: str) -> tuple[Tensor, ...]:
    with torch.no_grad():
        metas = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in kinds]
        return tuple(_formed(op, metas, names, attributes))


def _formed(op: str, tensors: Sequence[Tensor], names: str, attributes: str) -> list[Tensor]:
    results = reference(op, tensors, names, attributes)
    if OPERATIONS[op].linear:
        named = dict(zip(names.split(","), tensors, strict=True))
        return [laid_out(x, named[name]) for x, name in zip(results, OPERATIONS[op].linear, strict=True)]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in results]


def gradients_like(
    operation: Operation, tensors: Sequence[Tensor], names: str, attributes: str, grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of operands without data: dense, or as those of the outputs lie of what is linear."""
    wanted = zip(tensors, names.split(","), with_gradient(operation, names, attributes), strict=True)
    of_outputs = dict(zip(operation.linear, grads, strict=False))
    return [
        None if not has else laid_out(dense_like(x), of_outputs[name]) if name in of_outputs else dense_like(x)
        for x, name, has in wanted
    ]


def call_by(bound: BoundKernel, phase: str, tensors: Sequence[Tensor], names: str, attributes: str) -> Any:
    """Return a call as its kernel takes it."""
    return call_of(
        bound.kernel.op,
        phase,
        dict(zip(names.split(","), tensors, strict=True)),
        options_of(f"{attributes}; paired=True"),
    )


def without_data(x: Tensor) -> Tensor:
    """Return a tensor of the same shape and type, of one number in memory."""
    return x.new_empty(()).expand(x.shape).requires_grad_(x.requires_grad)


def with_gradient(operation: Operation, names: str, attributes: str) -> list[bool]:
    """Return for each operand whether a call computes its gradient."""
    needs = options_of(attributes).get("needs")
    return [name not in operation.without_gradient and (needs is None or name in needs) for name in names.split(",")]
