# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Search`: plan, trial, race, kernels, determinism and final duel, each on what is left of the one before.

All that is measured goes through the journal by its key, and all decisions follow from what was measured: a search that
is resumed makes the same ones without measuring again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from xpuruntime.measuring.statistics import CandidateCode, runs_required
from xpuruntime.tuning.race import Duel, DuelResult
from xpuruntime.tuning.scheduler import TAIL_SECONDS, TrialScheduler
from xpuruntime.tuning.space import FINAL, CandidateState, Planned, Point, Rejected, op_share
from xpuruntime.tuning.trial import CONTROL, CandidateFailed, OutOfTime

if TYPE_CHECKING:
    from xpuruntime.tuning.tune_result import CandidateResult, Ratio

#: Candidates that are planned at most.
_MOST_CANDIDATES = 2000
#: Finalists that are duelled at most.
_FINALISTS = 4
#: Share of time from which the kernels of an operation are searched.
_LEAST_SHARE = 0.01
#: Share of the time left after settings of a policy that may be kept back for the search of kernels.
_KERNEL_SHARE = 0.75


class Outcome(NamedTuple):
    """What a search decided."""

    verdict: str
    reason: str
    winner: str | None
    gain: Ratio | None
    candidates: tuple[CandidateResult, ...]
    stages: dict[str, int]
    notes: tuple[str, ...]


