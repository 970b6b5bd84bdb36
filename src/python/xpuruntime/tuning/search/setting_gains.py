# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`SettingGains`: gains of single settings, and the combinations of settings that they predict to be worth a trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.tuning.search.space import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xpuruntime.tuning.search.candidate_state import CandidateState
    from xpuruntime.tuning.search.space import Point, Setting

__all__ = ["SettingGains"]

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
        found = set()
        for setting, state in self.single.items():
            ratio = self._ratio(setting)
            lost = ratio is not None and ratio > _BARRED
            gained_nothing = ratio is not None and ratio > _PROMISING and setting.key not in self._stated
            if state.trial.code is not None or state.code == CandidateCode.DUPLICATE or lost or gained_nothing:
                found.add(setting)
        return frozenset(found)

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
        """Return the ratio of a setting alone to its engine as it comes, where both were measured."""
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
