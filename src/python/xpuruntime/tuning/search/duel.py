# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`duel`: the final test of a finalist against the control, in fresh processes, on held-out measurements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.measuring.candidate_codes import CandidateCode
from xpuruntime.measuring.statistics import Margin, RatioVerdict, compare, look_rounds, paired_ratio
from xpuruntime.tuning.result.tune_result import Ratio
from xpuruntime.tuning.trial import CONTROL, CandidateFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.tuning.spec.parts import Decide

__all__ = ["DuelResult", "duel"]


class DuelResult(NamedTuple):
    """How a duel ended.

    Attributes
    ----------
    won : bool or None
        ``None`` where it was not decided.
    gain : Ratio or None
        How many times better the finalist is than the control.
    ended : str
        In words.
    failed : str or None
        The code of a failure.
    """

    won: bool | None
    gain: Ratio | None
    ended: str
    failed: CandidateCode | None = None


def duel(measured: Callable[[int], Sequence[float] | None], decide: Decide, *, family: int, seed: int) -> DuelResult:
    """Compare a finalist with the control until it is decided.

    Parameters
    ----------
    measured : callable
        From the number of a round to the figures of two fresh openings, in the order control, finalist, finalist,
        control; ``None`` where the budget has no room for it. Raises `CandidateFailed`.
    decide : Decide
    family : int
        Duels that are decided together.
    seed : int
        Of the bootstrap.
    """
    looks = look_rounds(*decide.rounds, confidence=decide.confidence, family=family)
    control: list[float] = []
    times: list[float] = []
    split: list[tuple[float, float]] = []
    won: bool | None = None
    gain: Ratio | None = None
    ended = "decide.rounds allows no more"

    def look() -> tuple[bool | None, Ratio | None]:
        if len(times) < 3:
            return None, None
        # of the control to the finalist: how many times better the finalist is
        found = compare(
            control, times, margin=Margin(decide.min_effect, 0.0), confidence=decide.confidence, looks=len(looks) + 1,
            family=family, seed=seed,
        )  # fmt: skip
        gain = Ratio(value=found.ratio, low=found.low, high=found.high, against=CONTROL, rounds=len(times))
        if found.verdict is RatioVerdict.SLOWER:
            return True, gain
        return (False if found.within_limit else None), gain

    for number in range(looks[-1]):
        try:
            figures = measured(number)
        except CandidateFailed as failed:
            return DuelResult(False, gain, failed.reason, failed.code)
        if figures is None:
            ended = "the budget of time was used up"
            break
        first, one, two, last = figures
        control.append(math.sqrt(first * last))
        times.append(math.sqrt(one * two))
        split.append((first, last))
        if number + 1 in looks:
            won, gain = look()
            if won is not None:
                return DuelResult(won, gain, f"decided after {len(times)} rounds")
    won, gain = look()
    apart = _apart(split)
    return DuelResult(won, gain, f"{ended} after {len(times)} rounds" + (f"; {apart}" if apart else ""))


def _apart(split: Sequence[tuple[float, float]]) -> str:
    """Say how far two turns of the control are apart in the same rounds."""
    if len(split) < 3:
        return ""
    found = paired_ratio([last for _, last in split], [first for first, _ in split])
    return f"two turns of the same process differ by {found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
