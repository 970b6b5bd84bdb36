# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Narrow floating types between PyTorch and NumPy, which has them by the package ``ml_dtypes`` and not by DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np

from xpuruntime.errors import InputError

__all__ = ["from_numpy", "to_numpy"]

#: Type, as PyTorch and ``ml_dtypes`` call it, to integers of its size, as both call these.
_BITS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def from_numpy(array: Any) -> Any:
    """Return a tensor on the memory of a contiguous array. It is written only if the array may be."""
    import torch

    bits = _BITS.get(array.dtype.name)
    if bits is None:
        return torch.from_dlpack(_writable(array))
    return torch.from_dlpack(_writable(array.view(bits))).view(getattr(torch, array.dtype.name))


def to_numpy(tensor: Any) -> Any:
    """Return an array on the memory of a tensor on the CPU. Raises `InputError` without ``ml_dtypes``."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    bits = _BITS.get(name)
    if bits is None:
        return tensor.numpy()
    try:
        import ml_dtypes
    except ImportError:
        raise InputError(
            f"a result is {name}, which NumPy does not have. Fix: pip install ml_dtypes, or pass torch tensors, and "
            "results are torch tensors"
        ) from None
    return tensor.view(getattr(torch, bits)).numpy().view(getattr(ml_dtypes, name))


class _Shared:
    """Memory of a read-only array, for readers only: torch has no tensors that cannot be written."""

    def __init__(self, array: Any) -> None:
        facts = dict(array.__array_interface__)
        facts["data"] = (facts["data"][0], False)
        self.__array_interface__ = facts
        self.array = array


def _writable(array: Any) -> Any:
    return array if array.flags.writeable else np.asarray(_Shared(array))
