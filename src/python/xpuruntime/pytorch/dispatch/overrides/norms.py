# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overrides of norms and of their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.dispatch.overrides.fast_kernels import fast_operator_kernel
from xpuruntime.pytorch.dispatch.overrides.native import Override, call_native, invoke, is_native
from xpuruntime.pytorch.providers.bound import BoundKernel

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.ops.call_context import CallContext
    from xpuruntime.pytorch.dispatch.overrides.fast_kernels import FastKernel
    from xpuruntime.pytorch.dispatch.overrides.native import Native


def run_norm(
    native: Native,
    op: str,
    xrt_kernel: Callable[..., Any],
    args: tuple[Any, ...],
    x: Tensor,
    shape: Sequence[int],
    arrays: tuple[Tensor | None, ...],
    fits: Callable[[], bool],
    quick: Callable[[], bool],
    mask: Sequence[bool] | None = None,
) -> Any:
    """Do one call by the kernel of its route, which is found where it is not known."""
    name = native.name
    active = active_policy()
    if active is None:
        return call_native(name, op, native, args)
    phase = ""
    if active.by_phase:
        phase = context.phase() if mask is None else "backward"
    module = module_paths.current() if active.by_module else ""
    wanted = "" if mask is None else "".join("1" if flag else "0" for flag in mask) + ";"
    mark = f"{name};{wanted}{';'.join(map(str, shape))}"
    key: Any = context.call_key(mark, *arrays)
    if key is None:  # an array that cannot be seen
        key = (mark, *map(_like, arrays))
    if active.by_call:
        key = (key, phase, module)
    route = active.routes.get(key)
    if is_native(route):
        return native(*args)
    if route is None and not (active.decides(op) and fits()):
        route = active.keep_native(key, op)
    return invoke(
        active, key, route, name, op, x, native, xrt_kernel, args, phase=phase, module=module, quick=quick,
        text=lambda: f"{mark};{list(map(_like, arrays))};{phase};{module}",
    )  # fmt: skip


def _like(array: Tensor | None) -> Any:
    return None if array is None else (tuple(array.shape), array.dtype, array.device)


_op_norm = _core.op_norm
_op_norm_backward = _core.op_norm_backward

#: In which xpuruntime kernels keep mean and rstd, of halves in the first.
_STATS = (torch.float32, torch.float64)


