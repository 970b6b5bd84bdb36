# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Trials of PyTorch's C++ functions: whether they give what Python's call of the same kernel gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.pytorch.overriding.gates import keyset_of
from xpuruntime.pytorch.overriding.undisturbed import find_out

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from xpuruntime.pytorch.overriding.native import Native

__all__ = ["try_operator"]

#: Arguments that Python takes by name alone.
_NAMES = {"scaled_dot_product_attention": ("scale", "enable_gqa")}


def try_operator(native: Native) -> str:
    """Call the C++ function of a native kernel on small tensors, and compare with a call by way of Python.

    Returns
    -------
    str
        Why it is not to be called; empty where it may be.
    """
    return find_out(lambda: _compare(native))


def _compare(native: Native) -> str:
    device = "cuda" if native.key == "CUDA" else "cpu"
    keyset = keyset_of(native.key)
    names = _NAMES.get(native.name, ())
    for args in _CASES[native.name](device):
        place = args[: len(args) - len(names)]
        expected = native(keyset, *place, **dict(zip(names, args[len(place) :], strict=True)))
        try:
            found = _core.run_operator(native.name, native.key, *args)
        except Exception as error:
            return f"PyTorch's C++ function of aten::{native.name} raised in its trial: {error}"
        pairs = [(found, expected)] if len(names) else list(zip(found, expected, strict=True))
        if not all(_same(one, other) for one, other in pairs):
            return f"PyTorch's C++ function of aten::{native.name} gives something else than Python's call"
    return ""


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if (one.shape, one.stride(), one.dtype, one.device) != (other.shape, other.stride(), other.dtype, other.device):
        return False
    if type(one.grad_fn) is not type(other.grad_fn):
        return False
    return bool(torch.allclose(one.detach(), other.detach(), rtol=1e-5, atol=1e-6))


def _numbers(device: str, *shape: int, start: float = 0.3) -> Tensor:
    """Return numbers of which none is like another, without PyTorch's generator."""
    count = torch.Size(shape).numel()
    return torch.arange(count, device=device, dtype=torch.float32).add_(start).sin_().reshape(shape)


def _layer_norm(device: str) -> Iterator[tuple[Any, ...]]:
    x = _numbers(device, 2, 3, 4)
    for sizes in ((4,), (3, 4)):
        weight, bias = (_numbers(device, *sizes, start=start) for start in (1.0, 2.0))
        for columns in ((None, None), (weight, None), (weight, bias), (None, bias)):
            yield (x, list(sizes), *columns, 0.125)


def _layer_norm_backward(device: str) -> Iterator[tuple[Any, ...]]:
    x, grad = _numbers(device, 2, 3, 4), _numbers(device, 2, 3, 4, start=5.0)
    for sizes in ((4,), (3, 4)):
        weight, bias = (_numbers(device, *sizes, start=start) for start in (1.0, 2.0))
        inner = tuple(range(-len(sizes), 0))
        mean = x.mean(inner, keepdim=True)
        rstd = torch.rsqrt((x - mean).square().mean(inner, keepdim=True) + 0.125)
        for columns, masks in (
            ((weight, bias), ((True, True, True), (True, False, False), (False, True, True))),
            ((None, None), ((True, False, False),)),
        ):
            for mask in masks:
                yield (grad, x, list(sizes), mean, rstd, *columns, list(mask))


def _rms_norm(device: str) -> Iterator[tuple[Any, ...]]:
    x = _numbers(device, 2, 3, 4)
    for sizes in ((4,), (3, 4)):
        for weight in (None, _numbers(device, *sizes, start=1.0)):
            for eps in (None, 0.125):
                yield (x, list(sizes), weight, eps)


def _rms_norm_backward(device: str) -> Iterator[tuple[Any, ...]]:
    x, grad = _numbers(device, 2, 3, 4), _numbers(device, 2, 3, 4, start=5.0)
    weight = _numbers(device, 4, start=1.0)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.125)
    for mask in ((True, True), (True, False), (False, True)):
        yield (grad, x, [4], rstd, weight, list(mask))
    yield (grad, x, [4], rstd, None, [True, False])


def _attention(device: str) -> Iterator[tuple[Any, ...]]:
    for records in (False, True):
        q = _numbers(device, 1, 4, 3, 8).requires_grad_(records)
        k, v = (_numbers(device, 1, 4, 5, 8, start=start) for start in (1.0, 2.0))
        mask = _numbers(device, 3, 5, start=3.0)
        yield (q, k, v, None, 0.0, False, None, False)
        yield (q, k, v, None, 0.0, True, 0.25, False)
        yield (q, k, v, mask, 0.0, False, 0.5, False)
        yield (q, k[:, :2], v[:, :2], mask, 0.0, False, None, True)


_CASES = {
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "scaled_dot_product_attention": _attention,
}
