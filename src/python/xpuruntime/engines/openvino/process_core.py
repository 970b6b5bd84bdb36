# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`process_core`: the `openvino.Core` that all sessions of a process share, and that is never destroyed.

OpenVINO frees the executors of closed models where a CPU plugin is destroyed, of which there is one for each `Core`. A
thread that has run one of these models and ends at that moment then uses an executor that is freed (seen in OpenVINO
2026.4.1: heap corruption, SIGSEGV, `std::system_error` in a destructor of the thread). With one `Core` that is kept,
executors are used again instead.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from xpuruntime.engines.openvino.sigaltstack_guard import kept_signal_stack
from xpuruntime.runtime.process_forks import reset_in_child, rest_for_fork

__all__ = ["process_core"]


class _Kept:
    """The shared `Core`, and what a fork does about it."""

    def __init__(self) -> None:
        self.core: Any = None
        #: Cores of the parents of a process that was forked: their locks may be held, and their threads are not here.
        self.parents: list[Any] = []
        self.lock = threading.Lock()
        rest_for_fork(self)
        reset_in_child(self)

    def get(self) -> Any:
        with self.lock:
            if self.core is None:
                import openvino as ov

                core = ov.Core()
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(core))  # not even at the end of the process
                self.core = core
            return self.core

    def before_fork(self) -> None:
        """Free executors that wait to be used again: a child has none of their threads, and would wait for them."""
        if self.core is None:
            return
        import openvino as ov

        with kept_signal_stack():
            ov.Core().get_property("CPU", "FULL_DEVICE_NAME")  # loads a CPU plugin, which frees them when it is dropped

    def in_child(self) -> None:
        """Begin with another `Core`."""
        self.parents.append(self.core)
        self.core = None


_kept = _Kept()


def process_core() -> Any:
    """Return the shared `openvino.Core`. It is to be given properties with each call, and none for good."""
    return _kept.get()
