# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overrides of convolutions and of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime import _core
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.dispatch.overrides.native import Override, call_native, invoke, is_native

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.ops.call_context import CallContext
    from xpuruntime.pytorch.dispatch.overrides.native import Native

_deterministic = _private_api.is_deterministic
_fp32_precision = _private_api.fp32_precision


class ConvWindow(NamedTuple):
    """How the kernel moves over an image, as `_core` takes it."""

    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: tuple[int]


def window_of(
    dims: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> ConvWindow:
    """Return the window of a convolution whose operands have `dims` dimensions: 4, or 3 for images of one row."""
    if dims == 4:
        (sh, sw), (ph, pw), (dh, dw) = _pair(stride), _pair(padding), _pair(dilation)
    else:
        (sh, sw), (ph, pw), (dh, dw) = (1, stride[0]), (0, padding[0]), (1, dilation[0])
    return ConvWindow((sh, sw), (ph, pw, ph, pw), (dh, dw), (groups,))


def rounds(x: Tensor) -> bool:
    """Say whether PyTorch's switches let a convolution of `x` round its inputs to TF32."""
    return x.dtype is torch.float32 and x.device.type == "cuda" and _fp32_precision("cuda", "conv") == "tf32"


def is_fixed(x: Tensor) -> bool:
    """Say whether PyTorch's switches ask a convolution of `x` for the same bits in every run."""
    return bool(_deterministic()) or (x.device.type == "cuda" and torch.backends.cudnn.deterministic)


def unsupported_reason(x: Tensor, weight: Tensor, transposed: bool) -> str:
    """Return why no xpuruntime kernel can serve, or nothing."""
    if transposed:
        return "this library has no kernel for a transposed convolution"
    if x.dim() not in (3, 4):
        return f"kernels of this library convolve in one and two dimensions, and this has {x.dim() - 2}"
    if x.is_complex() or not x.is_floating_point():
        return f"kernels of this library convolve floating point numbers, and this is {x.dtype}"
    if weight.is_mkldnn:
        return "the weight is in a layout of oneDNN's own"
    return ""


def fits(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, groups: int,
) -> bool:  # fmt: skip
    """Say whether there is something to compute; PyTorch says itself where arguments do not fit."""
    if x.dim() < 3 or x.dim() != weight.dim() or x.numel() == 0 or weight.numel() == 0:
        return False
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return (
        x.dtype == weight.dtype
        and x.device == weight.device
        and (bias is None or (tuple(bias.shape), bias.dtype, bias.device) == ((channels,), x.dtype, x.device))
        and all(len(numbers) in (1, x.dim() - 2) for numbers in (stride, padding, dilation))
        and min(*stride, *dilation, *(pad + 1 for pad in padding)) > 0
    )


def layout_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, bias_shape: Sequence[int] | None, *rest: Any
) -> torch.memory_format:
    """Return the memory format in which PyTorch would convolve these, and give the result and the gradients.

    `rest` is stride, padding, dilation, whether it is transposed, output padding and groups.
    """
    if _is_plain(x) and _is_plain(weight):
        return torch.contiguous_format
    backend = _private_api.conv_backend(x, weight, bias, *rest, None if bias_shape is None else list(bias_shape))
    layout: torch.memory_format = _private_api.conv_memory_format(x, weight, backend)
    return layout


def _is_plain(x: Tensor) -> bool:
    """Say whether it is contiguous and nothing else: one channel, or one pixel, can be channels last as well."""
    return x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last)