def _layer_norm(native: Native) -> Callable[..., Any] | FastKernel:
    def native_layer_norm(
        keyset: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Any:
        def fits() -> bool:
            return _fits(x, shape, weight, bias) and _parameters_fit(x, weight, bias)

        def quick() -> bool:
            return _is_row(shape, x) and stats_dtype(x, weight, bias) in _STATS

        args = (keyset, x, shape, weight, bias, eps)
        return run_norm(
            native, "layer_norm", _xrt_layer_norm, args, x, shape, (x, weight, bias), fits=fits, quick=quick
        )

    return fast_operator_kernel(native, native_layer_norm)


def _xrt_layer_norm(
    target: CallContext | BoundKernel,
    phase: str,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    n = len(shape)
    if isinstance(target, BoundKernel):
        out, mean, rstd = target.norm(phase, x, shape, weight, bias, eps, rms=False)
        dtype = stats_dtype(x, weight, bias)
        return out, mean.to(dtype), rstd.to(dtype)
    out, mean, rstd = _op_norm(
        target, False, as_rows(x, n), None, _flat(weight, n), _flat(bias, n), None, None, False, True, eps,
        phase or None, None,
    )  # fmt: skip
    if mean.dtype is not x.dtype:
        dtype = stats_dtype(x, weight, bias)
        mean, rstd = mean.to(dtype), rstd.to(dtype)
    if n == 1:
        return out, mean.unsqueeze(-1), rstd.unsqueeze(-1)
    lead = (*x.shape[:-n], *(1,) * n)
    return out.view(x.shape), mean.view(lead), rstd.view(lead)


def _layer_norm_backward(native: Native) -> Callable[..., Any] | FastKernel:
    def native_layer_norm_backward(
        keyset: Any, grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Tensor | None,
        bias: Tensor | None, mask: Sequence[bool],
    ) -> Any:  # fmt: skip
        def fits() -> bool:
            return (
                _fits(x, shape, weight, bias)
                and grad.shape == x.shape
                and grad.dtype == x.dtype
                and (weight is not None or not mask[1])
                and (weight is not None or bias is None or bias.dtype == x.dtype)
            )

        def quick() -> bool:
            return _is_row(shape, x, grad, mean, rstd) and mean.dtype in _STATS and rstd.dtype in _STATS

        args = (keyset, grad, x, shape, mean, rstd, weight, bias, mask)
        return run_norm(
            native, "layer_norm", _xrt_layer_norm_backward, args, x, shape, (grad, x, mean, rstd, weight, bias),
            fits=fits, quick=quick, mask=mask,
        )  # fmt: skip

    return fast_operator_kernel(native, native_layer_norm_backward)


def _xrt_layer_norm_backward(
    target: CallContext | BoundKernel, phase: str, grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor,
    rstd: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    del phase
    n = len(shape)
    _, want_weight, want_bias = mask
    if isinstance(target, BoundKernel):
        stats = (_stats(mean, x, n), _stats(rstd, x, n))
        return _masked(target.norm_backward(grad, x, shape, stats, weight, bias, rms=False), mask)
    gradients = _op_norm_backward(
        target, False, as_rows(grad, n), as_rows(x, n), _flat(weight, n), _stats(mean, x, n), _stats(rstd, x, n), None,
        None, want_weight, want_bias, None,
    )  # fmt: skip
    return _gradients(gradients, x, shape, mask)


def _rms_norm(native: Native) -> Callable[..., Any] | FastKernel:
    def fused_rms_norm(keyset: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
        def fits() -> bool:
            return _fits(x, shape, weight, None) and _same_dtype(x, weight)

        args = (keyset, x, shape, weight, eps)
        return run_norm(
            native, "rms_norm", _xrt_rms_norm, args, x, shape, (x, weight), fits=fits, quick=lambda: _is_row(shape, x)
        )

    return fast_operator_kernel(native, fused_rms_norm)


def _xrt_rms_norm(
    target: CallContext | BoundKernel,
    phase: str,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
) -> tuple[Tensor, Tensor]:
    n = len(shape)
    if isinstance(target, BoundKernel):
        normal, rstd = target.norm(phase, x, shape, weight, None, rms_eps(x.dtype, eps), rms=True)
        return normal, rstd
    out, rstd = _op_norm(
        target, True, as_rows(x, n), None, _flat(weight, n), None, None, None, False, True, rms_eps(x.dtype, eps),
        phase or None, None,
    )  # fmt: skip
    if n == 1:
        return out, rstd.unsqueeze(-1)
    return out.view(x.shape), rstd.view(*x.shape[:-n], *(1,) * n)


def _rms_norm_backward(native: Native) -> Callable[..., Any] | FastKernel:
    def fused_rms_norm_backward(
        keyset: Any, grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None,
        mask: Sequence[bool],
    ) -> Any:  # fmt: skip
        def fits() -> bool:
            return (
                _fits(x, shape, weight, None)
                and _same_dtype(x, weight)
                and grad.shape == x.shape
                and grad.dtype == x.dtype
                and (weight is not None or not mask[1])
            )

        def quick() -> bool:
            return _is_row(shape, x, grad, rstd) and rstd.dtype in _STATS

        args = (keyset, grad, x, shape, rstd, weight, mask)
        return run_norm(
            native, "rms_norm", _xrt_rms_norm_backward, args, x, shape, (grad, x, rstd, weight), fits=fits, quick=quick,
            mask=mask,
        )  # fmt: skip

    return fast_operator_kernel(native, fused_rms_norm_backward)


def _xrt_rms_norm_backward(
    target: CallContext | BoundKernel, phase: str, grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor,
    weight: Tensor | None, mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    del phase
    n = len(shape)
    if isinstance(target, BoundKernel):
        stats = (_stats(rstd, x, n),)
        return _masked(target.norm_backward(grad, x, shape, stats, weight, None, rms=True), (*mask, False))[:2]
    gradients = _op_norm_backward(
        target, True, as_rows(grad, n), as_rows(x, n), _flat(weight, n), None, _stats(rstd, x, n), None, None, mask[1],
        False, None,
    )  # fmt: skip
    return _gradients(gradients, x, shape, (*mask, False))[:2]


def as_rows(x: Tensor, n: int) -> Tensor:
    """Return `x` detached, contiguous, and with its last `n` dimensions as one; without a copy where that can be."""
    rows = x.detach() if x.requires_grad else x
    if not rows.is_contiguous():
        rows = rows.contiguous()
    return rows if n == 1 else rows.view(*x.shape[:-n], -1)


def stats_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """Return the dtype in which PyTorch keeps mean and rstd of a layer norm."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return x.dtype
    if x.device.type != "cpu":
        return torch.float32
    same = all(parameter is None or parameter.dtype == x.dtype for parameter in (weight, bias))
    return x.dtype if same else torch.float32


def rms_eps(dtype: torch.dtype, eps: float | None) -> float:
    """Return `eps`, or what PyTorch takes where there is none."""
    if eps is not None:
        return eps
    return float(torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps)


def _flat(columns: Tensor | None, n: int) -> Tensor | None:
    if columns is None:
        return None
    columns = columns.detach() if columns.requires_grad else columns
    return columns if n == 1 else columns.reshape(-1)


def _stats(stats: Tensor, x: Tensor, n: int) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    stats = stats.detach().to(dtype).contiguous()
    return stats.squeeze(-1) if n == 1 else stats.view(x.shape[:-n])


def _gradients(
    gradients: Any, x: Tensor, shape: Sequence[int], mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    arrays = list(gradients) if mask[1] or mask[2] else [gradients]
    grad_x = arrays[0]
    grad_weight = arrays[1] if mask[1] else None
    grad_bias = arrays[-1] if mask[2] else None
    if len(shape) > 1:
        grad_x = grad_x.view(x.shape)
        grad_weight = None if grad_weight is None else grad_weight.view(shape)
        grad_bias = None if grad_bias is None else grad_bias.view(shape)
    return (grad_x if mask[0] else None), grad_weight, grad_bias


def _masked(
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None], mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    of_x, of_weight, of_bias = (gradient if wanted else None for gradient, wanted in zip(gradients, mask, strict=True))
    return of_x, of_weight, of_bias


def _is_row(shape: Sequence[int], *tensors: Tensor) -> bool:
    """Say whether the last dimension alone is normalized, in tensors that xpuruntime kernels take as they are."""
    return len(shape) == 1 and all(tensor.is_contiguous() for tensor in tensors)


def _fits(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None) -> bool:
    """Say whether there is something to compute, in shapes that PyTorch takes; it says itself what is wrong."""
    shape = tuple(shape)
    return (
        0 < len(shape) <= x.dim()
        and x.numel() > 0
        and tuple(x.shape[-len(shape) :]) == shape
        and all(parameter is None or tuple(parameter.shape) == shape for parameter in (weight, bias))
    )


def _parameters_fit(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Say whether PyTorch takes these dtypes together: mixed ones on CPU alone, and there with fp32 parameters."""
    dtypes = [parameter.dtype for parameter in (weight, bias) if parameter is not None]
    if all(dtype == x.dtype for dtype in dtypes):
        return True
    half = x.dtype in (torch.float16, torch.bfloat16)
    return x.device.type == "cpu" and half and all(dtype == torch.float32 for dtype in dtypes)


def _same_dtype(x: Tensor, weight: Tensor | None) -> bool:
    return x.is_floating_point() and (weight is None or weight.dtype == x.dtype)


def _rms_norm_gradient(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    inner = tuple(range(x.dim() - len(shape), x.dim()))
    outer = tuple(range(x.dim() - len(shape)))
    wide = grad.to(dtype)
    normal = x.to(dtype) * rstd
    scaled = wide if weight is None else wide * weight.to(dtype)
    grad_x = grad_weight = None
    if mask[0]:
        grad_x = ((scaled - normal * (normal * scaled).mean(inner, keepdim=True)) * rstd).to(x.dtype)
    if mask[1] and weight is not None:
        product = wide * normal
        grad_weight = (product.sum(outer) if outer else product).to(weight.dtype)
    return grad_x, grad_weight


@functools.cache
def add_missing_kernel() -> torch.library.Library | None:
    """Give PyTorch the gradient of its fused RMS norm on CPU, where it has none, for good.

    Off CUDA ``_fused_rms_norm`` is made of other operations, each with its own gradient. With an xpuruntime kernel it
    becomes one node of autograd, whose backward may run after the policy is gone.
    """
    try:
        torch.library.get_kernel("aten::_fused_rms_norm_backward", "CPU")
    except RuntimeError:
        library = torch.library.Library("aten", "IMPL")
        library.impl("_fused_rms_norm_backward", _rms_norm_gradient, "CPU")
        return library
    return None


_KEYS = ("CPU", "CUDA")

OVERRIDES = (
    Override("native_layer_norm", "layer_norm", _KEYS, _layer_norm),
    Override("native_layer_norm_backward", "layer_norm", _KEYS, _layer_norm_backward),
    Override("_fused_rms_norm", "rms_norm", _KEYS, _rms_norm),
    Override("_fused_rms_norm_backward", "rms_norm", _KEYS, _rms_norm_backward),
)
