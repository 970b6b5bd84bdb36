# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`profile`: PyTorch's profiler, with what xpuruntime decided in the same trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.argument_types import FLAG, check_types
from xpuruntime.errors import InputError
from xpuruntime.evidence.traces.trace_file import cannot_write, check_trace, trace_path
from xpuruntime.files.writing import staging
from xpuruntime.ops.decision_log import decisions
from xpuruntime.policies.files import dumps
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.explanation.call_recorder import CallRecorder
from xpuruntime.pytorch.explanation.explain import Watch, served_since
from xpuruntime.pytorch.explanation.kineto import Profiler, refuse_a_second
from xpuruntime.pytorch.profiling.trace_merge import merge_trace
from xpuruntime.runtime.profiler import Marks, RecordedBlock, record_marks, warn_beside

if TYPE_CHECKING:
    import os
    from pathlib import Path
    from types import TracebackType

    from xpuruntime.pytorch.explanation.call_recorder import RecordedCalls

__all__ = ["profile"]


class profile(RecordedBlock["_Watch"]):  # noqa: N801 - used like a function
    """Run PyTorch's profiler over a ``with`` block, and write one trace with the decisions of xpuruntime.

    Parameters
    ----------
    export_chrome_trace : path, optional
        Where to write the trace: a file that ends in ``.json``, or ``.json.gz`` for a compressed one. It opens in
        Perfetto and in ``chrome://tracing``. An older file is replaced as a whole.
    activities : iterable of torch.profiler.ProfilerActivity, optional
        Default: the CPU, and CUDA where there is a device.
    record_shapes, profile_memory, with_stack : bool
        As for `torch.profiler.profile`.

    Returns
    -------
    torch.profiler.profile
        From ``with``: ``prof.key_averages()`` and the rest work as ever. After a trace was written,
        ``prof.export_chrome_trace`` does not: PyTorch writes each trace once.

    Raises
    ------
    InputError
        When the block is entered: the trace cannot be written there, or a profiler of PyTorch's runs already. After the
        block: the trace could not be written, as on a full disk.

    Notes
    -----
    Calls that the active policy decides one by one have a range of the form ``xpuruntime matmul cublas.cublasLt
    layers.3.attn``. Under a process of its own named ``xpuruntime`` are the decisions, each drawn with the first call
    that it served and with an arrow to its range, CUDA graphs while they are captured, and what other parts of
    xpuruntime mark, such as tuning. The policy is in the metadata as ``xpuruntime_policy``.

    Examples
    --------
    >>> import torch, xpuruntime.pytorch as xrt_torch
    >>> with xrt_torch.profile() as prof:
    ...     product = torch.mm(torch.ones(2, 3), torch.ones(3, 2))
    >>> "aten::mm" in {event.key for event in prof.key_averages()}
    True
    """

    def __init__(
        self,
        export_chrome_trace: str | os.PathLike[str] | None = None,
        *,
        activities: Iterable[Any] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        self._target = None if export_chrome_trace is None else trace_path(export_chrome_trace)
        self._activities = None if activities is None else _activities(activities)
        self._options = {"record_shapes": record_shapes, "profile_memory": profile_memory, "with_stack": with_stack}
        check_types(dict.fromkeys(self._options, FLAG), self._options)

    def _check(self) -> None:
        if self._target is not None:
            check_trace(self._target)
        refuse_a_second("profile()")

    def _enter(self) -> Any:
        self._recorder = CallRecorder(_range)
        self._marks = Marks()
        active = active_policy()
        self._policy = None if active is None else active.policy
        self._before = decisions()
        profiler = Profiler(self._activities, **self._options)
        self._start(_Watch(self._recorder, profiler, self._marks))
        return profiler.torch

    def _exit(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        watch = self._running()
        with warn_beside(error):
            text = "null" if self._policy is None else dumps(self._policy.to_dict(), "json")
            try:
                watch.profiler.torch.add_metadata_json("xpuruntime_policy", text)
                watch.stop()
            finally:
                self._abandon()
            if self._target is not None:
                self._write(watch.profiler, self._target)

    __enter__ = _core.guarded(_enter, RecordedBlock._abandon, _check)
    __exit__ = _core.guarded(_exit, RecordedBlock._abandon)

    def _write(self, profiler: Profiler, target: Path) -> None:
        with staging(target) as folder:
            raw = folder / "trace.json"
            try:
                profiler.torch.export_chrome_trace(str(raw))
            except (OSError, RuntimeError) as error:
                raise cannot_write(target, error) from error
            merge_trace(raw, target, self._recorder.kinds, served_since(self._before), self._marks.taken)


class _Watch(Watch):
    def __init__(self, recorder: CallRecorder, profiler: Profiler, marks: Marks) -> None:
        super().__init__(recorder, profiler)
        self._marks = marks

    def _install(self) -> None:
        module_paths.require()
        self._undo.append(module_paths.release)

    def _record(self) -> None:
        before = record_marks(self._marks)
        self._undo.append(lambda: record_marks(before))
        super()._record()


def _activities(given: Any) -> list[Any]:
    known = torch.profiler.ProfilerActivity
    found = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else [given]
    wrong = next((one for one in found if not isinstance(one, known)), None)
    if wrong is not None:
        msg = f"activities has {wrong!r:.60}: give a list of torch.profiler.ProfilerActivity"
        raise TypeError(msg)
    if not found:
        raise InputError("activities is empty: name what to record, such as [torch.profiler.ProfilerActivity.CPU]")
    return found


def _range(seen: RecordedCalls) -> Any:
    return torch.profiler.record_function(seen.label)
