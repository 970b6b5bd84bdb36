# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Interruptions at random points of a call: by a signal, by another thread, and at a bytecode of this package."""

from __future__ import annotations

import ctypes
import dis
import functools
import gc
import os
import random
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import xpuruntime

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

__all__ = ["WAYS", "Stop", "sweep"]

_PACKAGE = os.path.dirname(xpuruntime.__file__)  # noqa: PTH120 - as frames have it
#: How many times as many interruptions as in CI are tried.
_MORE = float(os.environ.get("XPURUNTIME_INTERRUPTIONS", "1"))
WAYS = ("signal", "thread", "bytecode")


class Stop(KeyboardInterrupt):
    """What is raised."""


def _raise(*_: object) -> None:
    raise Stop


def sweep(way: str, call: Callable[[], Any], check: Callable[[], Any], times: int = 170) -> int:
    """Interrupt a call at random points, and check after each. Returns how often it was interrupted."""
    call()
    seconds = _timed(call)
    chance = random.Random(way)
    bytecodes = 0
    if way == "bytecode":
        _run_to(call, sys.maxsize)  # Python 3.13 has opcode events from the second call of a function on
        bytecodes = _run_to(call, sys.maxsize)
    hits = 0
    # An interruption inside of a callback of the garbage collector, such as those of hypothesis, is lost.
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    try:
        for _ in range(int(times * _MORE)):
            try:
                if way == "bytecode":
                    _run_to(call, chance.randrange(1, bytecodes + 1))
                else:
                    # A machine that is busy may have held up the call that was timed, and not those that are
                    # interrupted, which would be done before.
                    after = chance.uniform(0, 1.1) * seconds
                    seconds = min(seconds, _timed(functools.partial(_run_for, call, way, after)))
            except Stop:
                hits += 1
            check()
    finally:
        gc.callbacks[:] = callbacks
    return hits


def _timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _run_for(call: Callable[[], Any], way: str, seconds: float) -> None:
    """Call, interrupted after a time."""
    me, done = threading.get_ident(), threading.Lock()
    done.acquire()
    ended: list[bool] = []

    def interrupt() -> None:
        try:
            if done.acquire(timeout=seconds):
                return
            if way == "signal":
                os.kill(os.getpid(), signal.SIGUSR1)
            else:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(me), ctypes.py_object(Stop))
        finally:
            ended.append(True)

    before = signal.signal(signal.SIGUSR1, _raise)
    threading.Thread(target=interrupt).start()
    try:
        call()
    finally:
        late = _calm(done, ended)
        signal.signal(signal.SIGUSR1, before)
        if late:
            raise Stop


def _calm(done: threading.Lock, ended: list[bool]) -> bool:
    """End the thread that interrupts, although its interruption may still come. Returns whether it did.

    Only steps that Python interrupts before or after: an interrupted `threading.Event.set` leaves its lock held, and
    who sets the event again waits for ever.
    """
    late = False
    while True:
        try:
            if done.locked() and not ended:
                done.release()
            while not ended:
                time.sleep(0)
            time.sleep(0)
            return late
        except Stop:
            late = True


@functools.cache
def _uninterruptible(code: CodeType) -> frozenset[int]:
    """Return where Python looks for no signal: at no-ops, and between a ``with`` block and its call of `__exit__`."""
    steps = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL")]
    found = {one.offset for one in steps if one.opname == "NOP"}
    for place in range(len(steps) - 3):
        four = steps[place : place + 4]
        if all(one.opname == "LOAD_CONST" and one.argval is None for one in four[:3]) and "CALL" in four[3].opname:
            found.update(range(four[0].offset, four[3].offset + 1))
    return frozenset(found)


def _run_to(call: Callable[[], Any], left: int) -> int:
    """Call, interrupted at a bytecode of this package, by its number. Returns how many there were."""
    seen = 0

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if event == "opcode" and frame.f_lasti not in _uninterruptible(frame.f_code):
            seen += 1
            if seen == left:
                raise Stop
        return local

    def trace(frame: FrameType, _event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        frame.f_trace_opcodes = True
        return local

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for opcodes where a frame asked for them before
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return seen
