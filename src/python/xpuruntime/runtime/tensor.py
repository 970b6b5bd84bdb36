# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tensors: the memory of NumPy, PyTorch, CuPy and other arrays, shared without a copy."""

from __future__ import annotations

from typing import Any

from xpuruntime._core import Tensor
from xpuruntime.errors import InputError

__all__ = ["Tensor", "as_tensor"]


def as_tensor(array: Any, *, stream: Any = None) -> Tensor:
    """Return a tensor on the memory of any array. Never copies."""
    import numpy as np

    if isinstance(array, Tensor):
        if stream is not None and array.device != "cpu":
            array.make_wait(stream)
        return array
    if isinstance(array, np.ndarray):
        return Tensor.from_numpy(array)
    if hasattr(array, "__dlpack__"):
        return Tensor.from_dlpack(array, stream)
    if hasattr(array, "__cuda_array_interface__"):
        return Tensor.from_cuda_array_interface(array, stream=stream)
    msg = (
        f"an object of type {type(array).__name__} is no array: pass one of NumPy, PyTorch, CuPy or JAX, or call "
        "numpy.asarray first"
    )
    raise InputError(msg)
