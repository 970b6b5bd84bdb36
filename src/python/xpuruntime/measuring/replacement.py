# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernel replacement: whether a kernel takes the place of the one that would run without tuning.

The protocol of every kernel tuner of this package: interleaved rounds with the control measured twice, the interval of
the median log-ratio, and one margin. What is not decided to be faster by more than the margin replaces nothing. Where a
call costs something on its way to a kernel that is not measured with it, samplers add it: it is to be gained as well.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.measuring.rounds import measure
from xpuruntime.measuring.statistics import Margin, RatioVerdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.measuring.rounds import Sampler
    from xpuruntime.measuring.statistics import RatioComparison
    from xpuruntime.measuring.tuning_watch import TuningStep
    from xpuruntime.policies import TuningPolicy

__all__ = ["PROTOCOL", "ROUNDS", "KernelTiming", "Replacement", "choose", "replacing"]

#: Another word whenever kernels are measured or chosen in another way, so that records of before do not hold.
PROTOCOL = "3"
#: Rounds before the first look at the times, and the most; the core's tuner has the same.
ROUNDS = (7, 61)


class KernelTiming(NamedTuple):
    """One kernel that was measured."""

    kernel: str
    config: str
    microseconds: float
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0
    verdict: str = "control"


class Replacement(NamedTuple):
    """What was measured, the chosen kernel first."""

    candidates: tuple[KernelTiming, ...]
    rounds: int
    seconds: float
    undecided: bool
    cancelled: bool = False

    @property
    def chosen(self) -> KernelTiming:
        """The kernel that is to run."""
        return self.candidates[0]


def choose(
    variants: Mapping[str, Sampler],
    *,
    control: str,
    rule: TuningPolicy,
    block: float = 0.002,
    step: TuningStep | None = None,
) -> Replacement:
    """Measure kernels in interleaved rounds and decide which one is to run."""
    began = time.monotonic()
    if len(variants) == 1:
        (sampler,) = variants.values()
        return Replacement((KernelTiming(control, "", sampler(1, 1)[0] * 1e6),), 0, rule.budget, undecided=False)
    turns = 0

    def cancel() -> bool:
        nonlocal turns
        number, place = divmod(turns, len(variants) + 1)
        turns += 1
        if step is None or place:
            return False
        return step(len(variants), number, ROUNDS[1], time.monotonic() - began)

    measured = measure(
        variants, control=control, confidence=rule.confidence, rounds=ROUNDS, budget=rule.budget, block=block,
        warm=block, widen=True, settled=_settled, cancel=cancel, margin=Margin(rule.min_effect, 0.0),
    )  # fmt: skip
    if step is not None:
        step.end(time.monotonic() - began)
    microseconds = {name: statistics.median(times) * 1e6 for name, times in measured.rounds.items() if times}
    found = [KernelTiming(control, "", microseconds.get(control, 0.0))]
    found += [
        KernelTiming(name, "", microseconds[name], one.ratio, one.low, one.high, _word(one))
        for name, one in measured.comparisons.items()
    ]
    return replacing(found, rounds=len(measured.twin), seconds=rule.budget, cancelled=measured.ended == "cancelled")


def replacing(candidates: list[KernelTiming], *, rounds: int, seconds: float, cancelled: bool = False) -> Replacement:
    """Return the candidates with the one that is to run first: the fastest of those that are faster, or the control."""
    rank = {"faster": 0, "control": 1}
    order = sorted(
        candidates,
        key=lambda one: (rank.get(one.verdict, 2), one.ratio if one.verdict == "faster" else one.microseconds),
    )
    undecided = order[0].verdict == "control" and any(one.verdict == "inconclusive" for one in order)
    return Replacement(tuple(order), rounds, seconds, undecided, cancelled)


def _settled(comparisons: Mapping[str, RatioComparison]) -> bool:
    return all(one.verdict is RatioVerdict.FASTER or one.not_faster for one in comparisons.values())


def _word(one: RatioComparison) -> str:
    if one.verdict is RatioVerdict.INCONCLUSIVE and one.not_faster:
        return "not_faster"
    return one.verdict.value
