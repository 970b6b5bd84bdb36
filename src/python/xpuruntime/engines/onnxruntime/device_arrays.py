# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arrays on devices as ONNX Runtime takes them, and turns of sessions on a CUDA device."""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.errors import InputError
from xpuruntime.runtime.interruptible_waits import ConditionVariable, uninterrupted

if TYPE_CHECKING:
    from xpuruntime.engines.cuda_arrays import DeviceArray

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


def overlap(first: DeviceArray, other: DeviceArray) -> bool:
    """Return whether two contiguous arrays share memory."""
    ends = []
    for array in (first, other):
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


#: Not a condition: its methods in Python can be interrupted with the lock held.
_lock = threading.RLock()
#: Locks of the sessions that are open, in the order in which they were made.
_turns: list[weakref.ref[Any]] = []
#: Blocks that no capture may be beside, captures that wait for their end, and the one that goes on.
_working: set[object] = set()
_waiting: set[object] = set()
_capturing: set[object] = set()
#: That any of these changed.
_change = ConditionVariable(_lock)


def new_turn() -> Any:
    """Return the lock of a new session."""
    turn = threading.Lock()
    with _lock:
        _turns[:] = [reference for reference in _turns if reference() is not None]
        _turns.append(weakref.ref(turn))
    return turn


class _BesideNoCapture:
    """A block that no capture may be beside; `_claim` says when it may begin."""

    def _claim(self) -> bool:
        raise NotImplementedError

    def _enter(self) -> None:
        _change.wait_for(self._claim)

    def _leave(self, *_: object) -> None:
        with _lock:
            _working.discard(self)
            if not _working:
                _change.notify_all()

    __enter__ = _core.guarded(_enter, _leave)
    __exit__ = _core.guarded(_leave, _leave)


class no_capture(_BesideNoCapture):  # noqa: N801 - used like a function
    """For a block that opens, observes or closes a session: wait for a capture, and let none begin. May be nested."""

    def _claim(self) -> bool:
        if _capturing and not _working:
            return False
        _working.add(self)
        return True


class between_captures(_BesideNoCapture):  # noqa: N801 - used like a function
    """For a run of host arrays, which is short and holds no capture up: it lets one that waits go first.

    Not to be nested, nor inside of `no_capture`.
    """

    def _claim(self) -> bool:
        if _capturing or _waiting:
            return False
        _working.add(self)
        return True


class capturing_alone:  # noqa: N801 - used like a function
    """For a block that captures a graph: no session runs, and none is opened or closed. Not inside of the others."""

    def __init__(self) -> None:
        self._sessions: list[Any] = []
        self._held: list[Any] = []

    def _enter(self) -> None:
        _change.wait_for(self._claim)
        uninterrupted(self._acquire)

    def _claim(self) -> bool:
        if _capturing or _working:
            _waiting.add(self)
            return False
        _capturing.add(self)
        _waiting.discard(self)
        self._sessions = [turn for reference in _turns if (turn := reference()) is not None]
        return True

    def _leave(self, *_: object) -> None:
        uninterrupted(self._release)
        with _lock:
            _waiting.discard(self)
            _capturing.discard(self)
            _change.notify_all()

    def _acquire(self) -> None:
        for turn in self._sessions:
            turn.acquire()
            self._held.append(turn)

    def _release(self) -> None:
        while self._held:
            self._held.pop().release()

    __enter__ = _core.guarded(_enter, _leave)
    __exit__ = _core.guarded(_leave, _leave)
