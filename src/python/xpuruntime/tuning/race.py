# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Races and duels: candidates compared in rounds, and what settings gain together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.measuring.rounds import rotated
from xpuruntime.measuring.statistics import (
    CandidateCode,
    Interval,
    Margin,
    RatioVerdict,
    compare,
    growing_rounds,
    paired_ratio,
)
from xpuruntime.tuning.space import OPTIONS, CandidateState, Point, Setting
from xpuruntime.tuning.trial import CONTROL, CandidateFailed
from xpuruntime.tuning.tune_result import Ratio

if TYPE_CHECKING:
    from xpuruntime.tuning.spec.parts import Decide


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
            figure = figures.get(name)
            self.figures[name].append(None if isinstance(figure, Failure) else figure)
            if isinstance(figure, Failure):
                self.exits[name] = RaceExit(figure.code, self.incumbent, None, self.rounds, figure.reason)
        if self.incumbent in self.exits:
            self._replace_failed()
        if self.rounds in self._looks:
            self._look()

    def ratio(self, name: str, other: str) -> Interval | None:
        """Return the ratio of two figures over the rounds that both ran; ``None`` where there are fewer than three."""
        pairs = zip(self.figures[name], self.figures[other], strict=True)
        both = [(figure, two) for figure, two in pairs if figure is not None and two is not None]
        if len(both) < 3:
            return None
        times, control = zip(*both, strict=True)
        return paired_ratio(times, control, confidence=self._decide.confidence, seed=self._seed)

    def leader(self) -> str:
        """Return the one with the best median ratio to the incumbent, which may be the incumbent itself."""
        ratios = {name: ratio.ratio for name in self.live[1:] if (ratio := self.ratio(name, self.incumbent))}
        best = min(ratios, key=ratios.__getitem__, default=self.incumbent)
        return best if ratios.get(best, 1.0) < 1 else self.incumbent

    def _look(self) -> None:
        margin = math.log1p(self._decide.min_effect)
        ratios = {name: ratio for name in self.live[1:] if (ratio := self.ratio(name, self.incumbent))}
        faster = {name: ratio.ratio for name, ratio in ratios.items() if math.log(ratio.high) < -margin}
        for name, interval in ratios.items():
            if math.log(interval.low) > -margin:
                code: CandidateCode = CandidateCode.SLOWER if interval.low > 1 else CandidateCode.NOT_FASTER
                self.exits[name] = RaceExit(code, self.incumbent, interval, self.rounds)
        if faster:
            best, old = min(faster, key=faster.__getitem__), self.incumbent
            self.exits[old] = RaceExit(CandidateCode.BEATEN, best, self.ratio(old, best), self.rounds)
            self.incumbent = best

    def _replace_failed(self) -> None:
        left = [name for name in self.figures if name not in self.exits]
        if left:
            known = {name: [figure for figure in self.figures[name] if figure is not None] for name in left}
            self.incumbent = min(left, key=lambda name: statistics.median(known[name]) if known[name] else math.inf)


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
            first, second, third, end = figures
            self._control.append(math.sqrt(first * end))
            self._times.append(math.sqrt(second * third))
            self._split.append((first, end))
            if len(self._times) in self._looks and (result := self._look()).won is not None:
                return result
        ends = last == self._looks[-1]
        return self._undecided("decide.duel_rounds allows no more" if ends else "so far", self._look())

    def _look(self) -> DuelResult:
        rounds = len(self._times)
        if rounds < 3:
            return DuelResult(None, None, f"undecided after {rounds} rounds")
        # of the control to the finalist: how many times better the finalist is
        comparison = compare(
            self._control, self._times, margin=Margin(self._decide.min_effect, 0.0), confidence=self._decide.confidence,
            looks=len(self._looks) + 1, family=self._family, seed=self._seed,
        )  # fmt: skip
        gain = Ratio(value=comparison.ratio, low=comparison.low, high=comparison.high, against=CONTROL, rounds=rounds)
        won = True if comparison.verdict is RatioVerdict.SLOWER else (False if comparison.within_limit else None)
        return DuelResult(won, gain, f"decided after {rounds} rounds")

    def _undecided(self, why: str, last: DuelResult) -> DuelResult:
        if last.won is not None:
            return last
        apart = _apart(self._split)
        return last._replace(ended=f"{why} after {len(self._times)} rounds" + (f"; {apart}" if apart else ""))


