# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Device arrays of any framework as ONNX Runtime binds them: pointer, type, shape."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.arrays import device_of
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from xpuruntime.engines.arrays import Kind

__all__ = ["ONNX_TYPES", "DeviceArray", "as_bool", "as_kind", "device_array", "element_type", "torch_dtype_name"]

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

#: torch.dtype to our name, filled as dtypes are met.
_TORCH_DTYPES: dict[Any, str] = {}


class DeviceArray(msgspec.Struct, frozen=True):
    """What a binding needs of one array, and `owner`, which keeps it alive. No pointer: `owner` is a host array."""

    pointer: int | None
    dtype: str
    shape: tuple[int, ...]
    contiguous: bool
    owner: Any


def device_array(name: str, array: Any, kind: Kind, device: str, stream: Any) -> DeviceArray:
    """Describe a CUDA array without copying it.

    Parameters
    ----------
    name : str
        Input name, for messages.
    array : object
    kind : str
    device : str
        Where it must be.
    stream : Stream
        Where the data will be read: a DLPack producer is told to make it ready there.

    Raises
    ------
    InputError
        If it is on another device, or requires grad.
    """
    if kind == "torch":
        where = f"cuda:{array.get_device()}" if array.is_cuda else array.device.type
    else:
        where = device_of(name, array, kind)
    if where != device:
        msg = (
            f"input {name!r} is on {where}, but this session runs on {device}; move it first (torch: x.to({device!r}))"
        )
        raise InputError(msg)
    if kind == "torch":
        if array.requires_grad:
            msg = f"input {name!r} is a torch tensor that requires grad; pass x.detach()"
            raise InputError(msg)
        dtype = torch_dtype_name(array.dtype)
        return DeviceArray(array.data_ptr(), dtype, tuple(array.shape), array.is_contiguous(), array)
    if kind == "cupy":
        return DeviceArray(array.data.ptr, array.dtype.name, array.shape, bool(array.flags.c_contiguous), array)
    from xpuruntime import _core

    tensor = _core.Tensor.from_dlpack(array, stream=stream)
    return DeviceArray(tensor.data_ptr, tensor.dtype, tuple(tensor.shape), tensor.is_contiguous, tensor)


def as_kind(tensor: Any, kind: Kind) -> Any:
    """Return our CUDA tensor as the caller's kind, without a copy."""
    if kind == "torch":
        return sys.modules["torch"].from_dlpack(tensor)
    if kind == "cupy":
        return sys.modules["cupy"].from_dlpack(tensor)
    if kind == "jax":
        import importlib

        return importlib.import_module("jax").dlpack.from_dlpack(tensor)
    return tensor


def as_bool(capsule: Any) -> Any:
    """Return `capsule` with its type set to bool: ONNX Runtime exports booleans as uint8.

    Parameters
    ----------
    capsule : PyCapsule
        An unused DLPack capsule named ``dltensor``.
    """
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    ctypes.c_uint8.from_address(address(capsule, b"dltensor") + _DTYPE_CODE).value = _DL_BOOL
    return capsule


def element_type(name: str, dtype: str) -> int:
    """Return the ONNX element type of `dtype`.

    Raises
    ------
    InputError
        If ONNX Runtime cannot bind it on a device.
    """
    code = ONNX_TYPES.get(dtype)
    if code is None:
        msg = f"{name!r} has dtype {dtype}, which cannot be bound on a CUDA device; it can be {', '.join(ONNX_TYPES)}"
        raise InputError(msg)
    return code


def torch_dtype_name(dtype: Any) -> str:
    """Return our name of a ``torch.dtype``."""
    return _TORCH_DTYPES.get(dtype) or _name_torch_dtype(dtype)


def _name_torch_dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    name = {"float8_e4m3fn": "float8e4m3fn", "float8_e5m2": "float8e5m2"}.get(name, name)
    _TORCH_DTYPES[dtype] = name
    return name
