# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TrialScheduler`: opens candidates and races them in heats, on all devices of a search."""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.files.paths import json_bytes
from xpuruntime.measuring.statistics import CandidateCode, runs_required
from xpuruntime.tuning.race import Failure, Race, SettingGains
from xpuruntime.tuning.space import CandidateState, Planned, Point, Rejected, Setting, Space, exit_text, gain_from_ratio
from xpuruntime.tuning.trial import CONTROL, USED_UP, Candidate, CandidateFailed, Measurements, OutOfTime, Trial
from xpuruntime.tuning.tune_result import TuneProgress

if TYPE_CHECKING:
    from xpuruntime.tuning.spec.tune_spec import TuneSpec
    from xpuruntime.tuning.trial_executors import Executor

#: Candidates that are open at once on a device.
_AT_ONCE = 7
#: Share of the budget that may be kept back for the decision.
_RESERVE = 0.5
#: Seconds for the runs that a 99th percentile is claimed from.
TAIL_SECONDS = 30.0
#: Trials that tests of a grade of determinism of control and finalist are taken to last as long as.
_TESTS = 4


class TrialScheduler:
    """Plans candidates, opens them and races them, within the budget; `Search` decides which."""

    def __init__(
        self,
        spec: TuneSpec,
        space: Space,
        plan: Callable[[Mapping[str, Any]], Planned | Rejected],
        measurements: Measurements,
        *,
        grade: str = "none",
        kernels: Mapping[str, Sequence[str]] | None = None,
        stated: Iterable[str] = (),
        progress: Callable[[TuneProgress], None] | None = None,
    ) -> None:
        self._spec, self._space, self._plan, self._measurements = spec, space, plan, measurements
        first = [
            (engine, tunable.key)
            for engine, tunables in space.tunables.items()
            for tunable in tunables
            if tunable.first
        ]
        self._grade, self._kernels, self._gains = grade, kernels or {}, SettingGains(stated, first)
        self._progress = progress
        self._lock = threading.Lock()
        self._live: dict[Executor, tuple[str, ...]] = {}
        self._states: dict[str, CandidateState] = {}
        self._by_settings: dict[str, str] = {}
        self._points: dict[str, Point] = {}
        self._tried_settings: set[frozenset[Setting]] = set()
        self._incumbent: str | None = None
        self._races = self._opened = self._untried = 0
        self._reserve, self._kernel_reserve = 0.0, 0.0
        self._counts = {"planned": 0, "rejected by the plan": 0, "opened": 0, "raced": 0, "finalists": 0}
        self._notes = list(space.notes)
        for executor in measurements.executors:
            executor.time_left = lambda: self._deadline - measurements.clock()

    def _add_candidate(self, changes: Mapping[str, Any]) -> CandidateState:
        self._counts["planned"] += 1
        name, planned = self._next_id(), self._plan(changes)
        if isinstance(planned, Rejected):
            self._counts["rejected by the plan"] += 1
            engine = str(changes.get("execution.engine", ""))
            candidate = Candidate(id=name, engine=engine, device="", changes=dict(changes), policy={})
            state = CandidateState(candidate, CandidateCode.INFEASIBLE, planned.reason)
            state.trial = Trial(code=CandidateCode.INFEASIBLE, reason=planned.reason)
        else:
            candidate = Candidate(
                id=name, engine=planned.engine, device=planned.device, changes=dict(changes),
                policy=planned.policy.to_dict(),
            )  # fmt: skip
            same = self._by_settings.setdefault(planned.settings_digest, name)
            state = (
                CandidateState(candidate)
                if same == name
                else CandidateState(candidate, CandidateCode.DUPLICATE, f"the engine gets what it gets for {same}")
            )
            if same != name:
                state.estimate = self._states[same].estimate
        self._states[name] = state
        return state

    def _open(self, state: CandidateState, executor: Executor) -> bool:
        """Open a candidate and check the constraints; return whether it keeps them."""
        candidate = state.candidate
        if state.trial.code is None:
            with self._lock:
                self._counts["opened"] += 1
            self._report("open", executor, (candidate.id,))
            key = state.trial_key
            try:
                measurement = self._measurements.measure(
                    executor, key, lambda: {"changes": candidate.changes, "trial": executor.trial(candidate)}
                )
                _check_same(candidate, measurement["changes"])
                state.trial = msgspec.convert(measurement["trial"], Trial)
            except CandidateFailed as failed:
                state.trial = Trial(code=failed.code, reason=failed.reason)
            except OutOfTime:
                with self._lock:
                    self._counts["opened"] -= 1
                self._skip_for_time(state)
                return False
            state.device = self._measurements.device(key)
        if state.trial.code is not None:
            state.code, state.reason = state.trial.code, state.trial.reason
        return state.trial.code is None

    def _run_heats(self, states: Sequence[CandidateState]) -> None:
        """Open candidates and race those that keep the constraints, in heats: one on each device at the same time."""
        # All heats of a time have the same incumbent, on each device anew. Which candidate is in which heat follows
        # from what was measured, and not from which device was quicker.
        waiting = list(states)
        while waiting:
            executors = (
                self._measurements.executors if self._incumbent is not None else [self._measurements.main_executor]
            )
            lanes = [deque(waiting[index :: len(executors)]) for index in range(len(executors))]
            jobs = [
                partial(self._run_heat, executor, lane, self._races + number)
                for number, (executor, lane) in enumerate(zip(executors, lanes, strict=True), 1)
            ]
            self._races += len(jobs)
            start = self._incumbent
            races = [race for race in self._measurements.run_in_parallel(jobs) if race is not None]
            self._merge_races(races, start)
            left = {state.candidate.id for lane in lanes for state in lane}
            waiting = [state for state in waiting if state.candidate.id in left]

    def _run_heat(self, executor: Executor, lane: deque[CandidateState], number: int) -> Race | None:
        """Open the next candidates of a device and race those that keep the constraints; ``None`` where none does."""
        heat: list[str] = []
        while lane and len(heat) < _AT_ONCE and executor in self._measurements.executors:
            state = lane.popleft()
            if self._has_time(state) and self._open(state, executor):
                heat.append(state.candidate.id)
        if executor not in self._measurements.executors:  # those that were opened there race elsewhere
            lane.extendleft(self._states[name] for name in reversed(heat))
            return None
        return self._race(executor, number, self._incumbent, heat)

    def _race(self, executor: Executor, number: int, incumbent: str | None, heat: Sequence[str]) -> Race | None:
        if not heat:
            return None
        start, *heat = heat if incumbent is None else (incumbent, *heat)
        if heat:
            with self._lock:
                self._counts["raced"] += len(heat)
        race = Race(start, heat, self._spec.decide, self._spec.seed)
        while not race.done:
            key = f"race/{number}/{race.rounds}"
            if not self._measurements.due(key, self._deadline):
                break
            before = set(race.live)
            self._report("race", executor, race.live, race.rounds, self._spec.decide.rounds[1])
            figures = self._round(executor, key, race)
            if figures is None:
                break
            race.add(figures)
            for name in heat:
                self._states[name].device = self._measurements.device(key)
            for name in before.difference(race.live):
                executor.close(self._states[name].candidate)
        for name in race.figures:
            if name != race.incumbent:
                executor.close(self._states[name].candidate)
        return race

    def _round(self, executor: Executor, key: str, race: Race) -> dict[str, float | Failure] | None:
        """Measure a round; ``None`` where the budget ended meanwhile."""

        def measure() -> dict[str, Any]:
            codes: dict[str, Any] = {}
            for name in race.order():
                try:
                    codes[name] = executor.turn(self._states[name].candidate)
                except CandidateFailed as failed:
                    codes[name] = [failed.code, failed.reason]
            return {"figures": codes}

        try:
            figures = self._measurements.measure(executor, key, measure)["figures"]
        except CandidateFailed as lost:  # twice, with its device: the incumbent has one elsewhere
            return {name: Failure(lost.code, lost.reason) for name in race.live[1:]}
        except OutOfTime:
            return None
        return {name: Failure(*figure) if isinstance(figure, list) else figure for name, figure in figures.items()}

    def _merge_races(self, races: Sequence[Race], start: str | None) -> None:
        """Take over how the heats of a time ended. Those that beat the incumbent on several devices race once more."""
        self._live.clear()
        for race in races:
            self._record_race(race)
        if not races:
            return
        failed = [
            race for race in races if race.start in race.exits and race.exits[race.start].code != CandidateCode.BEATEN
        ]
        ahead = [race.incumbent for race in races if race.incumbent != start and race.incumbent not in race.exits]
        if len(ahead) > 1:
            ahead.sort(key=lambda name: self._states[name].estimate or math.inf)
            self._races += 1
            final = self._race(self._measurements.main_executor, self._races, ahead[0], ahead[1:])
            assert final is not None
            self._record_race(final)
            ahead = [final.incumbent] if final.incumbent not in final.exits else []
        self._incumbent = ahead[0] if ahead else None if failed else start
        self._update_reserve()

    def _record_race(self, race: Race) -> None:
        start = race.start
        base = self._states[start].estimate or 1.0
        self._states[start].estimate = base
        for name, figures in race.figures.items():
            state = self._states[name]
            state.figures += [figure for figure in figures if figure is not None]
            ratio = race.ratio(name, start)
            if name != start and ratio is not None:
                state.estimate = base * ratio.ratio
            out = race.exits.get(name)
            if out is None and name != race.incumbent:
                gained = race.ratio(name, race.incumbent)
                state.gain = gain_from_ratio(gained, race.incumbent, race.rounds)
                state.reason = f"undecided after {race.rounds} rounds against {race.incumbent}"
            if name == race.incumbent and name != start:
                state.gain = gain_from_ratio(ratio, start, race.rounds)
            if out is None:
                continue
            state.gain = gain_from_ratio(out.ratio, out.against, out.rounds)
            if name != CONTROL or out.code not in (
                CandidateCode.SLOWER,
                CandidateCode.NOT_FASTER,
                CandidateCode.BEATEN,
            ):
                state.code, state.reason = (
                    out.code,
                    out.reason or exit_text(out.code, out.against, out.ratio, self._spec),
                )

    def _admit(self, state: CandidateState) -> bool:
        """Whether the budget has room for another candidate. Whatever it says, the candidate has been planned."""
        most = self._spec.budget.candidates
        if self._opened < most:
            self._opened += 1
            return True
        self._untried += 1
        state.code, state.reason = CandidateCode.NOT_TRIED, f"budget.candidates allows {most}"
        return False

    def _has_time(self, state: CandidateState) -> bool:
        if self._measurements.due(state.trial_key, self._deadline):
            return True
        self._skip_for_time(state)
        return False

    def _skip_for_time(self, state: CandidateState) -> None:
        with self._lock:
            self._untried += 1
        state.code, state.reason = CandidateCode.NOT_TRIED, USED_UP

    def _skipped_for_time(self) -> list[CandidateState]:
        return [
            state for state in self._states.values() if (state.code, state.reason) == (CandidateCode.NOT_TRIED, USED_UP)
        ]

    def _run_skipped(self) -> None:
        """Try candidates that were skipped, while nothing leads for which time must be kept back."""
        while self._leader() in (None, CONTROL):
            self._reserve = 0.0
            heat = [state for state in self._skipped_for_time() if not state.late][:_AT_ONCE]
            for state in heat:
                state.code, state.reason, state.late = CandidateCode.UNDECIDED, "", True
            self._untried -= len(heat)
            self._run_heats(heat)
            if all(state.code == CandidateCode.NOT_TRIED for state in heat):
                return

    def _update_reserve(self) -> None:
        """Keep back what the decision on the leader takes: the control and it are opened anew for each round."""
        control, spec = self._states[CONTROL].trial, self._spec
        if control.code is not None:
            return
        leader = self._leader()
        seconds = max(control.seconds, self._states[leader].trial.seconds if leader is not None else 0.0)
        needed = spec.decide.duel_looks(1)[0] * (2.5 * seconds + 0.2) + (
            _TESTS * seconds if self._grade != "none" else 0.0
        )
        if spec.constraints.latency_p99 is not None:
            needed += 2 * min(TAIL_SECONDS, 2 * runs_required(0.99) * (control.run or 0.0))
        self._reserve = min(_RESERVE * spec.budget.time, needed)

    @property
    def _deadline(self) -> float:
        return self._spec.budget.time - self._reserve - self._kernel_reserve

    def _next_id(self) -> str:
        return f"c{len(self._states)}"

    def _leader(self) -> str | None:
        open_ = [
            (state.estimate, name)
            for name, state in self._states.items()
            if state.code == CandidateCode.UNDECIDED and state.estimate is not None and state.estimate < 1
        ]
        return min(open_)[1] if open_ and self._incumbent == CONTROL else self._incumbent

    def _report(self, stage: str, executor: Executor, live: Sequence[str], round: int = 0, rounds: int = 0) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._live[executor] = tuple(live)
            now = tuple(dict.fromkeys(name for names in self._live.values() for name in names))
            results = tuple(state.result() for state in self._states.values())
            self._progress(
                TuneProgress(stage, self._measurements.clock(), self._spec.budget.time, results, now, round, rounds)
            )


def _check_same(candidate: Candidate, recorded: dict[str, Any]) -> None:
    """Refuse the trial of another candidate: decisions would then differ from those that the journal is of."""
    if recorded != json.loads(json_bytes(candidate.changes)):
        raise InputError(
            f"the journal has {candidate.id} with {recorded}, and this search has it with {candidate.changes}. "
            "Fix: remove the journal and start again"
        )
