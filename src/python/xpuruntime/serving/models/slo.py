# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Batch size and delay chosen for a latency, of a measured curve of time by batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.errors import LockError
from xpuruntime.inference.batch_times import time_batches
from xpuruntime.serving.batching.settings import batch_sizes
from xpuruntime.serving.models.opening import batch_feeds, warmup_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.engines.host_runner import HostRunner
    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.lockfile.measured import BatchTime
    from xpuruntime.lockfile.records import Lock
    from xpuruntime.serving.batching.layout import Layout
    from xpuruntime.serving.batching.settings import BatchSettings
    from xpuruntime.serving.models.model_settings import ModelSettings

__all__ = ["Limits", "choose_limits", "curve_of", "locked_curve", "measure_curve"]


class Limits(NamedTuple):
    """What was chosen, and of what.

    Attributes
    ----------
    p99 : float
        Seconds that were asked for.
    met : bool
        Whether the smallest batch is quick enough for it.
    max_batch_size, max_queue_delay_us : int
    curve : tuple of BatchTime
    source : str
        Where the curve is from: a lock, with who made it and when, or the loading of the model.
    """

    p99: float
    met: bool
    max_batch_size: int
    max_queue_delay_us: int
    curve: tuple[BatchTime, ...]
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "p99_us": round(self.p99 * 1e6),
            "met": self.met,
            "max_batch_size": self.max_batch_size,
            "max_queue_delay_us": self.max_queue_delay_us,
            "rule": "delay + 2 x the longest execution of the batch size <= p99; delay <= the median execution",
            "source": self.source,
            "curve": [
                {
                    "batch_size": one.rows,
                    "median_us": round(one.median_us),
                    "longest_us": round(one.longest_us),
                    "runs": one.runs,
                }
                for one in self.curve
            ],
        }


def measure_curve(
    session: InferenceSession, layout: Layout, batching: BatchSettings, runner: HostRunner
) -> tuple[BatchTime, ...]:
    """Return times of executions by batch size, in the largest sizes of padded inputs."""
    *_, sizes = warmup_sizes(layout)
    most = max(batching.max_batch_size, 1)
    rows = (most,) if batching.shapes == "fixed" else batch_sizes(most)
    return time_batches(runner, lambda one: batch_feeds(session, layout, one, sizes), rows)


def locked_curve(lock: Lock | None, layout: Layout, batching: BatchSettings) -> tuple[BatchTime, ...] | str:
    """Return the times that a lock has of executions as this model is served, or why it has none."""
    if lock is None:
        return "the model has no lock"
    times = lock.measured.batches
    if not times:
        return "the lock has no times of batches"
    most = max(batching.max_batch_size, 1)
    shapes = lock.identity.shapes[0].inputs
    for name, info in layout.inputs.items():
        if info.padding is not None and info.padding.sizes:
            largest, size = max(info.padding.sizes), shapes[name][info.padding.axis] if name in shapes else 0
            if size < largest:
                return f"the lock has times of {name!r} with {size} elements, and it is padded to {largest}"
    if batching.shapes == "fixed":
        found = tuple(one for one in times if one.rows == most)
        return found or f"the lock has no times of {most} rows, which every execution has"
    return tuple(one for one in times if one.rows <= most) or f"the lock has no times of {most} rows or fewer"


def curve_of(
    session: InferenceSession, layout: Layout, settings: ModelSettings, runner: HostRunner, path: str
) -> tuple[tuple[BatchTime, ...], str]:
    """Return times by batch size, and where they are from: the lock, or this process.

    Raises
    ------
    LockError
        The settings ask for those of the lock, which has none of this model as it is served.
    """
    assert settings.slo is not None
    lock = session.lock
    if settings.slo.curve != "load":
        found = locked_curve(lock, layout, settings.batching)
        if not isinstance(found, str):
            assert lock is not None
            made = lock.provenance
            return found, f"lock {lock.digest}, made {made.created or 'at an unknown time'} by {made.command or '?'}"
        if settings.slo.curve == "lock":
            most = max(settings.batching.max_batch_size, 1)
            sizes = (most,) if settings.batching.shapes == "fixed" else batch_sizes(most)
            raise LockError(
                f"slo.curve: 'lock', but {found}. Fix: xrt lock {path or 'MODEL'} -o {settings.lock or 'LOCK'} "
                f"--batches {','.join(map(str, sizes))}, or state curve: load"
            )
    return measure_curve(session, layout, settings.batching, runner), "measured when the model was loaded"


def choose_limits(curve: Sequence[BatchTime], p99: float, source: str = "") -> Limits:
    """Choose the largest batch whose requests stay within a latency, and the delay that is left.

    A request may arrive just after an execution has begun, so it waits for that one, for the delay, and for its own:
    the delay and twice the longest execution must fit. Waiting longer than an execution gains nothing, since what
    arrives during one is put together anyway.
    """
    p99_us = 1e6 * p99
    fitting = [one for one in curve if 2 * one.longest_us <= p99_us]
    if not fitting:
        least = min(curve, key=lambda one: one.rows)
        return Limits(p99, False, least.rows, 0, tuple(curve), source)
    best = max(fitting, key=lambda one: one.rows)
    delay_us = max(0.0, min(best.median_us, p99_us - 2 * best.longest_us))
    return Limits(p99, True, best.rows, int(delay_us) if best.rows > 1 else 0, tuple(curve), source)
