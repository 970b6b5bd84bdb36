# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Convolutions: the forward. Its gradient stays PyTorch's, because this library has no kernels for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.pytorch import calls, module_paths
from xpuruntime.pytorch.held import Held, current
from xpuruntime.pytorch.overriding.native import Override
from xpuruntime.pytorch.overriding.serving import is_native, leave, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from xpuruntime.ops.ambient import Place
    from xpuruntime.pytorch.overriding.native import Native

__all__ = ["OVERRIDES"]

_op_conv2d = _core.op_conv2d
#: Calls whose bias no kernel that they may have adds on its way; with one more than `_MOST`, all are forgotten.
_unfused: set[tuple[Any, ...]] = set()
_MOST = 4096
_deterministic = torch._C._get_deterministic_algorithms
_fp32_precision = torch._C._get_fp32_precision_getter


def _convolution(native: Native) -> Callable[..., Any]:
    def convolution(
        keyset: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    ) -> Any:  # fmt: skip
        held = current()
        args = (keyset, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
        if held is None or "conv" not in held.ops:
            return leave("convolution", "conv", native, args)
        phase = calls.phase() if held.by_phase else ""
        module = module_paths.current() if held.by_module else ""
        tf32 = x.dtype is torch.float32 and x.device.type == "cuda" and _fp32_precision("cuda", "conv") == "tf32"
        fixed = _deterministic() or (x.device.type == "cuda" and torch.backends.cudnn.deterministic)
        key = (
            "convolution", x.shape, weight.shape, x.stride(), weight.stride(), x.dtype, weight.dtype, x.device,
            None if bias is None else bias.dtype, tuple(stride), tuple(padding), tuple(dilation), transposed, groups,
            tf32, fixed, phase, module,
        )  # fmt: skip
        route = held.routes.get(key)
        if is_native(route):
            return native(*args)
        if route is None and not _fits(x, weight, stride, padding, dilation):
            return native(*args)
        return serve(
            held, key, route, "convolution", "conv", x, native, _our_convolution, args, phase=phase, module=module,
            allow_tf32=tf32, deterministic=fixed, unable="" if route is not None else _unable(x, weight, transposed),
        )  # fmt: skip

    return convolution


def _our_convolution(
    place: Place, phase: str, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    x, weight = x.detach(), weight.detach()
    bias = None if bias is None else bias.detach().contiguous()
    two = x.dim() == 4
    if two:
        (sh, sw), (ph, pw), (dh, dw) = _pair(stride), _pair(padding), _pair(dilation)
        layout = _layout(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    else:
        # PyTorch runs them as images of one row too, and gives them back contiguous.
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        (sh, sw), (ph, pw), (dh, dw) = (1, stride[0]), (0, padding[0]), (1, dilation[0])
        layout = torch.contiguous_format
    x = x.contiguous(memory_format=layout)
    weight = weight.contiguous(memory_format=layout if x.is_cuda else torch.contiguous_format)
    height = (x.shape[2] + 2 * ph - dh * (weight.shape[2] - 1) - 1) // sh + 1
    width = (x.shape[3] + 2 * pw - dw * (weight.shape[3] - 1) - 1) // sw + 1
    out = torch.empty(
        (x.shape[0], weight.shape[0], max(height, 0), max(width, 0)),
        dtype=x.dtype, device=x.device, memory_format=layout,
    )  # fmt: skip
    rest = (out, (sh, sw), (ph, pw, ph, pw), (dh, dw), (groups,), None, phase or None, None)
    kind = (place.site, x.shape, weight.shape, x.stride(), x.dtype, *rest[1:5])
    if bias is None or kind in _unfused:
        _op_conv2d(place, x, weight, None, *rest)
    else:
        try:
            _op_conv2d(place, x, weight, bias, *rest)
        except UnsupportedOperationError:
            # cuDNN fuses the bias of some convolutions only. PyTorch never does: it adds it afterwards.
            _op_conv2d(place, x, weight, None, *rest)
            if len(_unfused) >= _MOST:
                _unfused.clear()
            _unfused.add(kind)
    if bias is not None and kind in _unfused:
        out.add_(bias.view(-1, 1, 1))
    return out if two else out.squeeze(2)


def _convolution_backward(native: Native) -> Callable[..., Any]:
    def convolution_backward(keyset: Any, grad: Tensor, x: Tensor, *rest: Any) -> Any:
        held = current()
        args = (keyset, grad, x, *rest)
        if held is None or not held.by_phase or "conv" not in held.ops or not _names_backward(held):
            return leave("convolution_backward", "conv", native, args)
        module = module_paths.current() if held.by_module else ""
        key = ("convolution_backward", x.dtype, x.device, module)
        return serve(
            held, key, held.routes.get(key), "convolution_backward", "conv", x, native, _no_gradient, args,
            phase="backward", module=module, unable="this library has no kernel for the gradient of a convolution",
        )  # fmt: skip

    return convolution_backward


def _no_gradient(*args: Any) -> Any:
    raise NotImplementedError("no route leads here: `unable` keeps kernels of ours out")


def _names_backward(held: Held) -> bool:
    """Say whether a rule speaks of the backward of convolutions; what holds for all phases is meant for the forward."""
    return any(
        rule.use is not None and rule.match.op in (None, "conv") and "backward" in (rule.match.phase or ())
        for rule in held.policy.kernels.rules
    )


def _unable(x: Tensor, weight: Tensor, transposed: bool) -> str:
    if transposed:
        return "this library has no kernel for a transposed convolution"
    if x.dim() not in (3, 4):
        return f"kernels of this library convolve in one and two dimensions, and this has {x.dim() - 2}"
    if x.is_complex() or not x.is_floating_point():
        return f"kernels of this library convolve floating point numbers, and this is {x.dtype}"
    if weight.is_mkldnn:
        return "the weight is in a layout of oneDNN's own"
    return ""


def _fits(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> bool:
    """Say whether there is something to compute; PyTorch says itself where arguments do not fit."""
    return (
        x.numel() > 0
        and weight.numel() > 0
        and x.dim() == weight.dim()
        and x.dtype == weight.dtype
        and all(len(numbers) in (1, x.dim() - 2) for numbers in (stride, padding, dilation))
        and min(*stride, *dilation, *(one + 1 for one in padding)) > 0
    )


def _pair(numbers: Sequence[int]) -> tuple[int, int]:
    return (numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _layout(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> torch.memory_format:
    """Return the memory format in which PyTorch would convolve these, and give the result."""
    if x.is_contiguous() and weight.is_contiguous() and x.shape[1] > 1 and weight.shape[1] > 1:
        return torch.contiguous_format
    stride, padding, dilation, transposed, output_padding, groups = rest
    backend = torch._C._select_conv_backend(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups,
        None if bias is None else list(bias.shape),
    )  # fmt: skip
    found: torch.memory_format = torch._C._conv_determine_backend_memory_format(x, weight, backend)
    return found


OVERRIDES = (
    Override("convolution", "conv", ("CPU", "CUDA"), _convolution),
    Override("convolution_backward", "conv", ("CPU", "CUDA"), _convolution_backward),
)
