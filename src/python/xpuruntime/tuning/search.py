# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Search`: plan, trial, race, kernels, determinism and final duel, each on what is left of the one before.

All that is measured goes through the journal by its key, and all decisions follow from what was measured: a search that
is resumed makes the same ones without measuring again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.measuring.statistics import look_rounds, runs_required
from xpuruntime.tuning.duel import Duelled, duel
from xpuruntime.tuning.planner import Rejected
from xpuruntime.tuning.race import Failure, Race
from xpuruntime.tuning.records import CONTROL, Candidate, CandidateFailed, Code, Trial
from xpuruntime.tuning.result import CandidateResult, Ratio
from xpuruntime.tuning.rows import FINAL, Row, gain_of, left_text, share_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from xpuruntime.tuning.bench import Bench
    from xpuruntime.tuning.journal import Journal
    from xpuruntime.tuning.planner import Planned
    from xpuruntime.tuning.space import Point, Setting, Space
    from xpuruntime.tuning.spec import TuneSpec

__all__ = ["Outcome", "Search", "TuneProgress"]

#: Candidates that are open at once; a gain of a setting alone from which it is combined with others; a loss that bars.
_AT_ONCE, _PROMISING, _BARRED = 7, 0.99, 1.10
#: Predicted ratio to the lead above which a combination of settings is left out.
_HOPELESS = 1.25
#: Candidates that are planned at most.
_MOST_ROWS = 2000
#: Finalists that are duelled at most; share of the budget that the final duel may keep back.
_FINALISTS, _RESERVE = 4, 0.5
#: Share of time from which the kernels of an operation are searched.
_LEAST_SHARE = 0.01
#: Seconds for the runs that a 99th percentile is claimed from.
_TAIL_SECONDS = 30.0


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


class Outcome(NamedTuple):
    """What a search decided."""

    verdict: str
    reason: str
    winner: str | None
    gain: Ratio | None
    candidates: tuple[CandidateResult, ...]
    stages: dict[str, int]
    notes: tuple[str, ...]


