# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Stages`: what the stages of a search are made of: rows, trials, races, and measuring through the journal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.tuning.planner import Rejected
from xpuruntime.tuning.race import Failure, Race
from xpuruntime.tuning.records import CONTROL, Candidate, CandidateFailed, Trial
from xpuruntime.tuning.rows import Row, gain_of, left_text
from xpuruntime.tuning.waves import Gains

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xpuruntime.tuning.bench import Bench
    from xpuruntime.tuning.journal import Journal
    from xpuruntime.tuning.planner import Planned
    from xpuruntime.tuning.result import CandidateResult
    from xpuruntime.tuning.space import Space
    from xpuruntime.tuning.spec import TuneSpec

__all__ = ["Stages", "TuneProgress"]


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
        Those that are measured now.
    round, rounds : int
        Of the race or duel, and the most it may have.
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
    bench : Bench
    journal : Journal
    clock : callable
        Seconds that the search has taken; starts at what the journal says.
    grade : str
        The grade of determinism that finalists must pass; ``"none"``: no test.
    kernels : dict of str to sequence of str
        Kernels to try by operation.
    stated : collection of str
        Keys whose values the user states: those are combined whatever they gain alone.
    cancel, progress : callable, optional
    """

    def __init__(
        self,
        spec: TuneSpec,
        space: Space,
        plan: Callable[[Mapping[str, Any]], Planned | Rejected],
        bench: Bench,
        journal: Journal,
        clock: Callable[[], float],
        *,
        grade: str = "none",
        kernels: Mapping[str, Sequence[str]] | None = None,
        stated: Iterable[str] = (),
        cancel: Callable[[], bool] | None = None,
        progress: Callable[[TuneProgress], None] | None = None,
    ) -> None:
        self._spec, self._space, self._plan, self._bench = spec, space, plan, bench
        self._journal, self._clock = journal, clock
        self._grade, self._kernels, self._gains = grade, kernels or {}, Gains(stated)
        self._cancel, self._progress = cancel, progress
        self._rows: dict[str, Row] = {}
        self._gets: dict[str, str] = {}
        self._incumbent: str | None = None
        self._races = self._opened = self._untried = 0
        self._reserve = 0.0
        self._stages = {"planned": 0, "rejected by the plan": 0, "opened": 0, "raced": 0, "finalists": 0}
        self._notes = list(space.notes)
        self._stage = "plan"

    def _new(self, changes: Mapping[str, Any]) -> Row:
        """Plan changes and return the row of the candidate."""
        self._stages["planned"] += 1
        name, planned = self._next(), self._plan(changes)
        if isinstance(planned, Rejected):
            self._stages["rejected by the plan"] += 1
            engine = str(changes.get("execution.engine", ""))
            one = Candidate(id=name, engine=engine, device="", changes=dict(changes), policy={})
            row = Row(one, "infeasible", planned.reason)
            row.trial = Trial(code="infeasible", reason=planned.reason)
        else:
            one = Candidate(
                id=name, engine=planned.engine, device=planned.device, changes=dict(changes),
                policy=planned.policy.to_dict(),
            )  # fmt: skip
            same = self._gets.setdefault(planned.gets, name)
            row = Row(one) if same == name else Row(one, "duplicate", f"the engine gets what it gets for {same}")
            if same != name:
                row.estimate = self._rows[same].estimate
        self._rows[name] = row
        return row

    def _try(self, row: Row) -> bool:
        """Open a candidate and check the constraints; return whether it keeps them."""
        self._stage = "open"
        one = row.candidate
        if row.trial.code is None:
            self._opened += 1
            self._stages["opened"] += 1
            self._report((one.id,))
            key = f"trial/{one.id}"
            found = self._measured(key, lambda: msgspec.to_builtins(self._bench.trial(one)))
            row.trial = msgspec.convert(found, Trial)
        if row.trial.code is not None:
            row.code, row.reason = row.trial.code, row.trial.reason
        return row.trial.code is None

    def _race(self, heat: Sequence[str]) -> None:
        """Race candidates against the incumbent, and keep what came of it."""
        heat = list(heat)
        if heat and self._incumbent is None:
            self._incumbent = heat.pop(0)
            self._rows[self._incumbent].estimate = 1.0
        if not heat:
            return
        assert self._incumbent is not None
        self._stage = "race"
        self._stages["raced"] += len(heat)
        start, self._races = self._incumbent, self._races + 1
        race = Race(start, heat, self._spec.decide, self._spec.seed)
        while not race.done:
            key = f"race/{self._races}/{race.rounds}"
            if not self._due(key, self._deadline):
                break
            before = set(race.live)
            self._report(race.live, race.rounds, self._spec.decide.rounds[1])
            race.add(self._round(key, race.order()))
            for name in before.difference(race.live):
                self._bench.close(self._rows[name].candidate)
        self._settle(race, start)

    def _round(self, key: str, order: Sequence[str]) -> dict[str, float | Failure]:
        def measure() -> dict[str, Any]:
            found: dict[str, Any] = {}
            for name in order:
                try:
                    found[name] = self._bench.turn(self._rows[name].candidate)
                except CandidateFailed as failed:
                    found[name] = [failed.code, failed.reason]
            return found

        figures = self._measured(key, measure)
        return {name: Failure(*one) if isinstance(one, list) else one for name, one in figures.items()}

    def _settle(self, race: Race, start: str) -> None:
        """Take over how a race ended."""
        base = self._rows[start].estimate or 1.0
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
            if name != CONTROL or out.code not in ("slower", "not_faster", "beaten"):
                row.code, row.reason = out.code, out.reason or left_text(out.code, out.against, out.ratio, self._spec)
            self._bench.close(row.candidate)
        for name in race.live[1:]:
            self._bench.close(self._rows[name].candidate)
        self._incumbent = race.incumbent if race.incumbent not in race.out else None

    def _allowed(self, row: Row) -> bool:
        """Whether the budget has room for another candidate. Whatever it says, the candidate has been planned."""
        most = self._spec.budget.candidates
        if self._opened < most and self._due(f"trial/{row.candidate.id}", self._deadline):
            return True
        self._untried += 1
        row.code = "not_tried"
        row.reason = f"budget.candidates allows {most}" if self._opened >= most else "the budget of time was used up"
        return False

    @property
    def _deadline(self) -> float:
        return self._spec.budget.time - self._reserve

    def _due(self, key: str, deadline: float) -> bool:
        """Whether something may be measured: it was before, or there is time left."""
        if self._journal.has(key):
            return True
        return self._clock() < deadline and not (self._cancel is not None and self._cancel())

    def _measured(self, key: str, measure: Callable[[], Any]) -> Any:
        if self._journal.has(key):
            found = self._journal.recall(key)
        else:
            try:
                found = measure()
            except CandidateFailed as failed:
                found = {"failed": [failed.code, failed.reason]}
            found = self._journal.record(key, found, self._clock())
        if isinstance(found, dict) and "failed" in found:
            raise CandidateFailed(*found["failed"])
        return found

    def _next(self) -> str:
        return f"c{len(self._rows)}"

    def _leader(self) -> str | None:
        """Return the incumbent, or the best of those that are undecided where that is the control."""
        open_ = [
            (row.estimate, name)
            for name, row in self._rows.items()
            if row.code == "undecided" and row.estimate is not None and row.estimate < 1
        ]
        return min(open_)[1] if open_ and self._incumbent == CONTROL else self._incumbent

    def _report(self, live: Sequence[str], round: int = 0, rounds: int = 0) -> None:
        if self._progress is not None:
            rows = tuple(row.result() for row in self._rows.values())
            self._progress(
                TuneProgress(self._stage, self._clock(), self._spec.budget.time, rows, tuple(live), round, rounds)
            )
