# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Stages`: what the stages of a search are made of: rows, trials, and heats of races on all devices."""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.files.paths import json_bytes
from xpuruntime.measuring.candidate_codes import CandidateCode
from xpuruntime.tuning.planner import Rejected
from xpuruntime.tuning.race import Failure, Race
from xpuruntime.tuning.records import CONTROL, USED_UP, Candidate, CandidateFailed, OutOfTime, Trial
from xpuruntime.tuning.rows import Row, gain_of, left_text
from xpuruntime.tuning.waves import Gains

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xpuruntime.tuning.bench import Bench
    from xpuruntime.tuning.measurements import Measurements
    from xpuruntime.tuning.planner import Planned
    from xpuruntime.tuning.result import CandidateResult
    from xpuruntime.tuning.space import Setting, Space
    from xpuruntime.tuning.spec import TuneSpec

__all__ = ["Stages", "TuneProgress"]

#: Candidates that are open at once on a device.
_AT_ONCE = 7


class TuneProgress(NamedTuple):
    """Where a search stands.

    Attributes
    ----------
    stage : str
    elapsed, budget : float
        Seconds.
    candidates : tuple of CandidateResult
        Those known so far.
    live : tuple of str
        Those that are measured now, on all devices.
    round, rounds : int
        Of the race or duel that went on last, and the most it may have.
    """

    stage: str
    elapsed: float
    budget: float
    candidates: tuple[CandidateResult, ...]
    live: tuple[str, ...] = ()
    round: int = 0
    rounds: int = 0


