# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``linear_cross_entropy`` in chunks of rows, of which the logits of one are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from xpuruntime.ops.torch_kernels import TorchKernel

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.ops.torch_kernels import Saved, TorchCall

    #: Returns the losses of rows of logits, in float32, and the gradient of the logits where it is called with what
    #: those of the losses are.
    LossesOf = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]

_LEAST_ROWS = 128
#: Bytes of logits and of their gradient that are in memory at a time, and the most parts: a gradient is rounded once
#: for each.
_PART_BYTES, _MOST_PARTS = 512 << 20, 8
_VECTOR = 16


def is_loss_of_rows(call: TorchCall, *, reduced: bool = False) -> tuple[bool, str]:
    """Say whether a call has rows, a matrix, and one class index, int64, for each row; if `reduced`, no loss a row."""
    if reduced and call.attributes["reduction"] == "none":
        return False, "it is used for the mean or the sum of the losses"
    x, weight, target = (call.operands[name] for name in ("x", "weight", "target"))
    if len(x.shape) != 2 or len(weight.shape) != 2 or len(target.shape) != 1 or target.dtype != "int64":
        return False, "it takes rows, the matrix of a linear layer, and one class index, int64, for each row"
    if weight.dtype != x.dtype or call.operands.get("bias", x).dtype != x.dtype:
        return False, f"rows and layer have to be of one type, and they are {x.dtype} and {weight.dtype}"
    return True, ""


class _Chunked(TorchKernel):
    id = "chunked.linear_cross_entropy"
    op = "linear_cross_entropy"
    families = ("chunked",)
    description = "the logits of one chunk of rows at a time, and once more for the gradient"
    limits = "rows with one class index each; the logits are computed twice"

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        return is_loss_of_rows(call)

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        x, weight, target, *bias = tensors
        ignored = target == call.attributes["ignore_index"]
        classes = target.masked_fill(ignored, 0)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        lse = torch.empty(target.shape, dtype=wide, device=x.device)
        losses = torch.empty_like(lse)
        for part in _chunks(x, weight):
            logits = functional.linear(x[part], weight, *bias).to(wide)
            lse[part] = torch.logsumexp(logits, -1)
            losses[part] = lse[part] - logits.gather(-1, classes[part, None]).squeeze(-1)
        losses.masked_fill_(ignored, 0)
        if call.attributes["reduction"] == "none":
            return (losses,), (lse,)
        total = losses.sum()
        return (total / (~ignored).sum() if call.attributes["reduction"] == "mean" else total,), (lse,)

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        x, weight, target, *bias = saved.inputs
        lse = saved.extra[0]
        ignored = target == call.attributes["ignore_index"]
        classes = target.masked_fill(ignored, 0)
        grad = grads[0].to(lse.dtype)
        if call.attributes["reduction"] == "mean":
            grad = grad / (~ignored).sum()
        factors = grad.expand(target.shape).masked_fill(ignored, 0)
        of_x, of_weight, of_bias = (
            None if name not in needed(call, bias) else torch.zeros_like(like, dtype=dtype)
            for name, like, dtype in (
                ("x", x, x.dtype),
                ("weight", weight, lse.dtype),
                ("bias", weight[:, 0], lse.dtype),
            )
        )
        for part in _chunks(x, weight):
            logits = functional.linear(x[part], weight, *bias).to(lse.dtype)
            step = logits.sub_(lse[part, None]).exp_()
            step.scatter_(-1, classes[part, None], step.gather(-1, classes[part, None]) - 1)
            step = step.mul_(factors[part, None]).to(x.dtype)
            if of_x is not None:
                of_x[part] = step @ weight
            if of_weight is not None:
                of_weight += step.mT @ x[part]
            if of_bias is not None:
                of_bias += step.sum(0, dtype=lse.dtype)
        gradients = [of_x, None if of_weight is None else of_weight.to(weight.dtype), None]
        return gradients if not bias else [*gradients, None if of_bias is None else of_bias.to(bias[0].dtype)]

    def saved_like(self, call: TorchCall, *tensors: Any) -> Sequence[Any]:
        del call
        wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        return (tensors[0].new_empty(tensors[0].shape[:1], dtype=wide),)


def needed(call: TorchCall, bias: Sequence[Tensor]) -> tuple[str, ...]:
    """Return the operands of which a call wants the gradient."""
    needs: tuple[str, ...] = call.attributes.get("needs", ("x", "weight", "bias"))
    return needs if bias else tuple(name for name in needs if name != "bias")