class Search:
    """One search.

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
        self._grade, self._kernels, self._stated = grade, kernels or {}, frozenset(stated)
        self._cancel, self._progress = cancel, progress
        self._rows: dict[str, Row] = {}
        self._gets: dict[str, str] = {}
        self._single: dict[Setting, Row] = {}
        self._default: dict[str, Row] = {}
        self._incumbent: str | None = None
        self._races = self._opened = self._untried = 0
        self._reserve = 0.0
        self._stages = {"planned": 0, "rejected by the plan": 0, "opened": 0, "raced": 0, "finalists": 0}
        self._notes = list(space.notes)
        self._stage = "plan"

    # --- the stages -------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run all stages and decide."""
        self._control()
        for size in range(self._space.waves):
            self._wave(size)
        self._race_kernels()
        return self._decide()

    def _control(self) -> None:
        """Open the user's own policy, which every gain is measured against."""
        row = self._new({})
        row.code = "control"
        row.reason = "the policy that was given"
        if row.trial.code is None and self._try(row):
            self._bench.pace(row.trial.run)
            self._incumbent, row.estimate = row.candidate.id, 1.0
            looks = look_rounds(*self._spec.decide.rounds, confidence=self._spec.decide.confidence)
            pair = 2.5 * row.trial.seconds + 0.2
            self._reserve = min(_RESERVE * self._spec.budget.time, looks[0] * pair)
        else:
            self._notes.append(f"the policy that was given does not keep the constraints: {row.reason}")

    def _wave(self, size: int) -> None:
        points = list(self._space.wave(size, self._barred() if size > 1 else frozenset()))
        points = [one for one in points if size == 0 or self._default[one.engine].code != "infeasible"]
        if size > 1:
            points = self._promising(points)
        if size > 0:
            points.sort(key=self._promise)
        heat: list[str] = []
        for point in points:
            row = self._point(point, size) if len(self._rows) < _MOST_ROWS else None
            self._untried += len(self._rows) >= _MOST_ROWS
            if row is not None and self._allowed(row) and self._try(row):
                heat.append(row.candidate.id)
            if len(heat) == _AT_ONCE:
                self._race(heat)
                heat = []
        self._race(heat)

    def _allowed(self, row: Row) -> bool:
        """Whether the budget has room for another candidate. Whatever it says, the candidate has been planned."""
        most = self._spec.budget.candidates
        if self._opened < most and self._due(f"trial/{row.candidate.id}", self._deadline):
            return True
        self._untried += 1
        row.code = "not_tried"
        row.reason = f"budget.candidates allows {most}" if self._opened >= most else "the budget of time was used up"
        return False

    def _point(self, point: Point, size: int) -> Row | None:
        """Plan a point; ``None`` where it is rejected, or gets what another gets."""
        row = self._new(point.changes)
        if size == 0:
            self._default[point.engine] = row
        elif size == 1:
            self._single[point.settings[0]] = row
        return row if row.code == "undecided" else None

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
        """Open a candidate and hold it against the constraints; whether it keeps them."""
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

    def _race_kernels(self) -> None:
        """Try kernels of the leader, an operation at a time, those that take most time first."""
        leader = self._leader()
        if leader is None or not self._kernels or not self._due("shares", self._deadline):
            return
        self._stage = "kernels"
        row = self._rows[leader]
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
        try:
            shares = self._measured("shares", lambda: self._bench.shares(row.candidate))
        except CandidateFailed as failed:
            self._notes.append(f"kernels were not searched: {failed.reason}")
            return
        for op in sorted(choices, key=lambda one: -share_of(one, shares)):
            if share_of(op, shares) < _LEAST_SHARE:
                continue
            changes = self._rows[self._leader() or leader].candidate.changes
            rows = [self._new({**changes, f"kernels.{op}": name}) for name in choices[op]]
            mine = [one for one in rows if one.code == "undecided" and self._allowed(one) and self._try(one)]
            self._race([one.candidate.id for one in mine])

    def _with_kernel(self, row: Row, op: str, name: str) -> Planned | Rejected:
        return self._plan({**row.candidate.changes, f"kernels.{op}": name})

    # --- the decision -----------------------------------------------------------------------------------------------

    def _decide(self) -> Outcome:
        control = self._rows[CONTROL]
        kept = control.trial.code is None and self._keeps(control)
        ranked = self._ranked(kept=kept)
        open_ = sum(self._rows[name].code == "undecided" for name in ranked)
        family, duels, first, undecided = min(max(open_, 1), _FINALISTS), 0, None, ""
        for name in ranked:
            row = self._rows[name]
            if duels and row.code != "undecided":
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
                undecided = undecided or f"{name} led, and the final duel did not decide: {ended}"
            elif failed is not None:
                row.code, row.reason = failed, f"in the final duel, {ended}"
            else:
                row.code, row.reason = "not_faster", "it did not keep its lead in the final duel"
        if not kept:
            return self._outcome("none", "no candidate keeps the constraints")
        return self._outcome("undecided", undecided, gain=first) if undecided else self._no_better(first)

    def _no_better(self, gain: Ratio | None = None) -> Outcome:
        open_ = [name for name, row in self._rows.items() if row.code == "undecided"]
        if self._untried and self._deadline <= self._clock():
            reason = f"nothing that was tried is better, and {self._untried} candidates were not tried in the budget"
            return self._outcome("undecided", reason, gain=gain)
        if open_:
            reason = f"nothing is proven to be better, and {', '.join(open_[:5])} could still be, by little"
            return self._outcome("undecided", reason, gain=gain)
        if self._untried:
            self._notes.append(f"{self._untried} candidates were not tried: budget.candidates allows no more")
        effect = f"{self._spec.decide.min_effect:.3g}"
        return self._outcome("tied", f"no candidate is better than the policy given by a share of {effect}", gain=gain)

    def _won(self, name: str, reason: str, gain: Ratio | None) -> Outcome:
        row = self._rows[name]
        row.code, row.reason, row.gain = "winner", reason, gain or row.gain
        return self._outcome("winner", reason, winner=name, gain=gain)

    def _ranked(self, *, kept: bool) -> list[str]:
        """Return the candidates that may be finalists, the best first.

        Where the policy that was given is kept, those are the ones that may be better than it.
        """
        codes = ("undecided",) if kept and self._incumbent == CONTROL else FINAL
        ranked = [
            (row.estimate, name)
            for name, row in self._rows.items()
            if name != CONTROL and row.estimate is not None and row.trial.code is None and row.code in codes
        ]
        return [name for estimate, name in sorted(ranked) if not kept or estimate < 1]

    def _keeps(self, row: Row) -> bool:
        """Test determinism and the 99th percentile."""
        one, constraints = row.candidate, self._spec.constraints
        try:
            if self._grade != "none":
                self._stage = "determinism"
                self._report((one.id,))
                found = self._measured(f"determinism/{one.id}", lambda: self._bench.determinism(one, self._grade))
                if not found["reached"]:
                    return self._fails(row, "nondeterministic", f"{self._grade} did not pass: {found['reason']}")
            if constraints.latency_p99 is not None:
                self._stage = "tail"
                limit, runs = constraints.latency_p99, runs_required(0.99)
                found = self._measured(f"tail/{one.id}", lambda: self._bench.tail(one, limit, 2 * runs, _TAIL_SECONDS))
                runs, over = found["runs"], found["over"]
                if over > 0.01 * runs or runs < runs_required(0.99, beyond=over):
                    share = f"{over} of {runs} runs took longer than {limit:g} s"
                    return self._fails(row, "latency", f"its p99 is {found['p99']:.4g} s: {share}")
        except CandidateFailed as failed:
            return self._fails(row, failed.code, failed.reason)
        finally:
            self._bench.close(one)
        return True

    def _fails(self, row: Row, code: Code, reason: str) -> bool:
        row.trial = msgspec.structs.replace(row.trial, code=code, reason=reason)
        row.code, row.reason = ("control", reason) if row.candidate.id == CONTROL else (code, reason)
        return False

    def _duel(self, name: str, family: int) -> Duelled:
        """Race a finalist against the policy that was given; `family` is how many such duels there may be."""
        self._stage = "duel"
        decide, pair = self._spec.decide, (self._rows[CONTROL].candidate, self._rows[name].candidate)

        def measured(number: int) -> Sequence[float] | None:
            key = f"duel/{name}/{number}"
            if not self._due(key, self._spec.budget.time):
                return None
            self._report((CONTROL, name), number, decide.rounds[1])
            figures: list[float] = self._measured(key, lambda: self._bench.fresh(pair))
            return figures

        return duel(measured, decide, family=family, seed=self._spec.seed)

    # --- what all of them share -------------------------------------------------------------------------------------

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

    def _barred(self) -> frozenset[Setting]:
        """Return the settings that later waves leave out: they failed or lost alone, or gained nothing."""
        found = set()
        for setting, row in self._single.items():
            default = self._default.get(setting.engine)
            base = None if default is None else default.estimate
            if row.trial.code is not None or row.code == "duplicate":
                found.add(setting)
            elif row.estimate is not None and base is not None:
                ratio = row.estimate / base
                if ratio > _BARRED or (ratio > _PROMISING and setting.key not in self._stated):
                    found.add(setting)
        return frozenset(found)

    def _promise(self, point: Point) -> float:
        """Return the estimated ratio to the control if the gains of its settings multiply."""
        default = self._default.get(point.engine)
        base = default.estimate if default is not None and default.estimate else 1.0
        total = base
        for setting in point.settings:
            row = self._single.get(setting)
            if row is not None and row.estimate:
                total *= row.estimate / base
        return total

    def _promising(self, points: Sequence[Point]) -> list[Point]:
        """Return the points that may still win if the gains of their settings multiply."""
        lead = self._rows[self._incumbent].estimate if self._incumbent is not None else None
        kept = [point for point in points if lead is None or self._promise(point) <= _HOPELESS * lead]
        if len(kept) < len(points):
            self._notes.append(
                f"{len(points) - len(kept)} combinations of settings were left out: the gains of their settings alone "
                "are far from the lead"
            )
        return kept

    def _report(self, live: Sequence[str], round: int = 0, rounds: int = 0) -> None:
        if self._progress is not None:
            rows = tuple(row.result() for row in self._rows.values())
            self._progress(
                TuneProgress(self._stage, self._clock(), self._spec.budget.time, rows, tuple(live), round, rounds)
            )

    def _outcome(self, verdict: str, reason: str, *, winner: str | None = None, gain: Ratio | None = None) -> Outcome:
        if self._cancel is not None and self._cancel() and verdict != "winner":
            verdict, reason = "undecided", f"it was cancelled: {reason}"
        rows = tuple(row.result() for row in self._rows.values())
        return Outcome(verdict, reason, winner, gain, rows, self._stages, tuple(self._notes))