class Stages:
    """The parts of one search.

    Parameters
    ----------
    spec : TuneSpec
    space : Space
    plan : callable
        From changed policy keys to `Planned` or `Rejected`.
    measurements : Measurements
    grade : str
        The grade of determinism that finalists must pass; ``"none"``: no test.
    kernels : dict of str to sequence of str
        Kernels to try by operation.
    stated : collection of str
        Keys whose values the user states: those are combined whatever they gain alone.
    progress : callable, optional
    """

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
        self._spec, self._space, self._plan, self._all = spec, space, plan, measurements
        self._grade, self._kernels, self._gains = grade, kernels or {}, Gains(stated)
        self._progress = progress
        self._lock = threading.Lock()
        self._live: dict[Bench, tuple[str, ...]] = {}
        self._rows: dict[str, Row] = {}
        self._gets: dict[str, str] = {}
        self._made: set[frozenset[Setting]] = set()
        self._incumbent: str | None = None
        self._races = self._opened = self._untried = 0
        self._reserve = 0.0
        self._stages = {"planned": 0, "rejected by the plan": 0, "opened": 0, "raced": 0, "finalists": 0}
        self._notes = list(space.notes)
        for bench in measurements.benches:
            bench.left = lambda: spec.budget.time - measurements.clock()

    def _new(self, changes: Mapping[str, Any]) -> Row:
        """Plan changes and return the row of the candidate."""
        self._stages["planned"] += 1
        name, planned = self._next(), self._plan(changes)
        if isinstance(planned, Rejected):
            self._stages["rejected by the plan"] += 1
            engine = str(changes.get("execution.engine", ""))
            one = Candidate(id=name, engine=engine, device="", changes=dict(changes), policy={})
            row = Row(one, CandidateCode.INFEASIBLE, planned.reason)
            row.trial = Trial(code=CandidateCode.INFEASIBLE, reason=planned.reason)
        else:
            one = Candidate(
                id=name, engine=planned.engine, device=planned.device, changes=dict(changes),
                policy=planned.policy.to_dict(),
            )  # fmt: skip
            same = self._gets.setdefault(planned.gets, name)
            row = (
                Row(one)
                if same == name
                else Row(one, CandidateCode.DUPLICATE, f"the engine gets what it gets for {same}")
            )
            if same != name:
                row.estimate = self._rows[same].estimate
        self._rows[name] = row
        return row

    def _try(self, row: Row, bench: Bench) -> bool:
        """Open a candidate and check the constraints; return whether it keeps them."""
        one = row.candidate
        if row.trial.code is None:
            with self._lock:
                self._stages["opened"] += 1
            self._report("open", bench, (one.id,))
            key = f"trial/{one.id}"
            try:
                found = self._all.measured(bench, key, lambda: {"changes": one.changes, "trial": bench.trial(one)})
                _check_same(one, found["changes"])
                row.trial = msgspec.convert(found["trial"], Trial)
            except CandidateFailed as failed:
                row.trial = Trial(code=failed.code, reason=failed.reason)
            except OutOfTime:
                with self._lock:
                    self._stages["opened"] -= 1
                self._not_in_time(row)
                return False
            row.device = self._all.device(key)
        if row.trial.code is not None:
            row.code, row.reason = row.trial.code, row.trial.reason
        return row.trial.code is None

    def _heats(self, rows: Sequence[Row]) -> None:
        """Open candidates and race those that keep the constraints, in heats: one on each device at the same time.

        All heats of a time have the same incumbent, on each device anew. Which candidate is in which heat follows from
        what was measured, and not from which device was quicker.
        """
        waiting = list(rows)
        while waiting:
            benches = self._all.benches if self._incumbent is not None else [self._all.main]
            lanes = [deque(waiting[index :: len(benches)]) for index in range(len(benches))]
            jobs = [
                partial(self._heat, bench, lane, self._races + number)
                for number, (bench, lane) in enumerate(zip(benches, lanes, strict=True), 1)
            ]
            self._races += len(jobs)
            start = self._incumbent
            races = [one for one in self._all.side_by_side(jobs) if one is not None]
            self._settle(races, start)
            left = {row.candidate.id for lane in lanes for row in lane}
            waiting = [row for row in waiting if row.candidate.id in left]

    def _heat(self, bench: Bench, lane: deque[Row], number: int) -> Race | None:
        """Open the next candidates of a device and race those that keep the constraints; ``None`` where none does."""
        heat: list[str] = []
        while lane and len(heat) < _AT_ONCE and bench in self._all.benches:
            row = lane.popleft()
            if self._in_time(row) and self._try(row, bench):
                heat.append(row.candidate.id)
        if bench not in self._all.benches:  # those that were opened there race elsewhere
            lane.extendleft(self._rows[name] for name in reversed(heat))
            return None
        return self._race(bench, number, self._incumbent, heat)

    def _race(self, bench: Bench, number: int, incumbent: str | None, heat: Sequence[str]) -> Race | None:
        """Race candidates against the incumbent, or the first of them where there is none."""
        if not heat:
            return None
        start, *heat = heat if incumbent is None else (incumbent, *heat)
        if heat:
            with self._lock:
                self._stages["raced"] += len(heat)
        race = Race(start, heat, self._spec.decide, self._spec.seed)
        while not race.done:
            key = f"race/{number}/{race.rounds}"
            if not self._all.due(key, self._deadline):
                break
            before = set(race.live)
            self._report("race", bench, race.live, race.rounds, self._spec.decide.rounds[1])
            found = self._round(bench, key, race)
            if found is None:
                break
            race.add(found)
            for name in heat:
                self._rows[name].device = self._all.device(key)
            for name in before.difference(race.live):
                bench.close(self._rows[name].candidate)
        for name in race.figures:
            if name != race.incumbent:
                bench.close(self._rows[name].candidate)
        return race

    def _round(self, bench: Bench, key: str, race: Race) -> dict[str, float | Failure] | None:
        """Measure a round; ``None`` where the budget ended meanwhile."""

        def measure() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for name in race.order():
                try:
                    found[name] = bench.turn(self._rows[name].candidate)
                except CandidateFailed as failed:
                    found[name] = [failed.code, failed.reason]
            return {"figures": found}

        try:
            figures = self._all.measured(bench, key, measure)["figures"]
        except CandidateFailed as lost:  # twice, with its device: the incumbent has one elsewhere
            return {name: Failure(lost.code, lost.reason) for name in race.live[1:]}
        except OutOfTime:
            return None
        return {name: Failure(*one) if isinstance(one, list) else one for name, one in figures.items()}

    def _settle(self, races: Sequence[Race], start: str | None) -> None:
        """Take over how the heats of a time ended. Those that beat the incumbent on several devices race once more."""
        self._live.clear()
        for race in races:
            self._take(race)
        if not races:
            return
        failed = [
            race for race in races if race.start in race.out and race.out[race.start].code != CandidateCode.BEATEN
        ]
        ahead = [race.incumbent for race in races if race.incumbent != start and race.incumbent not in race.out]
        if len(ahead) > 1:
            ahead.sort(key=lambda name: self._rows[name].estimate or math.inf)
            self._races += 1
            final = self._race(self._all.main, self._races, ahead[0], ahead[1:])
            assert final is not None
            self._take(final)
            ahead = [final.incumbent] if final.incumbent not in final.out else []
        self._incumbent = ahead[0] if ahead else None if failed else start

    def _take(self, race: Race) -> None:
        """Take over how a race ended."""
        start = race.start
        base = self._rows[start].estimate or 1.0
        self._rows[start].estimate = base
        for name, figures in race.figures.items():
            row = self._rows[name]
            row.figures += [one for one in figures if one is not None]
            ratio = race.ratio(name, start)
            if name != start and ratio is not None:
                row.estimate = base * ratio.ratio
            out = race.out.get(name)
            if out is None and name != race.incumbent:
                found = race.ratio(name, race.incumbent)
                row.gain = gain_of(found, race.incumbent, race.rounds)
                row.reason = f"undecided after {race.rounds} rounds against {race.incumbent}"
            if name == race.incumbent and name != start:
                row.gain = gain_of(ratio, start, race.rounds)
            if out is None:
                continue
            row.gain = gain_of(out.ratio, out.against, out.rounds)
            if name != CONTROL or out.code not in (
                CandidateCode.SLOWER,
                CandidateCode.NOT_FASTER,
                CandidateCode.BEATEN,
            ):
                row.code, row.reason = out.code, out.reason or left_text(out.code, out.against, out.ratio, self._spec)

    def _room(self, row: Row) -> bool:
        """Whether the budget has room for another candidate. Whatever it says, the candidate has been planned."""
        most = self._spec.budget.candidates
        if self._opened < most:
            self._opened += 1
            return True
        self._untried += 1
        row.code, row.reason = CandidateCode.NOT_TRIED, f"budget.candidates allows {most}"
        return False

    def _in_time(self, row: Row) -> bool:
        """Whether there is time for a candidate."""
        if self._all.due(f"trial/{row.candidate.id}", self._deadline):
            return True
        self._not_in_time(row)
        return False

    def _not_in_time(self, row: Row) -> None:
        with self._lock:
            self._untried += 1
        row.code, row.reason = CandidateCode.NOT_TRIED, USED_UP

    @property
    def _deadline(self) -> float:
        return self._spec.budget.time - self._reserve

    def _next(self) -> str:
        return f"c{len(self._rows)}"

    def _leader(self) -> str | None:
        """Return the incumbent, or the best of those that are undecided where that is the control."""
        open_ = [
            (row.estimate, name)
            for name, row in self._rows.items()
            if row.code == CandidateCode.UNDECIDED and row.estimate is not None and row.estimate < 1
        ]
        return min(open_)[1] if open_ and self._incumbent == CONTROL else self._incumbent

    def _report(self, stage: str, bench: Bench, live: Sequence[str], round: int = 0, rounds: int = 0) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._live[bench] = tuple(live)
            now = tuple(dict.fromkeys(name for names in self._live.values() for name in names))
            rows = tuple(row.result() for row in self._rows.values())
            self._progress(TuneProgress(stage, self._all.clock(), self._spec.budget.time, rows, now, round, rounds))


def _check_same(one: Candidate, recorded: dict[str, Any]) -> None:
    """Refuse the trial of another candidate: decisions would then differ from those that the journal is of."""
    if recorded != json.loads(json_bytes(one.changes)):
        raise InputError(
            f"the journal has {one.id} with {recorded}, and this search has it with {one.changes}. Fix: remove the "
            "journal and start again"
        )
