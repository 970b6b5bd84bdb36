# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Coverage: the share of an instrumented run that the times of its units explain."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["coverage_note", "instrumented", "profiler_overhead_note"]

#: The units explain a run when their sum is within this share of it.
_NEAR = 0.10


def instrumented(
    run_us: Sequence[float],
    units_us: Sequence[float],
    units: int,
    *,
    outside_us: Mapping[str, float] | None = None,
    cut_us: float = 0.0,
) -> dict[str, Any]:
    """Return the wall time of the instrumented runs, and which share of it the units explain."""
    if not run_us:
        return {}
    known = bool(units_us) and units > 0 and min(run_us) > 0
    single = len(units_us) == len(run_us)
    middle = statistics.fmean if known and not single else statistics.median
    found: dict[str, Any] = {
        "run_us": float(middle(run_us)),
        "runs": len(run_us),
        "statistic": "mean" if known and not single else "median",
    }
    if known:
        found |= {"units_us": float(middle(units_us)), "units": units}
        shares = [inside / whole for inside, whole in zip(units_us, run_us, strict=False)]
        found["coverage"] = float(statistics.median(shares)) if single else found["units_us"] / found["run_us"]
        rests = [whole - inside for inside, whole in zip(units_us, run_us, strict=False)]
        rest = statistics.median(rests) if single else found["run_us"] - found["units_us"]
        found["outside_us"] = float(max(0.0, rest))
        if outside_us:
            found["outside"] = dict(outside_us)
        if cut_us:
            found["cut_us"] = float(cut_us)
    return found


def coverage_note(found: Mapping[str, Any]) -> str | None:
    """Return a sentence where the units explain less than 90 % of the instrumented runs, or more than 110 %."""
    share = found.get("coverage")
    if share is None or abs(share - 1) <= _NEAR:
        return None
    units, run, count = found["units_us"], found["run_us"], found["units"]
    head = f"the units explain {share:.0%} of an instrumented run, {units:,.1f} of {run:,.1f} us ({found['statistic']})"
    if share > 1:
        return f"{head}: units that run side by side count each for itself"
    measured = found.get("outside", {})
    parts = [f"{measured['call']:,.1f} us is the call itself"] if "call" in measured else []
    if "between" in measured:
        parts.append(
            f"{measured['between']:,.1f} us passes between units, {measured['between'] / count:,.1f} for each of "
            f"{count}, in dispatch and the profiler's own work"
        )
    if "cut_us" in found:
        parts.append(f"up to {found['cut_us']:,.1f} us is cut off, because the engine counts whole microseconds")
    if parts:
        return f"{head}: outside of them, {'; '.join(parts)}; the rest is whatever else engine and machine did"
    between = max(0.0, run - units) / count
    return (
        f"{head}: the rest passes between units, {between:,.1f} us for each of {count}, in dispatch, the profiler's "
        "own work, the call itself, and whatever else the machine did"
    )


def profiler_overhead_note(found: Mapping[str, Any], unwatched_us: float) -> str | None:
    """Return a sentence where the units together took longer than whole uninstrumented runs."""
    units = found.get("units_us", 0.0)
    if units <= unwatched_us * (1 + _NEAR):
        return None
    return (
        f"the units together took {units:,.1f} us of an instrumented run, and nine of ten whole runs of the session "
        f"at most {unwatched_us:,.1f}: times of units hold work of the profiler, or the machine was busy. Read them as "
        "shares"
    )
