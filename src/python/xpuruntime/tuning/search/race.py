# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Race`: candidates against an incumbent in interleaved rounds, decided on paired log-ratios. A pure function."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.measuring.rounds import rotated
from xpuruntime.measuring.statistics import CandidateCode, Interval, growing_rounds, paired_ratio

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.tuning.spec.parts import Decide

__all__ = ["Failure", "Race", "RaceExit"]


class Failure(NamedTuple):
    """A candidate that failed in a round."""

    code: CandidateCode
    reason: str


class RaceExit(NamedTuple):
    """How a candidate left a race: the ratio of its figure to that of another, and after how many rounds."""

    code: CandidateCode
    against: str
    ratio: Interval | None
    rounds: int
    reason: str = ""


class Race:
    """Rounds of an incumbent and challengers. Figures are small where they are good: seconds, bytes or joules.

    After the fewest rounds, and then after each third more, the interval of every challenger's ratio to the incumbent
    is looked at. One that cannot be better by `Decide.min_effect` leaves. One that surely is becomes the incumbent, and
    the old one leaves. Nothing here makes a winner: that takes the final duel, on data of its own.
    """

    def __init__(self, incumbent: str, challengers: Sequence[str], decide: Decide, seed: int) -> None:
        #: Who was the incumbent at the start, and who is now.
        self.start = self.incumbent = incumbent
        self.exits: dict[str, RaceExit] = {}
        self.figures: dict[str, list[float | None]] = {name: [] for name in (incumbent, *challengers)}
        self._decide, self._seed = decide, seed
        self._looks = set(growing_rounds(*decide.rounds))
        self.rounds = 0

    @property
    def live(self) -> list[str]:
        """Those that still run, the incumbent first."""
        return [self.incumbent, *(name for name in self.figures if name not in self.exits and name != self.incumbent)]

    @property
    def done(self) -> bool:
        """Whether all challengers have left, or the most rounds were run."""
        return len(self.live) == 1 or self.rounds >= self._decide.rounds[1]

    def order(self) -> list[str]:
        """Return the order of the next round."""
        return rotated(self.live, self.rounds)

    def add(self, figures: Mapping[str, float | Failure]) -> None:
        """Take the figures of a round of all that are live."""
        self.rounds += 1
        for name in self.figures:
            found = figures.get(name)
            self.figures[name].append(None if isinstance(found, Failure) else found)
            if isinstance(found, Failure):
                self.exits[name] = RaceExit(found.code, self.incumbent, None, self.rounds, found.reason)
        if self.incumbent in self.exits:
            self._replace_failed()
        if self.rounds in self._looks:
            self._look()

    def ratio(self, name: str, other: str) -> Interval | None:
        """Return the ratio of two figures over the rounds that both ran; ``None`` where there are fewer than three."""
        pairs = zip(self.figures[name], self.figures[other], strict=True)
        both = [(one, two) for one, two in pairs if one is not None and two is not None]
        if len(both) < 3:
            return None
        times, control = zip(*both, strict=True)
        return paired_ratio(times, control, confidence=self._decide.confidence, seed=self._seed)

    def leader(self) -> str:
        """Return the one with the best median ratio to the incumbent, which may be the incumbent itself."""
        found = {name: ratio.ratio for name in self.live[1:] if (ratio := self.ratio(name, self.incumbent))}
        best = min(found, key=found.__getitem__, default=self.incumbent)
        return best if found.get(best, 1.0) < 1 else self.incumbent

    def _look(self) -> None:
        margin = math.log1p(self._decide.min_effect)
        ratios = {name: ratio for name in self.live[1:] if (ratio := self.ratio(name, self.incumbent))}
        faster = {name: one.ratio for name, one in ratios.items() if math.log(one.high) < -margin}
        for name, one in ratios.items():
            if math.log(one.low) > -margin:
                code: CandidateCode = CandidateCode.SLOWER if one.low > 1 else CandidateCode.NOT_FASTER
                self.exits[name] = RaceExit(code, self.incumbent, one, self.rounds)
        if faster:
            best, old = min(faster, key=faster.__getitem__), self.incumbent
            self.exits[old] = RaceExit(CandidateCode.BEATEN, best, self.ratio(old, best), self.rounds)
            self.incumbent = best

    def _replace_failed(self) -> None:
        """Let the quickest of the others stand in for an incumbent that failed."""
        left = [name for name in self.figures if name not in self.exits]
        if left:
            known = {name: [one for one in self.figures[name] if one is not None] for name in left}
            self.incumbent = min(left, key=lambda name: statistics.median(known[name]) if known[name] else math.inf)