class Search(TrialScheduler):
    """One search: the stages in order, and the decision. Parameters are those of `TrialScheduler`."""

    # --- the stages -------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run all stages and decide."""
        self._open_control()
        control = self._states[CONTROL]
        if control.code is CandidateCode.NOT_TRIED:
            control.code = CandidateCode.CONTROL
            return self._outcome("undecided", f"the policy that was given was not measured: {control.reason}")
        if control.trial.code is CandidateCode.NODE_LOST:
            return self._decide()
        for size in range(self._space.waves):
            self._run_wave(size)
        self._kernel_reserve = 0.0
        self._search_kernels()
        self._run_skipped()
        self._reserve = 0.0  # what is left is for the decision
        try:
            return self._decide()
        except OutOfTime as ended:
            return self._outcome("undecided", f"the finalists were not tested: {ended}")

    def _open_control(self) -> None:
        state = self._add_candidate({})
        state.code = CandidateCode.CONTROL
        state.reason = "the policy that was given"
        if state.trial.code is None and self._admit(state) and self._open(state, self._measurements.main_executor):
            for executor in self._measurements.executors:
                executor.calibrate(state.trial.run)
            self._incumbent, state.estimate = state.candidate.id, 1.0
            self._update_reserve()
        elif state.trial.code not in (None, CandidateCode.NODE_LOST):
            self._notes.append(f"the policy that was given does not keep the constraints: {state.reason}")

    def _run_wave(self, size: int) -> None:
        points = list(self._space.wave(size, self._gains.excluded() if size > 1 else frozenset()))
        points = [
            point for point in points if size == 0 or self._gains.default[point.engine].code != CandidateCode.INFEASIBLE
        ]
        if size > 1:
            points = self._promising(points)
        points = [point for point in points if frozenset(point.settings) not in self._tried_settings]
        if size == 1:
            points.sort(key=self._gains.prior_ratio)
            lead = self._states[self._incumbent].estimate if self._incumbent is not None else None
            near = [point for point in points if self._gains.prior_ratio(point) < (lead or 1.0)]
            for part in (near, points[len(near) :]):
                self._race_points(part, size)
                self._combine_gains()
                self._refine()
                self._keep_time_for_kernels()  # from options of engines and smaller combinations
            return
        if size > 1:
            points.sort(key=self._gains.predicted_ratio)
        self._race_points(points, size)

    def _combine_gains(self) -> None:
        """Try what gained alone together, before combinations of fewer settings: a search may end before those."""
        points = []
        for engine in self._gains.default:
            settings = self._gains.best_settings(engine)
            if len(settings) < 2 or frozenset(settings) in self._tried_settings:
                continue
            if (point := self._space.point(engine, settings)) is not None:
                points.append(point)
        points.sort(key=self._gains.predicted_ratio)
        self._race_points(self._promising(points), 2)

    def _refine(self) -> None:
        """Change the leader in one setting at a time, until nothing gains: gains of single settings do not multiply."""
        refined: set[str] = set()
        while (leader := self._leader()) is not None and leader not in refined:
            refined.add(leader)
            point = self._points.get(leader)
            if point is None or not point.settings:  # settings alone were tried
                return
            points = [
                neighbour
                for neighbour in self._space.neighbours(point)
                if frozenset(neighbour.settings) not in self._tried_settings
                and all(map(self._gains.worth_refining, set(neighbour.settings).difference(point.settings)))
            ]
            points.sort(key=self._gains.predicted_ratio)
            self._race_points(points, 2)

    def _race_points(self, points: Sequence[Point], size: int) -> None:
        states = []
        for point in points:
            state = self._plan_point(point, size) if len(self._states) < _MOST_CANDIDATES else None
            self._untried += len(self._states) >= _MOST_CANDIDATES
            if state is not None and self._admit(state):
                states.append(state)
        self._run_heats(states)

    def _plan_point(self, point: Point, size: int) -> CandidateState | None:
        state = self._add_candidate(point.changes)
        self._points[state.candidate.id] = point
        self._tried_settings.add(frozenset(point.settings))
        if size == 0:
            self._gains.default[point.engine] = state
        elif size == 1:
            self._gains.single[point.settings[0]] = state
        return state if state.code == CandidateCode.UNDECIDED else None

    def _keep_time_for_kernels(self) -> None:
        leader, opened = self._leader(), self._counts["opened"]
        if self._kernel_reserve or leader is None or not opened:
            return
        choices = sum(map(len, self._kernel_choices(self._states[leader]).values()))
        now = self._measurements.clock()
        self._kernel_reserve = min(choices * now / opened, _KERNEL_SHARE * max(self._deadline - now, 0.0))

    def _kernel_choices(self, state: CandidateState) -> dict[str, list[str]]:
        return {
            op: planned
            for op, names in self._kernels.items()
            if (planned := [name for name in names if not isinstance(self._with_kernel(state, op, name), Rejected)])
        }

    def _search_kernels(self) -> None:
        leader = self._leader()
        if leader is None or not self._kernels or not self._measurements.due("shares", self._deadline):
            return
        state, executor = self._states[leader], self._measurements.main_executor
        choices = self._kernel_choices(state)
        refused = sum(map(len, self._kernels.values())) - sum(map(len, choices.values()))
        if refused:
            on = f"{state.candidate.engine}@{state.candidate.device}"
            self._notes.append(f"kernels: of the choices for {', '.join(self._kernels)}, a plan takes "
                               f"{sum(map(len, choices.values()))} on {on}, and refuses {refused}")  # fmt: skip
        if not choices:
            return
        self._report("kernels", executor, (leader,))
        try:
            shares = self._measurements.measure(executor, "shares", lambda: executor.op_time_shares(state.candidate))
        except (CandidateFailed, OutOfTime) as failed:
            self._notes.append(f"kernels were not searched: {failed}")
            return
        for op in sorted(choices, key=lambda choice: -op_share(choice, shares)):
            if op_share(op, shares) < _LEAST_SHARE:
                continue
            changes = self._states[self._leader() or leader].candidate.changes
            states = [self._add_candidate({**changes, f"kernels.{op}": name}) for name in choices[op]]
            self._run_heats([state for state in states if state.code == CandidateCode.UNDECIDED and self._admit(state)])

    def _with_kernel(self, state: CandidateState, op: str, name: str) -> Planned | Rejected:
        return self._plan({**state.candidate.changes, f"kernels.{op}": name})

    # --- the decision -----------------------------------------------------------------------------------------------

    def _decide(self) -> Outcome:
        control = self._states[CONTROL]
        kept = control.trial.code is None and self._meets_constraints(control)
        if control.trial.code is CandidateCode.NODE_LOST:
            return self._outcome("undecided", f"the policy that was given could not be measured: {control.reason}")
        ranked = self._finalists(kept=kept)
        open_ = sum(self._states[name].code == CandidateCode.UNDECIDED for name in ranked)
        family, most = min(max(open_, 1), _FINALISTS), self._spec.decide.rounds[1]
        duels: dict[str, Duel] = {}
        ended: dict[str, DuelResult] = {}
        for name in ranked:
            state = self._states[name]
            if duels and state.code != CandidateCode.UNDECIDED:
                continue  # it lost to one that lost a duel
            if len(duels) == family or not self._meets_constraints(state):
                continue
            self._counts["finalists"] += 1
            if not kept:
                reason = f"the policy that was given does not keep the constraints ({control.reason}), and {name} does"
                gain = self._duel(name, 1).run(most).gain if control.trial.code is None else None
                return self._winner(name, reason, gain)
            duels[name] = self._duel(name, family)
            if self._go_on(name, duels[name], most, ended):
                return self._winner(name, f"{name} won the final duel in fresh processes", ended[name].gain)
        for name in [key for key, outcome in ended.items() if outcome.won is None]:  # in what is left of the budget
            if self._go_on(name, duels[name], self._spec.decide.most_duel_rounds, ended):
                return self._winner(name, f"{name} won the final duel in fresh processes", ended[name].gain)
        if not kept:
            return self._outcome("none", "no candidate keeps the constraints")
        gain = next((outcome.gain for outcome in ended.values()), None)
        for name, duel in ended.items():
            if duel.won is None:
                measured = "" if duel.gain is None else f" ({duel.gain} of {duel.gain.against} so far)"
                reason = f"the final duel of {name}{measured} did not decide: {duel.ended}"
                return self._outcome("undecided", reason, gain=gain)
        return self._no_winner(gain)

    def _go_on(self, name: str, duel: Duel, most: int, ended: dict[str, DuelResult]) -> bool:
        state, outputs = self._states[name], duel.run(most)
        ended[name] = outputs
        state.gain = outputs.gain or state.gain
        if outputs.won is None:
            state.reason = f"the final duel did not decide: {outputs.ended}"
        elif outputs.failed is not None:
            state.code, state.reason = outputs.failed, f"in the final duel, {outputs.ended}"
        elif not outputs.won:
            state.code, state.reason = CandidateCode.NOT_FASTER, "it did not keep its lead in the final duel"
        return bool(outputs.won)

    def _no_winner(self, gain: Ratio | None) -> Outcome:
        open_ = [name for name, state in self._states.items() if state.code == CandidateCode.UNDECIDED]
        if self._skipped_for_time():
            reason = f"nothing that was tried is better, and {_candidates(self._untried)} not tried in the budget"
            return self._outcome("undecided", reason, gain=gain)
        if open_:
            reason = f"nothing is proven to be better, and {', '.join(open_[:5])} could still be, by little"
            return self._outcome("undecided", reason, gain=gain)
        if lost := [name for name, state in self._states.items() if state.code is CandidateCode.NODE_LOST]:
            reason = f"nothing is proven to be better, and {', '.join(lost[:5])} could still be: their node was lost"
            return self._outcome("undecided", reason, gain=gain)
        if self._untried:
            self._notes.append(f"{_candidates(self._untried)} not tried: budget.candidates allows no more")
        rejected = [(name, state) for name, state in self._states.items() if state.code is CandidateCode.INFEASIBLE]
        if rejected and not self._counts["raced"]:
            name, state = rejected[0]
            self._notes.append(
                f"nothing was compared with the policy given: of {len(self._states) - 1} candidates, the plan rejected "
                f"{len(rejected)}, {name} because {state.reason}"
            )
        effect = f"{self._spec.decide.min_effect:.3g}"
        return self._outcome("tied", f"no candidate is better than the policy given by a share of {effect}", gain=gain)

    def _winner(self, name: str, reason: str, gain: Ratio | None) -> Outcome:
        state = self._states[name]
        state.code, state.reason, state.gain = CandidateCode.WINNER, reason, gain or state.gain
        return self._outcome("winner", reason, winner=name, gain=gain)

    def _finalists(self, *, kept: bool) -> list[str]:
        """Return the candidates that may be finalists, the best first."""
        # Where the policy that was given is kept, those are the ones that may be better than it.
        codes = (CandidateCode.UNDECIDED,) if kept and self._incumbent == CONTROL else FINAL
        ranked = [
            (state.estimate, name)
            for name, state in self._states.items()
            if name != CONTROL and state.estimate is not None and state.trial.code is None and state.code in codes
        ]
        return [name for estimate, name in sorted(ranked) if not kept or estimate < 1]

    def _meets_constraints(self, state: CandidateState) -> bool:
        candidate, constraints, executor = state.candidate, self._spec.constraints, self._measurements.main_executor
        try:
            if self._grade != "none":
                self._report("determinism", executor, (candidate.id,))
                key = f"determinism/{candidate.id}"
                measurement = self._measurements.measure(
                    executor, key, lambda: executor.determinism(candidate, self._grade)
                )
                if not measurement["reached"]:
                    return self._rule_out(
                        state, CandidateCode.NONDETERMINISTIC, f"{self._grade} did not pass: {measurement['reason']}"
                    )
            if constraints.latency_p99 is not None:
                self._report("tail", executor, (candidate.id,))
                limit, runs = constraints.latency_p99, 2 * runs_required(0.99)
                key = f"tail/{candidate.id}"
                measurement = self._measurements.measure(
                    executor, key, lambda: executor.count_slow_runs(candidate, limit, runs, TAIL_SECONDS)
                )
                runs, over = measurement["runs"], measurement["over"]
                if over > 0.01 * runs or runs < runs_required(0.99, beyond=over):
                    share = f"{over} of {runs} runs took longer than {limit:g} s"
                    return self._rule_out(
                        state, CandidateCode.LATENCY, f"its p99 is {measurement['p99']:.4g} s: {share}"
                    )
        except CandidateFailed as failed:
            return self._rule_out(state, failed.code, failed.reason)
        finally:
            executor.close(candidate)
        return True

    def _rule_out(self, state: CandidateState, code: CandidateCode, reason: str) -> bool:
        state.trial = msgspec.structs.replace(state.trial, code=code, reason=reason)
        state.code, state.reason = (CandidateCode.CONTROL, reason) if state.candidate.id == CONTROL else (code, reason)
        return False

    def _duel(self, name: str, family: int) -> Duel:
        """Return the duel of a finalist against the policy that was given; `family` is how many there may be."""
        executor = self._measurements.main_executor
        decide, pair = self._spec.decide, (self._states[CONTROL].candidate, self._states[name].candidate)

        def measured(number: int) -> Sequence[float] | None:
            key = f"duel/{name}/{number}"
            if not self._measurements.due(key, self._spec.budget.time):
                return None
            self._report("duel", executor, (CONTROL, name), number, decide.most_duel_rounds)
            try:
                figures: list[float] = self._measurements.measure(executor, key, lambda: executor.measure_fresh(pair))
            except OutOfTime:
                return None
            return figures

        return Duel(measured, decide, family=family, seed=self._spec.seed)

    def _promising(self, points: Sequence[Point]) -> list[Point]:
        lead = self._states[self._incumbent].estimate if self._incumbent is not None else None
        kept = self._gains.promising(points, lead)
        if len(kept) < len(points):
            self._notes.append(
                f"{len(points) - len(kept)} combinations of settings were left out: the gains of their settings alone "
                "are far from the lead"
            )
        return kept

    def _outcome(self, verdict: str, reason: str, *, winner: str | None = None, gain: Ratio | None = None) -> Outcome:
        if self._measurements.cancelled and verdict != "winner":
            verdict, reason = "undecided", f"it was cancelled: {reason}"
        states = tuple(state.result() for state in self._states.values())
        return Outcome(verdict, reason, winner, gain, states, self._counts, (*self._notes, *self._measurements.notes))


def _candidates(count: int) -> str:
    return "1 candidate was" if count == 1 else f"{count} candidates were"
