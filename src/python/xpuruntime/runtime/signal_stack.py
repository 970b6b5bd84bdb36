# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`kept_signal_stack`: keeps the alternate signal stack of a thread from libraries that replace it."""

from __future__ import annotations

import ctypes
import functools
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["kept_signal_stack"]

#: A thread without such a stack says so by this flag, and by it again it is left without one.
_SS_DISABLE = 2


class _Stack(ctypes.Structure):
    """`stack_t` of Linux: see sigaltstack(2)."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@functools.lru_cache(maxsize=1)
def _sigaltstack() -> Any:
    call = ctypes.CDLL(None, use_errno=True).sigaltstack
    call.argtypes = [ctypes.POINTER(_Stack), ctypes.POINTER(_Stack)]
    return call


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Give this thread, at the end, the alternate signal stack that it had.

    Each CPU plugin of OpenVINO (one an `openvino.Core`) gives the thread that loads it an alternate signal stack, and
    unmaps that stack where it is destroyed: in whichever thread, and in whichever order. The first thread is then left
    with a stack that is missing, and the next signal that Python handles in it (Ctrl-C, an alarm, the end of a worker
    of a `DataLoader`) ends the process without a word. A stack that no thread uses is unmapped without harm.

    On other systems than Linux there is nothing to keep.
    """
    if sys.platform != "linux":
        yield
        return
    sigaltstack, had = _sigaltstack(), _Stack()
    known = sigaltstack(None, ctypes.byref(had)) == 0
    try:
        yield
    finally:
        if known:
            had.flags &= _SS_DISABLE
            sigaltstack(ctypes.byref(had), None)