def _pair(numbers: Sequence[int]) -> tuple[int, int]:
    return (numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


_op_conv2d = _core.op_conv2d
#: Kinds of calls whose bias no kernel adds that are kept; with one more, all are forgotten.
_MOST = 4096


def _convolution(native: Native) -> Callable[..., Any]:
    def convolution(
        keyset: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    ) -> Any:  # fmt: skip
        active = active_policy()
        args = (keyset, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
        if active is None or "conv" not in active.ops:
            return call_native("convolution", "conv", native, args)
        phase, module = active.call_context()
        tf32, fixed = rounds(x), is_fixed(x)
        key = (
            "convolution", x.shape, weight.shape, x.stride(), weight.stride(), x.dtype, weight.dtype, x.device,
            None if bias is None else (bias.dtype, bias.shape), tuple(stride), tuple(padding), tuple(dilation),
            transposed, groups, tf32, fixed, phase, module,
        )  # fmt: skip
        route = active.routes.get(key)
        if is_native(route):
            return native(*args)
        if route is None and not fits(x, weight, bias, stride, padding, dilation, transposed, groups):
            return native(*args)
        return invoke(
            active, key, route, "convolution", "conv", x, native, _xrt_convolution, args, phase=phase, module=module,
            allow_tf32=tf32, deterministic=fixed,
            unsupported_reason="" if route is not None else unsupported_reason(x, weight, transposed),
        )  # fmt: skip

    return convolution


def _xrt_convolution(
    context: CallContext, phase: str, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    x, weight = x.detach(), weight.detach()
    bias = None if bias is None else bias.detach().contiguous()
    two = x.dim() == 4
    if two:
        layout = layout_of(
            x, weight, bias, None if bias is None else bias.shape, stride, padding, dilation, transposed,
            output_padding, groups,
        )  # fmt: skip
    else:
        # PyTorch runs them as images of one row too, and gives them back contiguous.
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        layout = torch.contiguous_format
    x = x.contiguous(memory_format=layout)
    weight = weight.contiguous(memory_format=layout if x.is_cuda else torch.contiguous_format)
    window = window_of(4 if two else 3, stride, padding, dilation, groups)
    (sh, sw), (ph, pw, _, _), (dh, dw), _ = window
    height = (x.shape[2] + 2 * ph - dh * (weight.shape[2] - 1) - 1) // sh + 1
    width = (x.shape[3] + 2 * pw - dw * (weight.shape[3] - 1) - 1) // sw + 1
    out = torch.empty(
        (x.shape[0], weight.shape[0], max(height, 0), max(width, 0)),
        dtype=x.dtype, device=x.device, memory_format=layout,
    )  # fmt: skip
    rest = (out, *window, None, phase or None, None)
    kind = (context.site, x.shape, weight.shape, x.stride(), x.dtype, *window)
    if bias is None or kind in CONTEXT.unfused_convs:
        _op_conv2d(context, x, weight, None, *rest)
    else:
        try:
            _op_conv2d(context, x, weight, bias, *rest)
        except UnsupportedOperationError:
            # cuDNN fuses the bias of some convolutions only. PyTorch never does: it adds it afterwards.
            _op_conv2d(context, x, weight, None, *rest)
            if len(CONTEXT.unfused_convs) >= _MOST:
                CONTEXT.unfused_convs.clear()
            CONTEXT.unfused_convs.add(kind)
    if bias is not None and kind in CONTEXT.unfused_convs:
        out.add_(bias.view(-1, 1, 1))
    return out if two else out.squeeze(2)


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
    context: CallContext, phase: str, grad: Tensor, x: Tensor, weight: Tensor, bias_shape: Sequence[int] | None,
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
        _input_gradient(context, grad, weight, grad_x, tuple(x.shape[2:]), *window, None)
    if mask[1]:
        x = x.contiguous(memory_format=layout)
        grad_weight = torch.empty(weight.shape, dtype=x.dtype, device=x.device, memory_format=layout)
        _weight_gradient(context, grad, x, grad_weight, tuple(weight.shape[2:]), *window, None)
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


OVERRIDES = (
    Override("convolution", "conv", ("CPU", "CUDA"), _convolution),
    Override("convolution_backward", "conv", ("CPU", "CUDA"), _convolution_backward),
)
