# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""NumPy arrays in and out of raw device addresses, for tests of memory itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from xpuruntime.runtime.memory import Buffer
from xpuruntime.runtime.stream import Tensor


class _Array:
    """Let a buffer be seen as an array by the CUDA array interface."""

    def __init__(self, buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": np.dtype(dtype).str,
            "data": (buffer.ptr, False),
            "version": 3,
            "stream": None,
        }


def tensor_of(buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Return the buffer's memory as a tensor that keeps the buffer."""
    return Tensor.from_cuda_array_interface(_Array(buffer, shape, dtype))


def to_host(buffer: Buffer, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the values of a buffer, after all work on it."""
    return tensor_of(buffer, shape, dtype).to("cpu").numpy()
