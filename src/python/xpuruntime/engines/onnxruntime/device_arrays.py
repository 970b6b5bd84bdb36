# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Element types as ONNX Runtime binds and exports them."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from xpuruntime.engines.cuda_arrays import DeviceArray

__all__ = ["ONNX_TYPES", "DLPackArray", "as_bool", "element_type", "host_inputs", "item_size", "overlap"]

#: Our dtype names to ONNX element types.
ONNX_TYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
    "bfloat16": 16,
    "float8e4m3fn": 17,
    "float8e5m2": 19,
}


#: Offset of ``DLTensor.dtype.code`` (behind data, device and ndim), and the code of booleans.
_DTYPE_CODE, _DL_BOOL = 20, 6


def as_bool(capsule: Any) -> Any:
    """Return `capsule` with its type set to bool: ONNX Runtime exports booleans as uint8."""
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    ctypes.c_uint8.from_address(address(capsule, b"dltensor") + _DTYPE_CODE).value = _DL_BOOL
    return capsule


def element_type(name: str, dtype: str) -> int:
    """Return the ONNX element type of `dtype`."""
    code = ONNX_TYPES.get(dtype)
    if code is None:
        msg = f"{name!r} has dtype {dtype}, which cannot be bound on a CUDA device; it can be {', '.join(ONNX_TYPES)}"
        raise InputError(msg)
    return code


def host_inputs(session: Any) -> list[str]:
    """Return the inputs that ONNX Runtime reads on the host although the session is one of CUDA."""
    infos = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    return [value.name for value, info in infos if not info.name.startswith("Cuda") or "Pinned" in info.name]


def item_size(dtype: str) -> int:
    """Return the bytes of one element of a type in `ONNX_TYPES`."""
    if dtype == "bool" or dtype.startswith("float8"):
        return 1
    return int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8


def overlap(one: DeviceArray, other: DeviceArray) -> bool:
    """Return whether two contiguous arrays share memory."""
    ends = []
    for array in (one, other):
        size = math.prod(array.shape) * item_size(array.dtype)
        if not array.pointer or not size:
            return False
        ends.append((array.pointer, array.pointer + size))
    (start, end), (least, most) = ends
    return start < most and least < end


class DLPackArray:
    """A DLPack capsule with the methods that consumers call."""

    def __init__(self, capsule: Any, index: int) -> None:
        self._capsule = capsule
        self._index = index

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        del stream  # the caller's stream already waits for the session's
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._index
