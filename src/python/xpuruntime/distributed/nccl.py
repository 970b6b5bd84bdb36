# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""NCCL through nccl4py: the library it opened, its status codes and types, and waits with a deadline."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from xpuruntime.errors import EngineError, EngineUnavailable
from xpuruntime.runtime.packages import install_command

#: The first with everything that a communicator needs; what came later is asked for where it is used.
OLDEST = (2, 18, 0)

SUCCESS, IN_PROGRESS = 0, 7

#: Our names of types to NCCL's numbers, and the first version that has each.
DTYPES: dict[str, tuple[int, tuple[int, int]]] = {
    "int8": (0, (2, 0)),
    "uint8": (1, (2, 0)),
    "int32": (2, (2, 0)),
    "uint32": (3, (2, 0)),
    "int64": (4, (2, 0)),
    "uint64": (5, (2, 0)),
    "float16": (6, (2, 0)),
    "float32": (7, (2, 0)),
    "float64": (8, (2, 0)),
    "bfloat16": (9, (2, 10)),
    "float8_e4m3fn": (10, (2, 24)),
    "float8_e5m2": (11, (2, 24)),
}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}

#: What to do, by NCCL's status.
FIXES = {
    1: "look for an earlier CUDA error in this process, and whether the GPU still answers",
    2: "see whether shared memory, file handles and the network suffice; NCCL_DEBUG=INFO shows where it failed",
    3: "NCCL_DEBUG=INFO shows where it failed",
    4: "make the same call with the same shapes and dtypes on every rank; NCCL_DEBUG=WARN names the argument",
    5: "make the same call with the same policy on every rank, and state no algorithm that this machine lacks",
    6: "a peer ended or cannot be reached: make a new communicator with the ranks that live",
}

#: Asked without a pause for so long, because launches take microseconds; then with pauses that become longer.
_EAGER = 200e-6
_LONGEST_PAUSE = 1e-3


class Nccl:
    """The bindings of nccl4py and the libnccl behind them. Calls run without the GIL.

    The bindings are used and not `nccl.core`, whose communicator asks the CUDA driver for the device of each array at
    each call, needs NCCL 2.23, moves no dtype that NCCL has no name for, and orders no streams.
    """

    def __init__(self, bindings: Any) -> None:
        self.bindings = bindings
        code = bindings.get_version()
        self.version = (code // 10000, code // 100 % 100, code % 100) if code >= 10000 else (2, code // 100 % 10, 0)
        self.path: str = bindings.get_library_path()

    def has(self, *version: int) -> bool:
        """Return whether the library is of this version or newer."""
        return self.version >= version

    def status(self, function: str, *arguments: Any) -> int:
        """Call a function of the bindings and return its status: of a call that is in progress, that of success."""
        try:
            getattr(self.bindings, function)(*arguments)
        except self.bindings.NCCLError as error:
            return int(error.status)
        return SUCCESS

    def state(self, communicator: Any) -> int:
        """Return the status of a communicator now."""
        try:
            return int(self.bindings.comm_get_async_error(communicator))
        except self.bindings.NCCLError as error:
            return int(error.status)

    def connect(self, unique_id: bytes, rank: int, world_size: int, config: Any) -> Any:
        """Have NCCL connect a rank on the current GPU. Returns the communicator, or a status where there is none."""
        try:
            return self.bindings.comm_init_rank_config(
                world_size, self.bindings.UniqueId.from_buffer(unique_id), rank, config
            )
        except self.bindings.NCCLError as error:
            return int(error.status)

    def explain(self, status: int) -> str:
        """Return NCCL's own words for a status, with what it said last, which may be of an earlier call."""
        words: str = self.bindings.get_error_string(status)
        last = self.bindings.get_last_error(self.bindings.Comm(0)).strip()
        return f"{words}; last message: {last}" if last else words

    def make_id(self) -> bytes:
        """Return a new unique id, 128 bytes. Raises `EngineError` when NCCL cannot listen for the ranks that get it."""
        try:
            return bytes(self.bindings.get_unique_id())
        except self.bindings.NCCLError as error:
            raise EngineError(
                f"NCCL cannot make the id that ranks meet by: {self.explain(error.status)}. Fix: let it use a network "
                "interface of this machine, NCCL_SOCKET_IFNAME names one",
                engine="nccl",
                status=int(error.status),
            ) from None


@lru_cache(maxsize=1)
def open_nccl() -> Nccl:
    """Return NCCL: the copy that the process has loaded already, else the first that nccl4py finds."""
    if not sys.platform.startswith("linux"):
        raise EngineUnavailable(
            f"NCCL is not available on {sys.platform}: NVIDIA ships it for Linux only. Fix: run this on Linux",
            engine="nccl",
        )
    try:
        from nccl.bindings import nccl as bindings

        library = Nccl(bindings)
    except Exception as error:  # of the import, the search and the loader, which share no base
        raise EngineUnavailable(
            f"NCCL cannot be used: {str(error).strip() or type(error).__name__}. Fix: {install_command('nccl')}",
            engine="nccl",
        ) from error
    if not library.has(*OLDEST):
        raise EngineUnavailable(
            f"{library.path} is NCCL {version_text(library.version)}, and {OLDEST[0]}.{OLDEST[1]} or newer is needed. "
            f"Fix: {install_command('nccl')}",
            engine="nccl",
        )
    return library


def version_text(version: tuple[int, ...]) -> str:
    """Return ``"2.28.9"`` for ``(2, 28, 9)``."""
    return ".".join(map(str, version))


def wait_for(done: Callable[[], bool], seconds: float) -> bool:
    """Return true as soon as `done` does, false when it has not by then. Other Python threads run on."""
    if done():
        return True
    start = time.monotonic()
    deadline = start + seconds
    pause = 20e-6
    while not done():
        now = time.monotonic()
        if now >= deadline:
            return done()
        if now - start < _EAGER:
            time.sleep(0)
            continue
        time.sleep(min(pause, deadline - now))
        pause = min(_LONGEST_PAUSE, pause * 1.5)
    return True


def run_within(work: Callable[[], Any], seconds: float, name: str) -> tuple[bool, Any]:
    """Run `work` on a thread of that name, wait only so long, and return whether it is done, and its result.

    What it raised is raised here. A thread that is left behind goes on, and does not hold up the end of the process.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if not outcome:
        return False, None
    result, error = outcome[0]
    if error is not None:
        raise error
    return True, result
