# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`determinism`: the grades of determinism of a session, tested one after the other on the engine that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.argument_types import ARRAYS, COUNT, COUNTS, FLAG, TEXT, check_types
from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.evidence.determinism import DeterminismTests, GradeTest
from xpuruntime.evidence.tolerances import differing, kept
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.locks.determinism import grades
from xpuruntime.locks.determinism.grades import (
    Batch,
    find_batch,
    fresh_job,
    locate,
    other_inputs,
    run_fresh,
    why_not_fresh,
)
from xpuruntime.policies.execution_policy import DETERMINISM_GRADES, Determinism
from xpuruntime.printable import error_line
from xpuruntime.runtime.telemetry import log_step
from xpuruntime.runtime.worker import FailureKind, WorkerFailure

if TYPE_CHECKING:
    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.inference import InferenceSession
    from xpuruntime.inference.session_arguments import ModelLike, PolicyLike
    from xpuruntime.locks.determinism.grades import Mismatch, Run, TrialResult
    from xpuruntime.policies import ExecutionPolicy
    from xpuruntime.runtime.machine import Machine

    Array = np.ndarray[Any, Any]

_GRADES = DETERMINISM_GRADES[1:]


def determinism(
    model: ModelLike,
    grade: Determinism | None = None,
    policy: PolicyLike | None = None,
    *,
    device: str | None = None,
    engine: str | Sequence[str] | None = None,
    exec_policy: ExecutionPolicy | None = None,
    inputs: Mapping[str, Any] | None = None,
    trials: int = 20,
    processes: int = 3,
    batch_sizes: Sequence[int] | None = None,
    batch_dimension: str | None = None,
    calibration: Any = None,
    precision: Any = None,
    trust: bool = False,
    registry: EngineRegistry | None = None,
    machine: Machine | None = None,
) -> DeterminismTests:
    """Test how far the results of a model repeat bit for bit.

    Parameters
    ----------
    model : str, path or torch.nn.Module
        As for `InferenceSession`, as are `device`, `engine`, `exec_policy`, `policy`, `calibration`, `precision`,
        `trust`, `registry` and `machine`.
    grade : str, optional
        The highest grade to test; default: the one that the policy states, else all. It is what is asked for.
    inputs : mapping of str to array, optional
        As for a run; the rows of batches are made of them. Left out, probe inputs are made.
    trials : int
        Runs that are compared in each test.
    processes : int
        Fresh processes that are started for ``restart``.
    batch_sizes : sequence of int, optional
        Sizes of batches whose rows are compared with rows alone; default: 2, 3, 4, 8 and 16, as far as the policy
        allows them.
    batch_dimension : str, optional
        Name of the batch dimension; default: the first dimension of the inputs, where that is open.

    Returns
    -------
    DeterminismTests
        A grade is not tested where one below it failed.

    Raises
    ------
    XpuRuntimeError
        As `InferenceSession` and its `run`.

    Examples
    --------
    >>> import xpuruntime as xrt
    >>> found = xrt.determinism(xrt.demo_model_path(), grade="concurrency", device="cpu")
    >>> found.observed
    'concurrency'
    """
    from xpuruntime.inference import InferenceSession

    with InferenceSession(
        model,
        policy,
        device=device,
        engine=engine,
        exec_policy=exec_policy,
        precision=precision,
        calibration=calibration,
        trust=trust,
        registry=registry,
        machine=machine,
    ) as session:
        return session_determinism(
            session,
            grade,
            inputs=inputs,
            trials=trials,
            processes=processes,
            batch_sizes=batch_sizes,
            batch_dimension=batch_dimension,
            trust=trust,
        )


def session_determinism(
    session: InferenceSession,
    grade: Determinism | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
    trials: int = 20,
    processes: int = 3,
    batch_sizes: Sequence[int] | None = None,
    batch_dimension: str | None = None,
    trust: bool = False,
) -> DeterminismTests:
    """Test an open session; parameters, result and errors are those of `determinism`.

    The session keeps the result as `InferenceSession.determinism_tests`, and its reports show it from then on.
    """
    types = {
        "inputs": ARRAYS, "trials": COUNT, "processes": COUNT, "batch_sizes": COUNTS, "batch_dimension": TEXT,
        "trust": FLAG, "grade": TEXT,
    }  # fmt: skip
    check_types(types, locals(), optional=("inputs", "batch_sizes", "batch_dimension", "grade"))
    if trials < 1:
        raise InputError(f"trials must be at least 1, got {trials}")
    if processes < 1:
        raise InputError(f"processes must be at least 1, got {processes}")
    wanted = grade if grade is not None else session.policy.execution.determinism
    if wanted not in DETERMINISM_GRADES:
        raise InputError(
            f"{wanted!r} is not a grade of determinism; the grades are {', '.join(_GRADES)}. Fix: state one"
        )
    last = _GRADES[-1] if wanted == "none" else wanted
    testing = _Testing(session, inputs, (trials, processes), batch_sizes, batch_dimension, trust=trust)
    from xpuruntime.engines.precision import probing

    with probing(session.model, testing.feeds, generated=inputs is None):
        session.determinism_tests = testing.run(wanted, last)
    return session.determinism_tests