def _chunks(x: Tensor, weight: Tensor) -> Iterator[slice]:
    """Yield parts of the rows whose logits take about as much memory as all rows."""
    rows = max(_LEAST_ROWS, -(-x.shape[0] * x.shape[1] // max(1, weight.shape[0])))
    for first in range(0, x.shape[0], rows):
        yield slice(first, first + rows)


def unsaved_gradients(call: TorchCall, tensors: Sequence[Any]) -> list[Any]:
    """Return tensors like the gradients that a forward computes already, for `TorchKernel.saved_like`."""
    if call.phase != "train":
        return []
    needs = needed(call, tensors[3:])
    names = ("x", "weight", "target", "bias")
    return [x.new_empty(x.shape) for name, x in zip(names, tensors, strict=False) if name in needs]


def scaled_gradients(call: TorchCall, saved: Saved, grad: Any) -> list[Any]:
    """Return the gradients that the forward has computed of a mean or a sum, times that of the loss."""
    needs = needed(call, saved.inputs[3:])
    values = iter(saved.extra)
    names = ("x", "weight", "target", "bias")[: len(saved.inputs)]
    return [
        (next(values) * grad).to(x.dtype) if name in needs else None
        for name, x in zip(names, saved.inputs, strict=True)
    ]


def loss_in_parts(
    call: TorchCall, tensors: Sequence[Any], losses_of: LossesOf, *, held: int
) -> tuple[tuple[Tensor], list[Any]]:
    """Return the loss, and the gradients, of the logits of some rows at a time, of which there are `held` alike.

    Logits have rows in whole vectors, since products of others take several times as long. No class has what is added.
    """
    x, weight, target, *bias = tensors
    classes = len(weight)
    added = padded(classes, x.element_size()) - classes
    if added:
        weight, bias = functional.pad(weight, (0, 0, 0, added)), [functional.pad(part, (0, added)) for part in bias]
    count = (target != call.attributes["ignore_index"]).sum().float()
    factor = count.reciprocal() if call.attributes["reduction"] == "mean" else torch.ones_like(count)
    gradients = unsaved_gradients(call, (x, weight, target, *bias))
    named = dict(zip([name for name in ("x", "weight", "bias") if name in needed(call, bias)], gradients, strict=False))
    losses = torch.empty(target.shape, dtype=torch.float32, device=x.device)
    if not len(x):
        for gradient in gradients:
            gradient.zero_()
    parts = min(-(-len(x) * len(weight) * x.element_size() * held // _PART_BYTES), _MOST_PARTS, len(x))
    rows = -(-len(x) // max(1, parts))
    for first in range(0, len(x), max(1, rows)):
        part = slice(first, first + rows)
        logits = functional.linear(x[part], weight, *bias)
        if added:
            logits[:, classes:] = -torch.inf
        losses[part], step = losses_of(logits, target[part], factor.expand(len(logits)) if named else None)
        if step is None:
            continue
        if "x" in named:
            torch.mm(step, weight, out=named["x"][part])
        if "weight" in named:
            named["weight"].addmm_(step.mT, x[part], beta=float(first > 0))
        if "bias" in named:
            of_part = step.sum(0)
            named["bias"] = named["bias"].add_(of_part) if first else named["bias"].copy_(of_part)
    return (losses.sum() * factor,), [named[name][:classes] if name != "x" else named[name] for name in named]


def padded(classes: int, bytes_of_one: int) -> int:
    """Return the columns of rows in whole vectors."""
    vector = _VECTOR // bytes_of_one
    return -(-classes // vector) * vector


class _TorchChunked(TorchKernel):
    id = "torch_chunked.linear_cross_entropy"
    op = "linear_cross_entropy"
    description = "PyTorch's linear_cross_entropy in chunks, which computes the gradient in the forward"
    limits = "rows with one class index each; a mean or a sum; fp32 and fp64"
    distributions = ("torch>=2.13,<2.14",)
    install = 'pip install "torch>=2.13,<2.14"'

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        if call.operands["x"].dtype not in ("float32", "float64"):
            return False, f"it returns a loss of the type of the rows, {call.operands['x'].dtype}, and not in float32"
        return is_loss_of_rows(call, reduced=True)

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        import torch.nn.modules.linear_cross_entropy

        x, weight, target, *bias = tensors
        needs = needed(call, bias) if call.phase == "train" else ()
        options: Any = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined,unused-ignore]
        options = options._adjust(x.shape[0], x.shape[1], weight.shape[0], x.dtype, x.device)
        # F.linear_cross_entropy gives no gradient below autograd, where this runs; its operator returns them.
        loss, *gradients = torch.ops.torch_nn._linear_cross_entropy_batch_chunked(
            x, weight, target, bias[0] if bias else None, None, call.attributes["reduction"],
            call.attributes["ignore_index"], 0.0, options.batch_chunk_size, options.acc_policy, options.acc_dtype, True,
            *(name in needs for name in ("x", "weight", "bias")),
        )  # fmt: skip
        named = zip(("x", "weight", "bias"), gradients, strict=True)
        return (loss,), [gradient for name, gradient in named if name in needs]

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        return scaled_gradients(call, saved, grads[0])

    def saved_like(self, call: TorchCall, *tensors: Any) -> Sequence[Any]:
        return unsaved_gradients(call, tensors)


KERNELS: tuple[TorchKernel, ...] = (_Chunked(), _TorchChunked())
