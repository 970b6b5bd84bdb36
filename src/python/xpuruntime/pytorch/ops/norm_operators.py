# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operators ``xpuruntime::layer_norm`` and ``xpuruntime::rms_norm`` of PyTorch's dispatcher, and their gradients.

With a residual, what is normalized is the sum; without one, the sum that they return is empty. `kernel` names a kernel;
where it is empty, the active policy chooses. `phase` is that of the call, which is not known any more when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.ops.call_context import call_context
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.dispatch.overrides.native import invoke
from xpuruntime.pytorch.dispatch.overrides.norms import add_missing_kernel, as_rows, rms_eps, stats_dtype
from xpuruntime.pytorch.dispatch.route import NATIVE_NAMES, Route
from xpuruntime.pytorch.ops import norm_autograd
from xpuruntime.pytorch.providers.bound import BoundKernel, bound_kernel, rejection_of_word

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.ops.call_context import CallContext

#: Name to schema.
OPERATORS = {
    "layer_norm": (
        "(Tensor input, Tensor? residual, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps,"
        " str kernel, str phase) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "layer_norm_backward": (
        "(Tensor grad, Tensor? grad_sum, Tensor summed, SymInt[] normalized_shape, Tensor mean, Tensor rstd,"
        " Tensor? weight, Tensor? bias, bool[3] output_mask, str kernel) -> (Tensor, Tensor, Tensor)"
    ),
    "rms_norm": (
        "(Tensor input, Tensor? residual, SymInt[] normalized_shape, Tensor? weight, float? eps, str kernel, str phase)"
        " -> (Tensor, Tensor, Tensor)"
    ),
    "rms_norm_backward": (
        "(Tensor grad, Tensor? grad_sum, Tensor summed, SymInt[] normalized_shape, Tensor rstd, Tensor? weight,"
        " bool[2] output_mask, str kernel) -> (Tensor, Tensor)"
    ),
}

_library = torch.library.Library("xpuruntime", "FRAGMENT")


def _layer_norm(
    input: Tensor,
    residual: Tensor | None,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kernel: str,
    phase: str,
) -> Any:
    args = (input, residual, shape, weight, bias, eps)
    return _run("layer_norm", "layer_norm", kernel, input, norm_autograd.torch_layer_norm, _xrt_layer_norm, args, phase)