class _Testing:
    def __init__(
        self,
        session: InferenceSession,
        inputs: Mapping[str, Any] | None,
        counts: tuple[int, int],
        sizes: Sequence[int] | None,
        dimension: str | None,
        *,
        trust: bool,
    ) -> None:
        from xpuruntime.engines.cuda_arrays import host_copies
        from xpuruntime.engines.precision import probe_feeds

        self.session, self.trust = session, trust
        self.trials, self.processes = counts
        feeds = probe_feeds(session.model) if inputs is None else inputs
        self.feeds = host_copies(feeds)
        self.origin = "probe inputs, seed 0" if inputs is None else "inputs that were given"
        self.batch = find_batch(session.inputs, self.feeds, sizes, dimension)
        if isinstance(self.batch, Batch) and inputs is None and self.batch.sizes:
            dims = {self.batch.dimension: self.batch.total}
            wide = host_copies(probe_feeds(session.model, dims=dims))
            self.batch = find_batch(session.inputs, wide, sizes, dimension)
        self.others = other_inputs(self.feeds, self.batch)
        self.axes = self._output_axes()

    def run(self, requested: str, last: str) -> DeterminismTests:
        tests: list[GradeTest] = []
        names = _GRADES[: _GRADES.index(last) + 1]
        for number, name in enumerate(names, 1):
            log_step(name, number, len(names))
            failed = next((test.grade for test in tests if test.verdict == "failed"), None)
            if failed is not None:
                reason = f"{failed} failed, which this grade includes"
                tests.append(GradeTest(grade=name, verdict="not_tested", reason=reason))
            else:
                tests.append(getattr(self, f"_{name}")())
        passed = [test.grade for test in tests if test.verdict == "passed"]
        observed = "none"
        for test in tests:
            if test.grade not in passed:
                break
            observed = test.grade
        plan, batch = self.session.plan, self.batch
        return DeterminismTests(
            model=str(self.session.model.path),
            engine=plan.engine,
            device=plan.device,
            precision=plan.precision,
            plan=plan.request_hash,
            requested=requested,
            observed=observed,
            inputs=self.origin,
            batch_dimension=batch.dimension if isinstance(batch, Batch) else None,
            batch_sizes=batch.sizes if isinstance(batch, Batch) else (),
            tests=tuple(tests),
        )

    def _run_to_run(self) -> GradeTest:
        def test(run: Run) -> TrialResult:
            return grades.run_to_run(run, self.feeds, self.others, self.trials)

        count, wrong = test(self.session.run)
        if wrong is not None:
            return self._failed("run_to_run", count, wrong, test)
        note = ", with outputs filled with NaN too"
        try:
            bound, wrong = self._poisoned()
            count += bound
        except XpuRuntimeError as error:
            note = f"; outputs filled with NaN were not tested: {error_line(error)}"
        if wrong is not None:
            return self._failed("run_to_run", count, wrong, test)
        reason = f"the same bits with other inputs in between{note}"
        return GradeTest(grade="run_to_run", trials=count, verdict="passed", reason=reason)

    def _poisoned(self) -> TrialResult:
        if not self.session.plan.device.startswith("cpu") and self.session.plan.device != "npu":
            raise UnsupportedOperationError("outputs are on the device", device=self.session.plan.device)
        batch = self.session._open().whole_batch
        feeds = kept(batch(self.feeds))
        want = kept(self.session.run(feeds))
        if any(array.dtype.kind in "OSU" for array in (*want.values(), *feeds.values())):
            raise UnsupportedOperationError("text has no NaN")
        others = [batch(other) for other in self.others]
        same = [other for other in others if all(other[name].shape == feeds[name].shape for name in other)]
        binding = self.session.bind(kept(feeds), {name: np.empty_like(array) for name, array in want.items()})
        try:
            return grades.poisoned(binding, feeds, same, want, self.trials)
        finally:
            binding.close()

    def _concurrency(self) -> GradeTest:
        def test(run: Run) -> TrialResult:
            return grades.concurrency(run, self.feeds, self.others, self.trials)

        count, wrong = test(self.session.run)
        if wrong is not None:
            return self._failed("concurrency", count, wrong, test)
        reason = f"the same bits with {grades.IN_FLIGHT} runs in flight"
        return GradeTest(grade="concurrency", trials=count, verdict="passed", reason=reason)

    def _restart(self) -> GradeTest:
        reason = why_not_fresh(self.session)
        if reason is not None:
            return GradeTest(grade="restart", verdict="not_tested", reason=reason)
        session, folder = self.session, ScratchFolder("restart")
        with folder as name:
            room = Path(name)
            job = fresh_job(session, room, trust=self.trust)

            def test(inside: Sequence[str], run: Run) -> TrialResult:
                want = kept(run(self.feeds))
                for number in range(1, self.processes + 1):
                    place = room / f"process-{len([*room.iterdir()])}"
                    place.mkdir()
                    got = run_fresh({**job, "names": list(inside)}, self.feeds, number, place)
                    if differing(want, got):
                        what = f"this process and fresh process {number} differ"
                        return number, grades.Mismatch(want, got, what)
                return self.processes, None

            def repeat(names: Sequence[str]) -> Mismatch | None:
                with self._tapped(names) as run:
                    return test(names, lambda feeds: {**session.run(feeds), **run(feeds)})[1]

            try:
                count, wrong = test((), session.run)
            except WorkerFailure as failure:
                opened = failure.kind is not FailureKind.EXCEPTION
                reason = failure.reason if opened else f"the session does not run in a fresh process: {failure.reason}"
                return GradeTest(grade="restart", verdict="failed" if opened else "not_tested", reason=reason)
            if wrong is not None:
                return self._located("restart", count, wrong, repeat)
        reason = f"the same bits in {self.processes} fresh processes with other hash seeds and environments"
        return GradeTest(grade="restart", trials=count, verdict="passed", reason=reason)

    def _batch_position(self) -> GradeTest:
        return self._rows(
            "batch_position",
            lambda run, batch: grades.batch_position(run, batch, self.axes, self.trials),
            lambda batch: (
                f"rows of a batch of {batch.permuted} keep their bits at every place, among equal and other rows"
            ),
        )

    def _batch_invariant(self) -> GradeTest:
        batch = self.batch
        if isinstance(batch, Batch) and not batch.sizes and len(self.without_rows) < len(self.session.outputs):
            reason = f"the dimension {batch.dimension!r} is fixed at {batch.permuted}: no row can be run alone"
            return GradeTest(grade="batch_invariant", verdict="not_applicable", reason=reason)
        return self._rows(
            "batch_invariant",
            lambda run, batch: grades.batch_invariant(run, batch, self.axes),
            lambda batch: f"rows of batches of {', '.join(map(str, batch.sizes))} have the bits of the rows alone",
        )

    def _rows(
        self, grade: str, compare: Callable[[Run, Batch], TrialResult], passed: Callable[[Batch], str]
    ) -> GradeTest:
        batch = self.batch
        if not isinstance(batch, Batch):
            reason = f"the model has no batch dimension: {batch.reason}"
            return GradeTest(grade=grade, verdict="not_applicable", reason=reason)
        without = ", ".join(self.without_rows)
        if len(self.without_rows) == len(self.session.outputs):
            reason = f"no output has the batch dimension {batch.dimension!r}: {without}"
            return GradeTest(grade=grade, verdict="not_applicable", reason=reason)
        count, wrong = compare(self.session.run, batch)
        if wrong is not None:
            seen = set(batch.axes)

            def repeat(names: Sequence[str]) -> Mismatch | None:
                with self._tapped(names) as run:
                    shown = set(names).difference(self._missing_rows(run, batch, names))
                    seen.update(shown)
                    rows = lambda feeds: {name: array for name, array in run(feeds).items() if name in shown}  # noqa: E731
                    return compare(rows, batch)[1]

            return self._located(grade, count, wrong, repeat, seen)
        if without:
            reason = f"the rows that could be compared are the same; no batch dimension: output {without}"
            return GradeTest(grade=grade, trials=count, verdict="not_applicable", reason=reason)
        return GradeTest(grade=grade, trials=count, verdict="passed", reason=passed(batch))

    def _output_axes(self) -> dict[str, int]:
        if not isinstance(self.batch, Batch):
            return {}
        name = self.batch.dimension
        return {
            output.name: output.shape.index(name)
            for output in self.session.outputs
            if output.shape and name in output.shape
        }

    @cached_property
    def without_rows(self) -> list[str]:
        assert isinstance(self.batch, Batch)
        return self._missing_rows(self.session.run, self.batch, [output.name for output in self.session.outputs])

    def _missing_rows(self, run: Run, batch: Batch, names: Sequence[str]) -> list[str]:
        sizes = (batch.permuted, 1) if batch.sizes else (batch.permuted,)
        runs = [(size, kept(run(batch.take(range(size))))) for size in sizes]
        return [
            name
            for name in names
            if any(
                name not in outputs or grades.rows_of(name, outputs[name], size, self.axes) is None
                for size, outputs in runs
            )
        ]

    def _failed(self, grade: str, count: int, wrong: Mismatch, test: Callable[[Run], TrialResult]) -> GradeTest:
        def repeat(names: Sequence[str]) -> Mismatch | None:
            with self._tapped(names) as run:
                return test(run)[1]

        return self._located(grade, count, wrong, repeat)

    def _located(
        self,
        grade: str,
        count: int,
        wrong: Mismatch,
        repeat: Callable[[Sequence[str]], Mismatch | None],
        compared: set[str] | None = None,
    ) -> GradeTest:
        first = locate(self.session.model, wrong, repeat, compared)
        return GradeTest(grade=grade, trials=count, verdict="failed", reason=wrong.what, first_difference=first)

    def _tapped(self, names: Sequence[str]) -> Any:
        from xpuruntime.inference.intermediates import tapped

        session = self.session
        return tapped(session._engine, session._request, session._machine, session._open(), self.feeds, names)
