# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Duel`: the final test of a finalist against the control, in fresh processes, on held-out measurements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.measuring.statistics import CandidateCode, Margin, RatioVerdict, compare, paired_ratio
from xpuruntime.tuning.result.tune_result import Ratio
from xpuruntime.tuning.trial import CONTROL, CandidateFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.tuning.spec.parts import Decide

__all__ = ["Duel", "DuelResult"]


class DuelResult(NamedTuple):
    """How a duel ended."""

    won: bool | None
    gain: Ratio | None
    ended: str
    failed: CandidateCode | None = None


class Duel:
    """A finalist against the control, round by round.

    `run` may be called again with more rounds. All looks at the data, from the first round to the most that
    ``decide.duel_rounds`` allows, are allowed for from the beginning, so that a duel that goes on proves no more by
    chance than one that does not.
    """

    def __init__(
        self, measured: Callable[[int], Sequence[float] | None], decide: Decide, *, family: int, seed: int
    ) -> None:
        self._measured, self._decide, self._family, self._seed = measured, decide, family, seed
        self._looks = decide.duel_looks(family)
        self._control: list[float] = []
        self._times: list[float] = []
        self._split: list[tuple[float, float]] = []

    def run(self, most: int) -> DuelResult:
        """Go on until it is decided, or until the last look within so many rounds (the first, where none is)."""
        last = max((look for look in self._looks if look <= most), default=self._looks[0])
        while len(self._times) < last:
            try:
                figures = self._measured(len(self._times))
            except CandidateFailed as failed:
                return DuelResult(False, self._look().gain, failed.reason, failed.code)
            if figures is None:
                return self._undecided("the budget of time was used up", self._look())
            first, one, two, end = figures
            self._control.append(math.sqrt(first * end))
            self._times.append(math.sqrt(one * two))
            self._split.append((first, end))
            if len(self._times) in self._looks and (found := self._look()).won is not None:
                return found
        ends = last == self._looks[-1]
        return self._undecided("decide.duel_rounds allows no more" if ends else "so far", self._look())

    def _look(self) -> DuelResult:
        rounds = len(self._times)
        if rounds < 3:
            return DuelResult(None, None, f"undecided after {rounds} rounds")
        # of the control to the finalist: how many times better the finalist is
        found = compare(
            self._control, self._times, margin=Margin(self._decide.min_effect, 0.0), confidence=self._decide.confidence,
            looks=len(self._looks) + 1, family=self._family, seed=self._seed,
        )  # fmt: skip
        gain = Ratio(value=found.ratio, low=found.low, high=found.high, against=CONTROL, rounds=rounds)
        won = True if found.verdict is RatioVerdict.SLOWER else (False if found.within_limit else None)
        return DuelResult(won, gain, f"decided after {rounds} rounds")

    def _undecided(self, why: str, found: DuelResult) -> DuelResult:
        """Return a look at the end, with the reason why the duel ended where nothing is decided."""
        if found.won is not None:
            return found
        apart = _apart(self._split)
        return found._replace(ended=f"{why} after {len(self._times)} rounds" + (f"; {apart}" if apart else ""))


def _apart(split: Sequence[tuple[float, float]]) -> str:
    """Say how far two turns of the control are apart in the same rounds."""
    if len(split) < 3:
        return ""
    found = paired_ratio([last for _, last in split], [first for first, _ in split])
    return f"two turns of the same process differ by {found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
