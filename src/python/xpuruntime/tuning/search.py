# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Search`: plan, trial, race, kernels, determinism and final duel, each on what is left of the one before.

All that is measured goes through the journal by its key, and all decisions follow from what was measured: a search that
is resumed makes the same ones without measuring again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from xpuruntime.measuring.candidate_codes import CandidateCode
from xpuruntime.measuring.statistics import look_rounds, runs_required
from xpuruntime.tuning.duel import Duelled, duel
from xpuruntime.tuning.planner import Rejected
from xpuruntime.tuning.records import CONTROL, CandidateFailed, OutOfTime
from xpuruntime.tuning.rows import FINAL, share_of
from xpuruntime.tuning.stages import Stages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.tuning.planner import Planned
    from xpuruntime.tuning.result import CandidateResult, Ratio
    from xpuruntime.tuning.rows import Row
    from xpuruntime.tuning.space import Point

__all__ = ["Outcome", "Search"]

#: Candidates that are planned at most.
_MOST_ROWS = 2000
#: Finalists that are duelled at most; share of the budget that the final duel may keep back.
_FINALISTS, _RESERVE = 4, 0.5
#: Share of time from which the kernels of an operation are searched.
_LEAST_SHARE = 0.01
#: Seconds for the runs that a 99th percentile is claimed from.
_TAIL_SECONDS = 30.0
#: Trials that tests of a grade of determinism of control and finalist are taken to last as long as.
_TESTS = 4


class Outcome(NamedTuple):
    """What a search decided."""

    verdict: str
    reason: str
    winner: str | None
    gain: Ratio | None
    candidates: tuple[CandidateResult, ...]
    stages: dict[str, int]
    notes: tuple[str, ...]


