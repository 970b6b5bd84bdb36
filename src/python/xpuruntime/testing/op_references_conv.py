# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The gradients of a convolution by their definition in float64; see `op_references`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from xpuruntime.testing.op_references import EXTRA, Expected, expect, sums_roundoff

__all__ = ["Window", "input_gradient", "weight_gradient"]

Array = np.ndarray[Any, Any]


class Window(NamedTuple):
    """How the kernel moves over an image; `padding` is top, left, bottom, right."""

    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int


def input_gradient(grad_out: Array, weight: Array, size: tuple[int, int], window: Window, dtype: str) -> list[Expected]:
    """Return the gradient for x, whose height and width are `size`."""
    groups, (top, left, bottom, right) = window.groups, window.padding
    images, outputs, *out_size = grad_out.shape
    _, channels, *kernel_size = weight.shape
    arriving = grad_out.reshape(images, groups, outputs // groups, *out_size)
    kernel = weight.reshape(groups, outputs // groups, channels, *kernel_size)
    values = np.zeros((images, groups, channels, size[0] + top + bottom, size[1] + left + right))
    sizes = np.zeros_like(values)
    for (i, j), seen in _places(kernel_size, out_size, window):
        values[seen] += np.einsum("ngkhw,gkc->ngchw", arriving, kernel[..., i, j])
        sizes[seen] += np.einsum("ngkhw,gkc->ngchw", np.abs(arriving), np.abs(kernel[..., i, j]))
    inside = (..., slice(top, top + size[0]), slice(left, left + size[1]))
    shape = (images, groups * channels, *size)
    error = (outputs // groups * kernel_size[0] * kernel_size[1] + EXTRA) * sums_roundoff(dtype) * sizes[inside]
    return [expect("grad_x", values[inside].reshape(shape), error.reshape(shape), dtype)]


def weight_gradient(grad_out: Array, x: Array, size: tuple[int, int], window: Window, dtype: str) -> list[Expected]:
    """Return the gradient for a weight whose height and width are `size`."""
    groups, (top, left, bottom, right) = window.groups, window.padding
    images, outputs, *out_size = grad_out.shape
    channels = x.shape[1] // groups
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    split = padded.reshape(images, groups, channels, *padded.shape[2:])
    arriving = grad_out.reshape(images, groups, outputs // groups, *out_size)
    values = np.zeros((groups, outputs // groups, channels, *size))
    sizes = np.zeros_like(values)
    for (i, j), seen in _places(size, out_size, window):
        values[..., i, j] = np.einsum("ngkhw,ngchw->gkc", arriving, split[seen])
        sizes[..., i, j] = np.einsum("ngkhw,ngchw->gkc", np.abs(arriving), np.abs(split[seen]))
    shape = (outputs, channels, *size)
    error = (images * out_size[0] * out_size[1] + EXTRA) * sums_roundoff(dtype) * sizes
    return [expect("grad_weight", values.reshape(shape), error.reshape(shape), dtype)]


def _places(kernel_size: Any, out_size: Any, window: Window) -> Iterator[tuple[tuple[int, int], Any]]:
    """Yield each place in the kernel, with what of a padded image it meets at the pixels of the result."""
    for i in range(kernel_size[0]):
        for j in range(kernel_size[1]):
            starts = (i * window.dilation[0], j * window.dilation[1])
            yield (
                (i, j),
                (
                    ...,
                    *(
                        slice(start, start + (count - 1) * stride + 1, stride)
                        for start, count, stride in zip(starts, out_size, window.stride, strict=True)
                    ),
                ),
            )
