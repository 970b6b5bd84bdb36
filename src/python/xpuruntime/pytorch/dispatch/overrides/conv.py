# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overrides of convolutions. Their gradients are in `conv_gradients`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
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
    place: CallContext, phase: str, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
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
    kind = (place.site, x.shape, weight.shape, x.stride(), x.dtype, *window)
    if bias is None or kind in CONTEXT.unfused_convs:
        _op_conv2d(place, x, weight, None, *rest)
    else:
        try:
            _op_conv2d(place, x, weight, bias, *rest)
        except UnsupportedOperationError:
            # cuDNN fuses the bias of some convolutions only. PyTorch never does: it adds it afterwards.
            _op_conv2d(place, x, weight, None, *rest)
            if len(CONTEXT.unfused_convs) >= _MOST:
                CONTEXT.unfused_convs.clear()
            CONTEXT.unfused_convs.add(kind)
    if bias is not None and kind in CONTEXT.unfused_convs:
        out.add_(bias.view(-1, 1, 1))
    return out if two else out.squeeze(2)


OVERRIDES = (Override("convolution", "conv", ("CPU", "CUDA"), _convolution),)
