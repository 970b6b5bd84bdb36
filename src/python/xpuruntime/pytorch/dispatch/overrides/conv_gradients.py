# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Override of ``convolution_backward``: gradients of the input, the weight and the bias in one operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.dispatch.overrides.conv_arguments import (
    fits,
    is_fixed,
    layout_of,
    rounds,
    unsupported_reason,
    window_of,
)
from xpuruntime.pytorch.dispatch.overrides.invoke import call_native, invoke, is_native
from xpuruntime.pytorch.dispatch.overrides.native import Override

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from xpuruntime.ops.call_context import CallContext
    from xpuruntime.pytorch.dispatch.overrides.native import Native

__all__ = ["OVERRIDES"]

_input_gradient = _core.op_conv2d_input_gradient
_weight_gradient = _core.op_conv2d_weight_gradient


def _convolution_backward(native: Native) -> Callable[..., Any]:
    def convolution_backward(
        keyset: Any, grad: Tensor, x: Tensor, weight: Tensor, bias_shape: Sequence[int] | None, stride: Sequence[int],
        padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
        mask: Sequence[bool],
    ) -> Any:  # fmt: skip
        active = active_policy()
        args = (
            keyset, grad, x, weight, bias_shape, stride, padding, dilation, transposed, output_padding, groups, mask,
        )  # fmt: skip
        if active is None or "conv" not in active.ops:
            return call_native("convolution_backward", "conv", native, args)
        phase = "backward" if active.by_phase else ""
        module = module_paths.current() if active.by_module else ""
        tf32, fixed = rounds(x), is_fixed(x)
        key = (
            "convolution_backward", grad.shape, x.shape, weight.shape, grad.stride(), x.stride(), weight.stride(),
            grad.dtype, x.dtype, weight.dtype, x.device, tuple(stride), tuple(padding), tuple(dilation), transposed,
            groups, tuple(mask), tf32, fixed, phase, module,
        )  # fmt: skip
        route = active.routes.get(key)
        if is_native(route):
            return native(*args)
        if route is None and not (
            fits(x, weight, None, stride, padding, dilation, transposed, groups)
            and grad.dim() == x.dim()
            and grad.dtype == x.dtype
            and grad.device == x.device
            and (mask[0] or mask[1])  # else there is no kernel to choose
        ):
            return native(*args)
        return invoke(
            active, key, route, "convolution_backward", "conv", x, native, _xrt_gradients, args, phase=phase,
            module=module, allow_tf32=tf32, deterministic=fixed,
            unsupported_reason="" if route is not None else unsupported_reason(x, weight, transposed),
        )  # fmt: skip

    return convolution_backward


def _xrt_gradients(
    place: CallContext, phase: str, grad: Tensor, x: Tensor, weight: Tensor, bias_shape: Sequence[int] | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int, mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    del phase
    two = x.dim() == 4
    grad, x, weight = grad.detach(), x.detach(), weight.detach()
    layout = torch.contiguous_format
    if two:
        layout = layout_of(x, weight, None, bias_shape, stride, padding, dilation, transposed, output_padding, groups)
    else:
        grad, x, weight = grad.unsqueeze(2), x.unsqueeze(2), weight.unsqueeze(2)
    window = window_of(4 if two else 3, stride, padding, dilation, groups)
    grad = grad.contiguous(memory_format=layout)
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        weight = weight.contiguous(memory_format=layout if x.is_cuda else torch.contiguous_format)
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=layout)
        _input_gradient(place, grad, weight, grad_x, tuple(x.shape[2:]), *window, None)
    if mask[1]:
        x = x.contiguous(memory_format=layout)
        grad_weight = torch.empty(weight.shape, dtype=x.dtype, device=x.device, memory_format=layout)
        _weight_gradient(place, grad, x, grad_weight, tuple(weight.shape[2:]), *window, None)
    if mask[2]:
        # A plain sum, as PyTorch takes it too: there is no kernel to choose.
        grad_bias = grad.sum((0, 2, 3))
    if two:
        return grad_x, grad_weight, grad_bias
    return (
        None if grad_x is None else grad_x.squeeze(2),
        None if grad_weight is None else grad_weight.squeeze(2),
        grad_bias,
    )


OVERRIDES = (Override("convolution_backward", "conv", ("CPU", "CUDA"), _convolution_backward),)