class Search(Stages):
    """One search: the stages in order, and the decision. Parameters are those of `Stages`."""

    # --- the stages -------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run all stages and decide."""
        self._control()
        control = self._rows[CONTROL]
        if control.code is CandidateCode.NOT_TRIED:
            control.code = CandidateCode.CONTROL
            return self._outcome("undecided", f"the policy that was given was not measured: {control.reason}")
        if control.trial.code is CandidateCode.NODE_LOST:
            return self._decide()
        for size in range(self._space.waves):
            self._wave(size)
        self._race_kernels()
        try:
            return self._decide()
        except OutOfTime as ended:
            return self._outcome("undecided", f"the finalists were not tested: {ended}")

    def _control(self) -> None:
        """Open the user's own policy, which every gain is measured against."""
        row = self._new({})
        row.code = CandidateCode.CONTROL
        row.reason = "the policy that was given"
        if row.trial.code is None and self._room(row) and self._try(row, self._all.main):
            for bench in self._all.benches:
                bench.pace(row.trial.run)
            self._incumbent, row.estimate = row.candidate.id, 1.0
            looks = look_rounds(*self._spec.decide.rounds, confidence=self._spec.decide.confidence)
            pair = 2.5 * row.trial.seconds + 0.2
            needed = looks[0] * pair + (_TESTS * row.trial.seconds if self._grade != "none" else 0.0)
            if self._spec.constraints.latency_p99 is not None:
                needed += 2 * min(_TAIL_SECONDS, 2 * runs_required(0.99) * (row.trial.run or 0.0))
            self._reserve = min(_RESERVE * self._spec.budget.time, needed)
        elif row.trial.code not in (None, CandidateCode.NODE_LOST):
            self._notes.append(f"the policy that was given does not keep the constraints: {row.reason}")

    def _wave(self, size: int) -> None:
        points = list(self._space.wave(size, self._gains.barred() if size > 1 else frozenset()))
        points = [
            one for one in points if size == 0 or self._gains.default[one.engine].code != CandidateCode.INFEASIBLE
        ]
        if size > 1:
            points = self._promising(points)
        points = [one for one in points if frozenset(one.settings) not in self._made]
        if size == 1:
            points.sort(key=self._gains.first)
            lead = self._rows[self._incumbent].estimate if self._incumbent is not None else None
            near = [one for one in points if self._gains.first(one) < (lead or 1.0)]
            for part in (near, points[len(near) :]):
                self._points(part, size)
                self._all_together()
            return
        if size > 1:
            points.sort(key=self._gains.promise)
        self._points(points, size)

    def _all_together(self) -> None:
        """Try what gained alone together, before combinations of fewer settings: a search may end before those."""
        points = []
        for engine in self._gains.default:
            settings = self._gains.together(engine)
            if len(settings) < 2 or frozenset(settings) in self._made:
                continue
            self._made.add(frozenset(settings))
            if (point := self._space.point(engine, settings)) is not None:
                points.append(point)
        points.sort(key=self._gains.promise)
        self._points(self._promising(points), 2)

    def _points(self, points: Sequence[Point], size: int) -> None:
        """Plan points, and open and race those that a plan takes."""
        rows = []
        for point in points:
            row = self._point(point, size) if len(self._rows) < _MOST_ROWS else None
            self._untried += len(self._rows) >= _MOST_ROWS
            if row is not None and self._room(row):
                rows.append(row)
        self._heats(rows)

    def _point(self, point: Point, size: int) -> Row | None:
        """Plan a point; ``None`` where it is rejected, or gets what another gets."""
        row = self._new(point.changes)
        if size == 0:
            self._gains.default[point.engine] = row
        elif size == 1:
            self._gains.single[point.settings[0]] = row
        return row if row.code == CandidateCode.UNDECIDED else None

    def _race_kernels(self) -> None:
        """Try kernels of the leader, an operation at a time, those that take most time first."""
        leader = self._leader()
        if leader is None or not self._kernels or not self._all.due("shares", self._deadline):
            return
        row, bench = self._rows[leader], self._all.main
        choices = {
            op: planned
            for op, names in self._kernels.items()
            if (planned := [name for name in names if not isinstance(self._with_kernel(row, op, name), Rejected)])
        }
        refused = sum(map(len, self._kernels.values())) - sum(map(len, choices.values()))
        if refused:
            on = f"{row.candidate.engine}@{row.candidate.device}"
            self._notes.append(f"kernels: of the choices for {', '.join(self._kernels)}, a plan takes "
                               f"{sum(map(len, choices.values()))} on {on}, and refuses {refused}")  # fmt: skip
        if not choices:
            return
        self._report("kernels", bench, (leader,))
        try:
            shares = self._all.measured(bench, "shares", lambda: bench.shares(row.candidate))
        except (CandidateFailed, OutOfTime) as failed:
            self._notes.append(f"kernels were not searched: {failed}")
            return
        for op in sorted(choices, key=lambda one: -share_of(one, shares)):
            if share_of(op, shares) < _LEAST_SHARE:
                continue
            changes = self._rows[self._leader() or leader].candidate.changes
            rows = [self._new({**changes, f"kernels.{op}": name}) for name in choices[op]]
            self._heats([one for one in rows if one.code == CandidateCode.UNDECIDED and self._room(one)])

    def _with_kernel(self, row: Row, op: str, name: str) -> Planned | Rejected:
        return self._plan({**row.candidate.changes, f"kernels.{op}": name})

    # --- the decision -----------------------------------------------------------------------------------------------

    def _decide(self) -> Outcome:
        control = self._rows[CONTROL]
        kept = control.trial.code is None and self._keeps(control)
        if control.trial.code is CandidateCode.NODE_LOST:
            return self._outcome("undecided", f"the policy that was given could not be measured: {control.reason}")
        ranked = self._ranked(kept=kept)
        open_ = sum(self._rows[name].code == CandidateCode.UNDECIDED for name in ranked)
        family, duels, first, undecided = min(max(open_, 1), _FINALISTS), 0, None, ""
        for name in ranked:
            row = self._rows[name]
            if duels and row.code != CandidateCode.UNDECIDED:
                continue  # it lost to one that lost a duel
            if duels == family or not self._keeps(row):
                continue
            self._stages["finalists"] += 1
            if not kept:
                reason = f"the policy that was given does not keep the constraints ({control.reason}), and {name} does"
                gain = self._duel(name, 1).gain if control.trial.code is None else None
                return self._won(name, reason, gain)
            duels += 1
            won, gain, ended, failed = self._duel(name, family)
            first = first or gain
            if won:
                return self._won(name, f"{name} won the final duel in fresh processes", gain)
            row.gain = gain or row.gain
            if won is None:
                row.reason = f"the final duel did not decide: {ended}"
                led = f"{name} led" + ("" if gain is None else f" by {gain} so far")
                undecided = undecided or f"{led}, and the final duel did not decide: {ended}"
            elif failed is not None:
                row.code, row.reason = failed, f"in the final duel, {ended}"
            else:
                row.code, row.reason = CandidateCode.NOT_FASTER, "it did not keep its lead in the final duel"
        if not kept:
            return self._outcome("none", "no candidate keeps the constraints")
        return self._outcome("undecided", undecided, gain=first) if undecided else self._no_better(first)

    def _no_better(self, gain: Ratio | None = None) -> Outcome:
        open_ = [name for name, row in self._rows.items() if row.code == CandidateCode.UNDECIDED]
        if self._untried and self._deadline <= self._all.clock():
            reason = f"nothing that was tried is better, and {self._untried} candidates were not tried in the budget"
            return self._outcome("undecided", reason, gain=gain)
        if open_:
            reason = f"nothing is proven to be better, and {', '.join(open_[:5])} could still be, by little"
            return self._outcome("undecided", reason, gain=gain)
        if lost := [name for name, row in self._rows.items() if row.code is CandidateCode.NODE_LOST]:
            reason = f"nothing is proven to be better, and {', '.join(lost[:5])} could still be: their node was lost"
            return self._outcome("undecided", reason, gain=gain)
        if self._untried:
            self._notes.append(f"{self._untried} candidates were not tried: budget.candidates allows no more")
        rejected = [(name, row) for name, row in self._rows.items() if row.code is CandidateCode.INFEASIBLE]
        if rejected and not self._stages["raced"]:
            name, row = rejected[0]
            self._notes.append(
                f"nothing was compared with the policy given: of {len(self._rows) - 1} candidates, the plan rejected "
                f"{len(rejected)}, {name} because {row.reason}"
            )
        effect = f"{self._spec.decide.min_effect:.3g}"
        return self._outcome("tied", f"no candidate is better than the policy given by a share of {effect}", gain=gain)

    def _won(self, name: str, reason: str, gain: Ratio | None) -> Outcome:
        row = self._rows[name]
        row.code, row.reason, row.gain = CandidateCode.WINNER, reason, gain or row.gain
        return self._outcome("winner", reason, winner=name, gain=gain)

    def _ranked(self, *, kept: bool) -> list[str]:
        """Return the candidates that may be finalists, the best first.

        Where the policy that was given is kept, those are the ones that may be better than it.
        """
        codes = (CandidateCode.UNDECIDED,) if kept and self._incumbent == CONTROL else FINAL
        ranked = [
            (row.estimate, name)
            for name, row in self._rows.items()
            if name != CONTROL and row.estimate is not None and row.trial.code is None and row.code in codes
        ]
        return [name for estimate, name in sorted(ranked) if not kept or estimate < 1]

    def _keeps(self, row: Row) -> bool:
        """Test determinism and the 99th percentile."""
        one, constraints, bench = row.candidate, self._spec.constraints, self._all.main
        try:
            if self._grade != "none":
                self._report("determinism", bench, (one.id,))
                key = f"determinism/{one.id}"
                found = self._all.measured(bench, key, lambda: bench.determinism(one, self._grade))
                if not found["reached"]:
                    return self._fails(
                        row, CandidateCode.NONDETERMINISTIC, f"{self._grade} did not pass: {found['reason']}"
                    )
            if constraints.latency_p99 is not None:
                self._report("tail", bench, (one.id,))
                limit, runs = constraints.latency_p99, 2 * runs_required(0.99)
                key = f"tail/{one.id}"
                found = self._all.measured(bench, key, lambda: bench.tail(one, limit, runs, _TAIL_SECONDS))
                runs, over = found["runs"], found["over"]
                if over > 0.01 * runs or runs < runs_required(0.99, beyond=over):
                    share = f"{over} of {runs} runs took longer than {limit:g} s"
                    return self._fails(row, CandidateCode.LATENCY, f"its p99 is {found['p99']:.4g} s: {share}")
        except CandidateFailed as failed:
            return self._fails(row, failed.code, failed.reason)
        finally:
            bench.close(one)
        return True

    def _fails(self, row: Row, code: CandidateCode, reason: str) -> bool:
        row.trial = msgspec.structs.replace(row.trial, code=code, reason=reason)
        row.code, row.reason = (CandidateCode.CONTROL, reason) if row.candidate.id == CONTROL else (code, reason)
        return False

    def _duel(self, name: str, family: int) -> Duelled:
        """Race a finalist against the policy that was given; `family` is how many such duels there may be."""
        bench = self._all.main
        decide, pair = self._spec.decide, (self._rows[CONTROL].candidate, self._rows[name].candidate)

        def measured(number: int) -> Sequence[float] | None:
            key = f"duel/{name}/{number}"
            if not self._all.due(key, self._spec.budget.time):
                return None
            self._report("duel", bench, (CONTROL, name), number, decide.rounds[1])
            try:
                figures: list[float] = self._all.measured(bench, key, lambda: bench.fresh(pair))
            except OutOfTime:
                return None
            return figures

        return duel(measured, decide, family=family, seed=self._spec.seed)

    def _promising(self, points: Sequence[Point]) -> list[Point]:
        """Return the points that may still win, and note how many were left out."""
        lead = self._rows[self._incumbent].estimate if self._incumbent is not None else None
        kept = self._gains.promising(points, lead)
        if len(kept) < len(points):
            self._notes.append(
                f"{len(points) - len(kept)} combinations of settings were left out: the gains of their settings alone "
                "are far from the lead"
            )
        return kept

    def _outcome(self, verdict: str, reason: str, *, winner: str | None = None, gain: Ratio | None = None) -> Outcome:
        if self._all.cancelled and verdict != "winner":
            verdict, reason = "undecided", f"it was cancelled: {reason}"
        rows = tuple(row.result() for row in self._rows.values())
        return Outcome(verdict, reason, winner, gain, rows, self._stages, (*self._notes, *self._all.notes))
