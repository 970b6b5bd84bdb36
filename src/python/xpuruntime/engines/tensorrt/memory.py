# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Device memory of an engine from an xpuruntime pool, and memory for outputs whose size is known only after the run."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpuruntime import _core

__all__ = ["PoolAllocator", "make_allocator", "make_output_memory"]

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_GetName.restype = ctypes.c_char_p
_api.PyCapsule_GetName.argtypes = (ctypes.py_object,)


def _capsule(pointer: int) -> Any:
    return _api.PyCapsule_New(pointer, None, None)


def _pointer(memory: Any) -> int:
    """Return the address that the bindings hand over: a capsule, a number, or nothing."""
    if memory is None:
        return 0
    if isinstance(memory, int):
        return memory
    return int(_api.PyCapsule_GetPointer(memory, _api.PyCapsule_GetName(memory)) or 0)


class PoolAllocator:
    """What an engine's allocator does: buffers of a pool by address. Thread-safe.

    None of its methods raises: an exception would have to pass through the vendor's C++ frames, which ends the process.
    """

    def __init__(self, pool: _core.MemoryPool) -> None:
        self.pool = pool
        self._lock = threading.Lock()
        self._buffers: dict[int, _core.Buffer] = {}
        self._failure: str | None = None

    def give(self, size: int, stream: int) -> Any:
        """Return a capsule with memory for use in the order of a stream, or ``None``."""
        if size <= 0:
            return None
        try:
            buffer = self.pool.allocate(size, stream)
        except Exception as error:
            with self._lock:
                self._failure = str(error)
            return None
        with self._lock:
            self._buffers[buffer.ptr] = buffer
        return _capsule(buffer.ptr)

    def take(self, memory: Any, stream: int) -> bool:
        """Give memory back after the work that `stream` has now; say whether it was ours."""
        try:
            pointer = _pointer(memory)
            if not pointer:
                return True
            with self._lock:
                buffer = self._buffers.pop(pointer, None)
            if buffer is None:
                return False
            if stream != buffer.stream:
                buffer.record_stream(stream)
        except Exception as error:
            with self._lock:
                self._failure = str(error)
            return False
        return True

    def take_failure(self) -> str | None:
        """Return why the pool refused last, and forget it."""
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    def held(self) -> int:
        """Return the bytes that the engine holds."""
        with self._lock:
            return sum(buffer.nbytes for buffer in self._buffers.values())


def make_allocator(trt: Any, source: PoolAllocator) -> Any:
    """Return the vendor's allocator object over `source`; keep it for as long as anything was allocated with it.

    The base class has to be initialized by its own name: `IGpuAsyncAllocator` through `IGpuAllocator`, as its
    documentation shows, ends the process.
    """
    base: Any = getattr(trt, "IGpuAsyncAllocator", None) or trt.IGpuAllocator

    class Allocator(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)

        def allocate(self, size: int, alignment: int, flags: int) -> Any:
            del alignment, flags  # a pool's memory is aligned to 256 bytes, as that of the driver
            return source.give(int(size), 0)

        def deallocate(self, memory: Any) -> bool:
            return source.take(memory, 0)

        def allocate_async(self, size: int, alignment: int, flags: int, stream: int) -> Any:
            del alignment, flags
            return source.give(int(size), int(stream))

        def deallocate_async(self, memory: Any, stream: int) -> bool:
            return source.take(memory, int(stream))

        def reallocate(self, address: Any, alignment: int, new_size: int) -> Any:
            del address, alignment, new_size
            return None  # the library then allocates anew and copies

    return Allocator()


def make_output_memory(trt: Any, device: str) -> Any:
    """Return the vendor's output allocator over memory of ours.

    After a run, its `tensor` holds the bytes and its `shape` the sizes; `failure` says why memory was refused.
    """
    base: Any = trt.IOutputAllocator

    class OutputMemory(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.tensor: Any = None
            self.shape: tuple[int, ...] | None = None
            self.failure: str | None = None

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            return self.reallocate_output_async(tensor_name, memory, size, alignment, 0)

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            del tensor_name, memory, alignment
            try:
                from xpuruntime import _core

                self.tensor = _core.Tensor.empty((max(int(size), 1),), "uint8", device, stream=int(stream))
            except Exception as error:  # must not pass through C++
                self.failure = str(error)
                return 0
            return int(self.tensor.data_ptr)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            del tensor_name
            self.shape = tuple(int(size) for size in shape)

    return OutputMemory()