def _apart(split: Sequence[tuple[float, float]]) -> str:
    if len(split) < 3:
        return ""
    ratio = paired_ratio([last for _, last in split], [first for first, _ in split])
    return f"two turns of the same process differ by {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


#: A gain of a setting alone from which it is combined with others, and a loss that bars it.
_PROMISING, _BARRED = 0.99, 1.10
#: Predicted ratio to the lead above which a combination of settings is left out.
_HOPELESS = 1.25
#: Ratio that a setting of a policy may have before it was tried; an option of an engine is taken to gain nothing.
_OF_POLICY = 0.5


class SettingGains:
    """The states of engines as they come, and of settings alone."""

    def __init__(self, stated: Iterable[str], first: Iterable[tuple[str, str]]) -> None:
        self._stated, self._first = frozenset(stated), frozenset(first)
        self.default: dict[str, CandidateState] = {}
        self.single: dict[Setting, CandidateState] = {}

    def excluded(self) -> frozenset[Setting]:
        """Return the settings that later waves leave out: they failed or lost alone, or gained nothing."""
        settings = set()
        for setting, state in self.single.items():
            ratio = self._ratio(setting)
            lost = ratio is not None and ratio > _BARRED
            gained_nothing = ratio is not None and ratio > _PROMISING and setting.key not in self._stated
            if state.trial.code is not None or state.code == CandidateCode.DUPLICATE or lost or gained_nothing:
                settings.add(setting)
        return frozenset(settings)

    def worth_refining(self, setting: Setting) -> bool:
        """Say whether a setting may gain beside others, whatever it gained alone.

        One of a policy may, even if it lost: what a precision gains shows only where launches do not take the time. An
        option of an engine may if it did not lose. One that failed is not tried again.
        """
        state = self.single.get(setting)
        if state is not None and (state.trial.code is not None or state.code == CandidateCode.DUPLICATE):
            return False
        if self._is_first(setting):
            return True
        ratio = self._ratio(setting)
        return ratio is not None and ratio <= _BARRED

    def _is_first(self, setting: Setting) -> bool:
        return not setting.key.startswith(OPTIONS) or (setting.engine, setting.key) in self._first

    def _ratio(self, setting: Setting) -> float | None:
        state, default = self.single.get(setting), self.default.get(setting.engine)
        if state is None or default is None or state.estimate is None or default.estimate is None:
            return None
        return state.estimate / default.estimate

    def predicted_ratio(self, point: Point) -> float:
        """Return the estimated ratio to the control if the gains of its settings multiply."""
        default = self.default.get(point.engine)
        base = default.estimate if default is not None and default.estimate else 1.0
        total = base
        for setting in point.settings:
            state = self.single.get(setting)
            if state is not None and state.estimate:
                total *= state.estimate / base
        return total

    def prior_ratio(self, point: Point) -> float:
        """Return the ratio to the control that a setting alone may have, before it was tried.

        Those of a policy, of engines that are near, come before options of engines.
        """
        default = self.default.get(point.engine)
        base = default.estimate if default is not None and default.estimate else 1.0
        return base * (_OF_POLICY if all(map(self._is_first, point.settings)) else 1.0)

    def best_settings(self, engine: str) -> tuple[Setting, ...]:
        """Return the best value of each key of an engine that gained alone, the largest gain first."""
        gains = {
            setting: ratio
            for setting, state in self.single.items()
            if setting.engine == engine and state.trial.code is None and (ratio := self._ratio(setting))
        }
        best: dict[str, Setting] = {}
        for setting in sorted(gains, key=gains.__getitem__):
            if gains[setting] <= _PROMISING:
                best.setdefault(setting.key, setting)
        return tuple(best.values())

    def promising(self, points: Sequence[Point], lead: float | None) -> list[Point]:
        """Return the points that may still win against a lead if the gains of their settings multiply."""
        return [point for point in points if lead is None or self.predicted_ratio(point) <= _HOPELESS * lead]
