# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""CUDA arrays and streams of any framework, as engines need them: pointer, type, shape, and the caller's stream.

No framework is imported here; one is used only when the caller has already imported it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.arrays import Kind, device_of, kind_of, torch_dtype_name
from xpuruntime.engines.input_binding import fixed_shape
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from xpuruntime.engines.model import TensorInfo


class DeviceArray(msgspec.Struct, frozen=True):
    """What a binding needs of one array, and `owner`, which keeps it alive. No pointer: `owner` is a host array."""

    pointer: int | None
    dtype: str
    shape: tuple[int, ...]
    contiguous: bool
    owner: Any


def device_array(name: str, array: Any, kind: Kind, device: str, stream: Any) -> DeviceArray:
    """Describe a CUDA array without copying it."""
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
            msg = f"input {name!r} is a torch tensor that requires grad. Fix: pass x.detach()"
            raise InputError(msg)
        dtype = torch_dtype_name(array.dtype)
        return DeviceArray(array.data_ptr(), dtype, tuple(array.shape), array.is_contiguous(), array)
    if kind == "cupy":
        return DeviceArray(array.data.ptr, array.dtype.name, array.shape, bool(array.flags.c_contiguous), array)
    from xpuruntime import _core

    tensor = _core.Tensor.from_dlpack(array, stream=stream)
    return DeviceArray(tensor.data_ptr, tensor.dtype, tuple(tensor.shape), tensor.is_contiguous, tensor)


def as_kind(tensor: Any, kind: Kind) -> Any:
    """Return a CUDA tensor of xpuruntime as the caller's kind, without a copy."""
    if kind == "torch":
        return sys.modules["torch"].from_dlpack(tensor)
    if kind == "cupy":
        return sys.modules["cupy"].from_dlpack(tensor)
    if kind == "jax":
        import importlib

        return importlib.import_module("jax").dlpack.from_dlpack(tensor)
    return tensor


def not_contiguous(item: DeviceArray) -> str | None:
    """Return why an array cannot be used where it is, as the end of a sentence; ``None`` where it can."""
    return None if item.contiguous else "is not C-contiguous"


class DeviceBuffers:
    """Buffers of a binding on a CUDA device: arrays of the caller, or new ones of the caller's kind.

    `unfit` says why an array cannot be bound; `stream` is the one that work on the buffers is ordered by.
    """

    def __init__(
        self, device: str, stream: Any, kind: Kind, unfit: Callable[[DeviceArray], str | None] = not_contiguous
    ) -> None:
        self._device, self._stream, self._unfit = device, stream, unfit
        #: The kind of new arrays.
        self.kind: Kind = "tensor" if kind == "numpy" else kind

    def input(self, info: TensorInfo, buffer: Any) -> tuple[Any, DeviceArray]:
        """Return the buffer of an input, and where it is; `given` may be an array, a shape, or ``None``."""
        if buffer is None or isinstance(buffer, tuple):
            return self._new(info.name, fixed_shape(info, buffer), info.dtype)
        return self._taken("input", info.name, buffer, ", or its shape")

    def output(self, name: str, dtype: str, shape: tuple[int, ...], buffer: Any) -> tuple[Any, DeviceArray]:
        """Return the buffer of an output of this type and shape, and where it is."""
        if buffer is None:
            return self._new(name, shape, dtype)
        array, item = self._taken("output", name, buffer)
        if (item.dtype, item.shape) != (dtype, shape):
            msg = f"output {name!r} is {dtype} {list(shape)} for these inputs, got {item.dtype} {list(item.shape)}"
            raise InputError(f"{msg}. Fix: pass such an array, or leave the output out")
        return array, item

    def _new(self, name: str, shape: tuple[int, ...], dtype: str) -> tuple[Any, DeviceArray]:
        from xpuruntime import _core

        tensor = _core.Tensor.empty(shape, dtype, self._device, stream=self._stream)
        return as_kind(tensor, self.kind), device_array(name, tensor, "tensor", self._device, self._stream)

    def _taken(self, role: str, name: str, array: Any, else_: str = "") -> tuple[Any, DeviceArray]:
        kind = kind_of(name, array)
        if kind == "numpy":
            msg = f"{role} {name!r} is a NumPy array, whose memory cannot be bound on {self._device}"
            raise InputError(f"{msg}. Fix: pass a CUDA array{else_}")
        item = device_array(name, array, kind, self._device, self._stream)
        if (reason := self._unfit(item)) is not None:
            msg = f"{role} {name!r} {reason}, so its memory cannot be bound. Fix: pass a copy of it{else_}"
            raise InputError(msg)
        return array, item


def caller_stream(stream: Any, kind: Kind, index: int) -> int:
    """Return the handle of the stream the caller works on."""
    if stream is None:
        if kind == "torch":
            return torch_stream(index)
        if kind == "cupy":
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
        return 0
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1])
    msg = (
        f"stream= is a {type(stream).__name__}. "
        "Fix: pass a torch, CuPy or xpuruntime stream, or a cudaStream_t as an int"
    )
    raise InputError(msg)


def stream_owner(stream: Any, kind: Kind) -> Any:
    """Return the object that keeps the caller's stream alive, where there is one."""
    if stream is None and kind == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream()
    return None if isinstance(stream, int) else stream


def torch_stream(index: int) -> int:
    """Return the handle of torch's current stream on CUDA device `index`."""
    return int(sys.modules["torch"].cuda.current_stream(index).cuda_stream)


def host_copies(feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays in host memory: NumPy's as they are, others shared where they lie there, else copied."""
    from xpuruntime import _core

    host = {}
    for name, array in feeds.items():
        kind = kind_of(name, array)
        if kind == "numpy":
            host[name] = array
        else:
            tensor = array if kind == "tensor" else _core.Tensor.from_dlpack(array)
            host[name] = tensor.numpy() if tensor.device == "cpu" else tensor.contiguous().to("cpu").numpy()
    return host


def several_devices() -> bool:
    """Say whether there is more than one CUDA device: a single one is always the current one."""
    from xpuruntime import _core

    return _core.DeviceManager.instance().get_device_count("cuda") > 1


_HERE = contextlib.nullcontext()


def made_current(device: str, *, several: bool) -> contextlib.AbstractContextManager[None]:
    """Make a device the current one for a block; costs nothing where there are not `several`."""
    if not several:
        return _HERE
    from xpuruntime import _core

    return _core.DeviceScope(device)
