# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Figures of a lock: times, memory and batches, measured for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.shapes import batch_axes
from xpuruntime.errors import InputError, XpuRuntimeError
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.inference.calls import host_runner, time_batches
from xpuruntime.inference.locked import probe_at
from xpuruntime.lockfile.measured import LockedRatio, SessionMemory
from xpuruntime.locks.environments import MODULE, session_worker
from xpuruntime.locks.verification.speed import SMALLEST, ControlError, open_control, open_reference, time_metric
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays
from xpuruntime.measuring.rounds import measure, timed
from xpuruntime.measuring.statistics import Margin, RatioVerdict
from xpuruntime.runtime.worker import WorkerFailure

if TYPE_CHECKING:
    from xpuruntime.inference import InferenceSession
    from xpuruntime.lockfile.measured import BatchTime
    from xpuruntime.measuring.rounds import RoundTimes
    from xpuruntime.measuring.statistics import RatioComparison
    from xpuruntime.policies import Policy, VerifyPolicy
    from xpuruntime.policies.verify_policy import Control

#: Rounds of the ratio of opening a session that a lock keeps.
_START_ROUNDS = 11
#: Slowdown of a start that counts.
START_MARGIN = Margin(0.25, 5e-3)
#: Runs in which engines fill their arenas.
_RUNS = 20


def measure_ratios(
    session: InferenceSession,
    model: Any,
    feeds: dict[str, Any],
    verify: VerifyPolicy,
    reopen: Callable[[], InferenceSession],
    *,
    trust: bool,
) -> dict[str, LockedRatio]:
    """Time a session, and its opening, beside a control: what the section ``verify`` of a policy asks for.

    Where there is no control, or a metric takes longer than the budget, its ratio is left out.
    """
    ratios: dict[str, LockedRatio] = {}
    if verify.speed is not None:
        checks = verify.speed
        ends = time.monotonic() + checks.budget
        with ExitStack() as stack:
            try:
                control, _ = open_control(checks.control, session, model, feeds, stack, trust=trust)
            except ControlError:
                return ratios
            run = session.run
            for metric in checks.metric:
                left = ends - time.monotonic()
                timing = time_metric(metric, timed(lambda: run(feeds)), control, checks, left, keep=True)
                if timing.comparison is not None:
                    margin = Margin(checks.max_slowdown, SMALLEST).of(timing.figures["session_us"] / 1e6)
                    ratios[metric] = _ratio(timing.comparison, checks.control, margin=margin)
    if verify.start is not None:
        rounds = (_START_ROUNDS, _START_ROUNDS)
        started = time_start(session, model, reopen, trust=trust, rounds=rounds)
        if started is not None:
            ratios["start"] = _ratio(started.comparisons["session"], "reference")
    return ratios


def _ratio(comparison: RatioComparison, control: Control, **fields: float) -> LockedRatio:
    return LockedRatio(
        control=control,
        ratio=comparison.ratio,
        low=comparison.low,
        high=comparison.high,
        confidence=comparison.confidence,
        rounds=comparison.rounds,
        **fields,
    )


def time_start(
    session: InferenceSession,
    model: Any,
    reopen: Callable[[], InferenceSession],
    *,
    trust: bool,
    rounds: tuple[int, int],
    expected: float = 1.0,
    budget: float = 60.0,
) -> RoundTimes | None:
    """Time the opening of a session beside that of its reference; ``None`` where the model does not run as one."""
    try:
        open_reference(session, model, trust=trust).close()
    except XpuRuntimeError:
        return None
    return measure(
        {
            "control": timed(lambda: open_reference(session, model, trust=trust).close()),
            "session": timed(lambda: reopen().close()),
        },
        control="control",
        margin=START_MARGIN,
        rounds=rounds,
        budget=budget,
        block=0.0,
        warm=0.0,
        expected=expected,
        settled=lambda comparisons: all(
            comparison.within_limit or comparison.verdict is RatioVerdict.SLOWER for comparison in comparisons.values()
        ),
    )


def peak_of_process(model: Any, policy: Policy, feeds: Mapping[str, Any], *, trust: bool) -> int | None:
    """Return what a process of this interpreter holds at most as it opens a model and runs it.

    ``None`` where the model is a module in memory, the process fails, or the operating system does not say.
    """
    if not isinstance(model, (str, os.PathLike)):
        return None
    arguments = {"policy": policy.replace(verify=None).to_dict(), "trust": trust}
    with ScratchFolder("lock") as folder:
        inputs = Path(folder, "inputs")
        write_arrays(inputs, feeds)
        path = os.path.abspath(model)  # noqa: PTH100  a link stays the name that was given
        with session_worker(sys.executable) as worker:
            try:
                worker.call(f"{MODULE}:open_session", model=path, inputs=str(inputs), arguments=arguments)
                worker.call(f"{MODULE}:time_session", calls=1, samples=_RUNS)
                peak: int | None = worker.call(f"{MODULE}:memory_peak")
            except WorkerFailure:
                return None
    return peak


_MOST = 1 << 20


def check_batches(batches: Sequence[int]) -> tuple[int, ...]:
    """Return batch sizes in ascending order. Raises `InputError` for what is none."""
    for rows in batches:
        if type(rows) is not int or not 1 <= rows <= _MOST:
            raise InputError(f"batches: {rows!r} is not a batch size. Fix: give whole numbers from 1 to {_MOST:,}")
    return tuple(sorted(set(batches)))


def times_of_batches(
    session: InferenceSession, shapes: Mapping[str, Sequence[int]], batches: Sequence[int]
) -> tuple[BatchTime, ...]:
    """Return times of runs by batch size, with all other sizes as they are in `shapes`."""
    return time_batches(host_runner(session), lambda rows: feeds_of_rows(session, shapes, rows), batches)


def feeds_of_rows(session: InferenceSession, shapes: Mapping[str, Sequence[int]], rows: int) -> dict[str, Any]:
    """Return probe inputs of a batch of so many rows."""
    axes = batch_axes(session.inputs)[1]
    if not axes:
        raise InputError(
            "batches: no input of the model begins with an open dimension. Fix: leave batches out, or export the model "
            "with an open batch dimension"
        )
    sizes = {name: list(shape) for name, shape in shapes.items()}
    for name, axis in axes.items():
        if name in sizes:
            sizes[name][axis] = rows
    return probe_at(session.model, sizes)


def memory_of_session(
    session: InferenceSession,
    model: Any,
    policy: Policy,
    shapes: Mapping[str, Sequence[int]],
    rows: int,
    *,
    trust: bool,
) -> SessionMemory | None:
    """Return what one more session of the model takes of its device, once it has run a batch of so many rows.

    A process of this interpreter opens two, and the second counts: libraries and the context of a device are there by
    then. ``None`` where the model is a module in memory, the process fails, or the system does not say.
    """
    if not isinstance(model, (str, os.PathLike)):
        return None
    arguments = {"policy": policy.replace(verify=None).to_dict(), "trust": trust}
    with ScratchFolder("lock") as folder:
        inputs = Path(folder, "inputs")
        write_arrays(inputs, feeds_of_rows(session, shapes, rows))
        path = os.path.abspath(model)  # noqa: PTH100  a link stays the name that was given
        with session_worker(sys.executable) as worker:
            try:
                memory = worker.call(f"{MODULE}:session_memory", model=path, inputs=str(inputs), arguments=arguments)
            except WorkerFailure:
                return None
    return None if memory is None else SessionMemory(device=memory["device"], bytes=memory["bytes"], rows=rows)
