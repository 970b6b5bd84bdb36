# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`profile`: record what the host and the devices do in a ``with`` block, whichever library makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.engines.device_recorder import DeviceRecorder
from xpuruntime.errors import InputError
from xpuruntime.evidence.profile import Profile
from xpuruntime.evidence.traces.trace_file import check_trace
from xpuruntime.inference.instrumented_runs import InstrumentedRuns
from xpuruntime.runtime.process_forks import fork_lock
from xpuruntime.runtime.profiler import LIMIT, Marks, RecordedBlock, profiled, record_marks, warn_beside

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from types import TracebackType

    from rich.console import RenderableType

    from xpuruntime.runtime.profiler import DeviceRecording

__all__ = ["profile"]

_lock = fork_lock()
#: One at a time in a process.
_going_on: _Run | None = None


class _Run:
    """What watches a block; `abandon` ends it at any point."""

    def __init__(self, recorder: DeviceRecorder) -> None:
        self.recorder = recorder
        self.marks = Marks()
        self._undo: list[Callable[[], Any]] = []

    def start(self) -> None:
        global _going_on
        with _lock:
            refuse_a_second()
            _going_on = self
        self.recorder.start()
        _core.call_aside(self._watch)

    def stop(self) -> DeviceRecording:
        try:
            return self.recorder.stop()
        finally:
            self.abandon()

    def abandon(self) -> None:
        global _going_on
        if _going_on is self:
            _core.call_aside(self._unwatch)
            self.recorder.abandon()
            _going_on = None

    def _watch(self) -> None:
        before = record_marks(self.marks)
        self._undo.append(lambda: record_marks(before))
        runs = InstrumentedRuns()
        self._undo.append(runs.stop)
        runs.start()

    def _unwatch(self) -> None:
        while self._undo:
            self._undo.pop()()


def refuse_a_second() -> None:
    """Refuse to begin a profile while another one goes on."""
    if _going_on is not None:
        msg = "a profile goes on already, and there is one at a time in a process: leave its with block first"
        raise InputError(msg)


class profile(RecordedBlock[_Run]):  # noqa: N801 - used like a function
    """Record what the host and the CUDA devices do in a ``with`` block.

    Ranges of the host are runs of sessions and bindings, kernels that `xpuruntime.ops` and xpuruntime operators inside
    ONNX Runtime dispatch, and what the program names by `range`. The work of devices is seen whoever starts it: ONNX
    Runtime, TensorRT, PyTorch, CuPy or this library. NVIDIA's tools (Nsight) show the ranges, too.

    Parameters
    ----------
    trace : path, optional
        Where to write a trace for Perfetto at the end: ``.json``, or ``.json.gz`` for a compressed one.
    devices : bool
        Whether to record the work of CUDA devices. Without a CUDA device there are ranges alone, and a note says why.
    limit : int
        Ranges, pieces of work, and calls that are kept, of each; what comes after is counted as lost.

    Attributes
    ----------
    result : Profile
        After the block: `ranges`, `work`, `calls`, `shares()`, `save_trace(path)`, `to_dict()`; prints as tables.

    Raises
    ------
    InputError
        When the block is entered: another profile goes on, or the trace cannot be written there. After it: the trace
        could not be written. Reading `result` before the end.

    Notes
    -----
    CUPTI, by which device work is seen, serves one user in a process. While a PyTorch that can use CUDA is loaded, its
    profiler is asked instead, and the trace has PyTorch's operators, too. Where both are taken, kernels that this
    library dispatches are timed by CUDA events, and a note says so. Import PyTorch before a profile, not inside it.

    Examples
    --------
    >>> import numpy as np, xpuruntime as xrt
    >>> with xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session:
    ...     with xrt.profile() as prof:
    ...         with prof.range("warm-up"):
    ...             _ = session.run({"image": np.zeros((1, 1, 8, 8), np.float32)})
    >>> [(one.name.split()[0], one.category) for one in prof.result.ranges]
    [('warm-up', 'range'), ('digits.onnx', 'run')]
    """

    def __init__(
        self, trace: str | os.PathLike[str] | None = None, *, devices: bool = True, limit: int = LIMIT
    ) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            msg = (
                f"limit must be a whole number of at least 1, got {limit!r}: it is how many records of a kind are kept"
            )
            raise InputError(msg)
        self._target = trace
        self._devices, self._limit = devices, limit
        self._result: Profile | None = None

    @property
    def result(self) -> Profile:
        """What was recorded."""
        if self._result is None:
            msg = "the profile has no result yet: leave its with block first"
            raise InputError(msg)
        return self._result

    def range(self, name: str) -> profiled:
        """Name a ``with`` block; it nests, and threads have ranges of their own."""
        return profiled(name)

    def _check(self) -> None:
        if self._target is not None:
            check_trace(self._target)
        refuse_a_second()

    def _enter(self) -> profile:
        self._start(_Run(DeviceRecorder(devices=self._devices, limit=self._limit)))
        return self

    def _exit(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        run = self._running()
        with warn_beside(error):
            try:
                recording = run.stop()
            finally:
                self._abandon()
            self._result = Profile(recording, tuple(run.marks.taken))
            if self._target is not None:
                self._result.save_trace(self._target)

    __enter__ = _core.guarded(_enter, RecordedBlock._abandon, _check)
    __exit__ = _core.guarded(_exit, RecordedBlock._abandon)

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import rich_fragment

        return rich_fragment(self.__rich__())

    def __rich__(self) -> RenderableType:
        return self.result.__rich__() if self._result is not None else repr(self)

    def __str__(self) -> str:
        return str(self.result) if self._result is not None else repr(self)
