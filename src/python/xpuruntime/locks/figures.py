# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Figures that a lock keeps for ``xrt verify``: ratios to a control, and the peak of a process of its own."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.lockfile.measured import LockedRatio
from xpuruntime.locks.session_worker import MODULE, session_worker
from xpuruntime.locks.verification.sections.controls import ControlError, open_control, open_reference
from xpuruntime.locks.verification.timing import SMALLEST, time_metric
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays
from xpuruntime.measuring.rounds import measure, timed
from xpuruntime.measuring.statistics import Margin, RatioVerdict
from xpuruntime.runtime.worker import WorkerFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xpuruntime.inference import InferenceSession
    from xpuruntime.measuring.rounds import RoundTimes
    from xpuruntime.measuring.statistics import RatioComparison
    from xpuruntime.policies import Policy, VerifyPolicy
    from xpuruntime.policies.verify_policy import Control

__all__ = ["START_MARGIN", "measure_ratios", "peak_of_process", "time_start"]

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
    found: dict[str, LockedRatio] = {}
    if verify.speed is not None:
        checks = verify.speed
        ends = time.monotonic() + checks.budget
        with ExitStack() as stack:
            try:
                control, _ = open_control(checks.control, session, model, feeds, stack, trust=trust)
            except ControlError:
                return found
            run = session.run
            for metric in checks.metric:
                left = ends - time.monotonic()
                timing = time_metric(metric, timed(lambda: run(feeds)), control, checks, left, keep=True)
                if timing.comparison is not None:
                    margin = Margin(checks.max_slowdown, SMALLEST).of(timing.figures["session_us"] / 1e6)
                    found[metric] = _ratio(timing.comparison, checks.control, margin=margin)
    if verify.start is not None:
        rounds = (_START_ROUNDS, _START_ROUNDS)
        started = time_start(session, model, reopen, trust=trust, rounds=rounds)
        if started is not None:
            found["start"] = _ratio(started.comparisons["session"], "reference")
    return found


def _ratio(one: RatioComparison, control: Control, **more: float) -> LockedRatio:
    return LockedRatio(
        control=control,
        ratio=one.ratio,
        low=one.low,
        high=one.high,
        confidence=one.confidence,
        rounds=one.rounds,
        **more,
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
        settled=lambda found: all(one.within_limit or one.verdict is RatioVerdict.SLOWER for one in found.values()),
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
        place = os.path.abspath(model)  # noqa: PTH100  a link stays the name that was given
        with session_worker(sys.executable) as worker:
            try:
                worker.call(f"{MODULE}:open_session", model=place, inputs=str(inputs), arguments=arguments)
                worker.call(f"{MODULE}:time_session", calls=1, samples=_RUNS)
                found: int | None = worker.call(f"{MODULE}:memory_peak")
            except WorkerFailure:
                return None
    return found
