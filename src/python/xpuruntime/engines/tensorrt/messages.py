# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Messages and slow calls of TensorRT: its log, its errors in xpuruntime's tree, and Ctrl-C."""

from __future__ import annotations

import collections
import itertools
import re
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from xpuruntime.errors import CudaError, EngineFailed, OutOfMemoryError, XpuRuntimeError
from xpuruntime.runtime.interruptible_waits import BackgroundCall

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = [
    "Cancel",
    "Listener",
    "cleaned",
    "failure",
    "interruptible",
    "logger",
]

_WARNING = 2
_KEPT = 512
_PLACE = re.compile(r" In \w+ at \S+?:\d+(?=[):\s]|$)|\[[\w.]+::\w+::\d+\] |\[\w+\.(?:cpp|h|hpp):\d+: \w+\] ?")
_HEAD = re.compile(r"^I\w+::\w+: ")
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|MEM_ALLOC|Requested amount of GPU memory|alloc\w* failed", re.I)
_SCRATCH = re.compile(r"workspace (?:limit|memory)", re.I)
_CUDA = re.compile(r"cudaError|Cuda Runtime|Cuda Driver")
_HINTS = (
    (_SCRATCH, "State a larger execution.memory.limit, or none."),
    (re.compile(r"libnvinfer_lean"), "The option version_compatible needs the lean runtime, which is not installed."),
    (re.compile(r"graph_jit\.cpp"), "This build compiles kernels on a GPU (refit, strip_plan), and there is none."),
    (re.compile(r"\(SM75\)"), "Leave 7.5 out of compute_capability, or state precision fp16."),
    (re.compile(r"[Tt]iming cache (?:miss|entry)"), "Run once with pin_tactics: record."),
)  # fmt: skip

_numbers = itertools.count()
_lines: collections.deque[tuple[int, int, int, str]] = collections.deque(maxlen=_KEPT)
_loggers: dict[str, Any] = {}
_making = threading.Lock()


def logger(trt: Any) -> Any:
    """Return the process's logger of one vendor module.

    The library keeps a pointer to the first logger that it is given, so that one has to live as long as the process.
    """
    with _making:
        found = _loggers.get(trt.__name__)
        if found is None:
            found = _loggers[trt.__name__] = _make_logger(trt)
        return found


def _make_logger(trt: Any) -> Any:
    base: Any = trt.ILogger

    class Log(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            level = int(severity)
            if level <= _WARNING:
                _lines.append((next(_numbers), threading.get_ident(), level, message))

    return Log()


class Listener:
    """Hears what is logged while the block runs."""

    def __enter__(self) -> Listener:
        self._since = next(_numbers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def errors(self) -> list[str]:
        """Return the errors so far, once each: those of this thread, or where it has none, those of all."""
        heard = [line for line in list(_lines) if line[0] > self._since and line[2] < _WARNING]
        own = [line for line in heard if line[1] == threading.get_ident()]
        return list(dict.fromkeys(cleaned(line[3]) for line in own or heard))


def cleaned(text: str) -> str:
    """Return a line of the log without places in the vendor's sources and without what repeats the call."""
    return _HEAD.sub("", _PLACE.sub("", text)).strip().rstrip(".").replace(" )", ")")


def failure(doing: str, heard: list[str], *, engine: str, device: str, pool: str | None = None) -> XpuRuntimeError:
    """Return the error of a call that answered with nothing."""
    text = "; ".join(heard) or "it gave no reason"
    hints = [hint for pattern, hint in _HINTS if pattern.search(text)]
    message = " ".join([f"{doing} failed: {text}.", *([f"The pool said: {pool}."] if pool else []), *hints])
    if pool or (_OUT_OF_MEMORY.search(text) and not _SCRATCH.search(text)):
        fix = "Use smaller shapes, a larger execution.memory.limit, or free other sessions."
        return OutOfMemoryError(f"{message} {fix}", engine=engine, device=device)
    kind = CudaError if _CUDA.search(text) else EngineFailed
    return kind(message, engine=engine, device=device)


_Result = TypeVar("_Result")


class Cancel:
    """Whether work in the background is still wanted."""

    def __init__(self) -> None:
        self._asked = False

    def set(self) -> None:
        """Say that it is not."""
        self._asked = True

    @property
    def asked(self) -> bool:
        """Whether somebody said so."""
        return self._asked

    def monitor(self, trt: Any) -> Any:
        """Return a progress monitor that ends a build when it is cancelled."""
        base: Any = trt.IProgressMonitor
        cancel = self

        class Monitor(base):  # type: ignore[misc]
            def __init__(self) -> None:
                base.__init__(self)

            def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
                del phase_name, parent_phase, num_steps

            def phase_finish(self, phase_name: str) -> None:
                del phase_name

            def step_complete(self, phase_name: str, step: int) -> bool:
                del phase_name, step
                return not cancel.asked

        return Monitor()


def interruptible(work: Callable[[], _Result], cancel: Cancel) -> _Result:
    """Return what `work` returns, or raise what it raises.

    An exception that arrives while the caller waits, such as a KeyboardInterrupt, sets `cancel`, waits for the work to
    end, and goes on. A second one does not wait.
    """
    call = BackgroundCall(work, "xpuruntime-tensorrt")
    try:
        return call.result()
    except BaseException:
        cancel.set()
        call.done.wait()
        raise