def _xrt_layer_norm(
    target: CallContext | BoundKernel,
    phase: str,
    input: Tensor,
    residual: Tensor | None,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, total, mean, rstd = _forward(target, phase, False, input, residual, shape, weight, bias, eps)
    dtype = stats_dtype(input, weight, bias)
    return out, total, mean.to(dtype), rstd.to(dtype)


def _layer_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
    kernel: str,
) -> tuple[Tensor, ...]:
    args = (grad, grad_sum, summed, shape, mean, rstd, weight, bias, mask)
    gradients = _run(
        "layer_norm_backward", "layer_norm", kernel, summed, norm_autograd.torch_layer_norm_backward,
        _xrt_layer_norm_backward, args,
    )  # fmt: skip
    return tuple(summed.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _xrt_layer_norm_backward(
    target: CallContext | BoundKernel,
    phase: str,
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    del phase
    if mask[2] and weight is None and bias is not None and bias.dtype != summed.dtype:
        msg = f"a bias of {bias.dtype} without a weight, for an input of {summed.dtype}: give both, or neither"
        raise UnsupportedOperationError(msg)
    return _backward(target, False, grad, grad_sum, summed, shape, mean, rstd, weight, mask, bias)


def _rms_norm(
    input: Tensor,
    residual: Tensor | None,
    shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    kernel: str,
    phase: str,
) -> Any:
    args = (input, residual, shape, weight, rms_eps(input.dtype, eps))
    return _run("rms_norm", "rms_norm", kernel, input, norm_autograd.torch_rms_norm, _xrt_rms_norm, args, phase)


def _xrt_rms_norm(
    target: CallContext | BoundKernel,
    phase: str,
    input: Tensor,
    residual: Tensor | None,
    shape: Sequence[int],
    weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    out, total, rstd = _forward(target, phase, True, input, residual, shape, weight, None, eps)
    return out, total, rstd


def _rms_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    mask: Sequence[bool],
    kernel: str,
) -> tuple[Tensor, ...]:
    args = (grad, grad_sum, summed, shape, rstd, weight, mask)
    gradients = _run(
        "rms_norm_backward", "rms_norm", kernel, summed, norm_autograd.torch_rms_norm_backward,
        _xrt_rms_norm_backward, args,
    )  # fmt: skip
    return tuple(summed.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _xrt_rms_norm_backward(
    target: CallContext | BoundKernel,
    phase: str,
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    del phase
    return _backward(target, True, grad, grad_sum, summed, shape, None, rstd, weight, (*mask, False))[:2]


def _forward(
    target: CallContext | BoundKernel,
    phase: str,
    rms: bool,
    input: Tensor,
    residual: Tensor | None,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    """Return the norm, the sum, and what there is of mean and rstd, in the type of xpuruntime kernels."""
    n = len(shape)
    if isinstance(target, BoundKernel):
        if residual is not None:
            raise UnsupportedOperationError("it adds no residual")
        out, *stats = target.norm(phase, input, shape, weight, bias, eps, rms=rms)
        return out, input.new_empty(0), *stats
    results = list(
        _core.op_norm(
            target, rms, as_rows(input, n), None if residual is None else as_rows(residual, n), _flat(weight),
            _flat(bias), None, None, residual is not None, True, eps, phase or None, None,
        )
    )  # fmt: skip
    total = input.new_empty(0) if residual is None else results.pop(1).view(input.shape)
    out, *stats = results
    lead = (*input.shape[:-n], *(1,) * n)
    return out.view(input.shape), total, *(stat.view(lead) for stat in stats)


def _backward(
    target: CallContext | BoundKernel,
    rms: bool,
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    shape: Sequence[int],
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    mask: Sequence[bool],
    bias: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    n = len(shape)
    wide = torch.float64 if summed.dtype == torch.float64 else torch.float32
    mean, rstd = (None if stat is None else stat.to(wide).reshape(summed.shape[:-n]) for stat in (mean, rstd))
    if isinstance(target, BoundKernel):
        if grad_sum is not None:
            raise UnsupportedOperationError("it adds no residual")
        stats = tuple(stat for stat in (mean, rstd) if stat is not None)
        gradients = target.norm_backward(grad, summed, shape, stats, weight, bias, rms=rms)
        return tuple(gradient if wanted else None for gradient, wanted in zip(gradients, mask, strict=True))
    gradients = _core.op_norm_backward(
        target, rms, as_rows(grad, n), as_rows(summed, n), _flat(weight), mean, rstd,
        None if grad_sum is None else as_rows(grad_sum, n), None, mask[1], mask[2], None,
    )  # fmt: skip
    arrays = list(gradients) if mask[1] or mask[2] else [gradients]
    return (
        arrays[0].view(summed.shape) if mask[0] else None,
        arrays[1].view(*shape) if mask[1] else None,
        arrays[-1].view(*shape) if mask[2] else None,
    )


def _run(
    name: str,
    op: str,
    kernel: str,
    like: Tensor,
    native: Callable[..., Any],
    xrt_kernel: Callable[..., Any],
    args: tuple[Any, ...],
    phase: str = "backward",
) -> Any:
    """Serve one call by the kernel that is named, by the policy's, or else by any xpuruntime kernel."""
    name = f"xpuruntime::{name}"
    active = active_policy()
    if not kernel and active is not None and op in active.ops:
        phase = phase if active.by_phase else ""
        module = module_paths.current() if active.by_module else ""
        key = (name, like.device, phase, module, *map(_mark, args))
        return invoke(
            active, key, active.routes.get(key), name, op, like, _without_keyset(native), xrt_kernel, (None, *args),
            phase=phase, module=module,
        )  # fmt: skip
    if kernel in NATIVE_NAMES[op] or like.numel() == 0:
        return native(*args)
    target: CallContext | BoundKernel = bound_kernel(kernel, op) or call_context(None, kernel or None, op)
    try:
        if isinstance(target, BoundKernel) and (missing := rejection_of_word(kernel, op)):
            raise UnsupportedOperationError(f"kernel={kernel!r}: {missing}", engine="torch")
        if CONTEXT.observer is not None:
            route = Route(op, (kernel or "auto",), "kernel=" if kernel else "default", kernel or "auto", place=target)
            return CONTEXT.observer.call(name, op, route, xrt_kernel, (target, "", *args), {})
        return xrt_kernel(target, "", *args)
    except UnsupportedOperationError:
        if kernel and kernel != "auto":
            raise
    return native(*args)


def _mark(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.dtype
    return tuple(argument) if isinstance(argument, (list, tuple)) else argument


def _without_keyset(native: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _keyset, *args: native(*args)


def _flat(columns: Tensor | None) -> Tensor | None:
    return None if columns is None else columns.detach().reshape(-1)


def _fake_layer_norm(
    input: Tensor, residual: Any, shape: Any, weight: Any, bias: Any, eps: float, kernel: str, phase: str
) -> tuple[Tensor, ...]:
    del eps, kernel, phase
    out, total, rstd = _fake_outputs(input, residual, shape, stats_dtype(input, weight, bias))
    return out, total, torch.empty_like(rstd), rstd


def _fake_rms_norm(
    input: Tensor, residual: Any, shape: Any, weight: Any, eps: Any, kernel: str, phase: str
) -> tuple[Tensor, Tensor, Tensor]:
    del weight, eps, kernel, phase
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    return _fake_outputs(input, residual, shape, wide)


def _fake_outputs(input: Tensor, residual: Any, shape: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    total = input.new_empty(0) if residual is None else torch.empty_like(out)
    n = len(shape)
    return out, total, input.new_empty((*input.shape[:-n], *(1,) * n), dtype=dtype)


def _fake_layer_norm_backward(
    grad: Any, grad_sum: Any, summed: Tensor, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any,
    kernel: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    del grad, grad_sum, mean, rstd, kernel
    return _fake_gradients(summed, shape, weight, bias, mask)


def _fake_rms_norm_backward(
    grad: Any, grad_sum: Any, summed: Tensor, shape: Any, rstd: Any, weight: Any, mask: Any, kernel: str
) -> tuple[Tensor, ...]:
    del grad, grad_sum, rstd, kernel
    return _fake_gradients(summed, shape, weight, None, (*mask, False))[:2]


def _fake_gradients(summed: Tensor, shape: Any, weight: Any, bias: Any, mask: Any) -> tuple[Tensor, ...]:
    nothing = summed.new_empty(0)
    return (
        torch.empty_like(summed, memory_format=torch.contiguous_format) if mask[0] else nothing,
        weight.new_empty(tuple(shape)) if mask[1] else summed.new_empty(0),
        bias.new_empty(tuple(shape)) if mask[2] else summed.new_empty(0),
    )


_BODIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "layer_norm": (_layer_norm, _fake_layer_norm),
    "layer_norm_backward": (_layer_norm_backward, _fake_layer_norm_backward),
    "rms_norm": (_rms_norm, _fake_rms_norm),
    "rms_norm_backward": (_rms_norm_backward, _fake_rms_norm_backward),
}
for _name, _schema in OPERATORS.items():
    _library.define(_name + _schema)
    _body, _fake = _BODIES[_name]
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"xpuruntime::{_name}", _fake, lib=_library)
norm_autograd.register(_library)

add_missing_kernel()  # which the operators here call
