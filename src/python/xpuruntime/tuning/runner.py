# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Runner`: one candidate opened, compared with the reference, and timed; and the functions that a worker calls.

A worker process has one runner. Arrays go through folders that both processes see.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.engines.precision import Tolerance, compare_within
from xpuruntime.errors import XpuRuntimeWarning
from xpuruntime.inference import InferenceSession
from xpuruntime.locks.worker_side.xrt_session_worker import read_arrays
from xpuruntime.measuring.energy import open_meter
from xpuruntime.runtime.process_memory import process_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.engines.registry import EngineRegistry

__all__ = ["Job", "Runner", "call", "open_runner"]

#: Seconds of warming before the first turn and before each; of a turn at least.
_WARM, _AGAIN, _BLOCK = 0.1, 0.002, 0.02
#: Seconds of a turn in which energy is measured, whose counters are some tens of milliseconds apart.
_ENERGY_BLOCK = 0.5
#: Runs of a turn from which a 99th percentile is taken.
_TAIL_RUNS = 100


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner is to open and to measure.

    Attributes
    ----------
    model : str
    policy : dict
    trust : bool
    calibration : str or None
    samples : str
        A folder with ``inputs-N`` and ``outputs-N`` of the reference, as `write_arrays` makes them.
    count : int
        Samples in it.
    tolerance : dict
        Of `Tolerance`.
    objective : str
    batch : int
    concurrency : int
    timed : int
        Inputs that a turn goes through.
    """

    model: str
    policy: dict[str, Any]
    trust: bool
    calibration: str | None
    samples: str
    count: int
    tolerance: dict[str, float]
    objective: str = "latency.p50"
    batch: int = 1
    concurrency: int = 1
    timed: int = 8


class Runner:
    """One candidate, opened."""

    def __init__(self, job: Job, registry: EngineRegistry | None = None) -> None:
        self.job = job
        folder = Path(job.samples)
        self._feeds = [read_arrays(folder / f"inputs-{index}") for index in range(job.count)]
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", XpuRuntimeWarning)
            self._session = InferenceSession(
                job.model, policy=job.policy, trust=job.trust, calibration=job.calibration, registry=registry
            )
        self._session.run(self._feeds[0])
        self.start = time.perf_counter() - began
        self._tolerance = Tolerance(**job.tolerance)
        self._threads: ThreadPoolExecutor | None = None
        self._meter = open_meter(self._session.plan.device) if job.objective == "energy" else None
        self._runs, self._quickest = 0, math.inf

    @property
    def facts(self) -> dict[str, Any]:
        """Seconds until the first result, the most memory of the process so far, and seconds of the quickest run."""
        run = None if self._quickest == math.inf else self._quickest
        return {"start": self.start, "memory": process_memory().most_resident, "run": run}

    def check(self) -> dict[str, Any]:
        """Compare the outputs for all inputs with the reference, in order, and those for the first once more."""
        error, cosine = 0.0, 1.0
        for index in [*range(self.job.count), 0]:
            began = time.perf_counter()
            outputs = dict(self._session.run(self._feeds[index]))
            self._quickest = min(self._quickest, time.perf_counter() - began)
            found = compare_within(self._reference(index), outputs, self._tolerance)
            error = max([error, *(one.max_rel for one in found.outputs)])
            cosine = min(cosine, found.cosine)
            if not found.passed:
                reason = f"for input {index}, {found.figures}"
                return {"passed": False, "reason": reason, "error": error, "cosine": cosine, **self.facts}
        return {"passed": True, "reason": "", "error": error, "cosine": cosine, **self.facts}

    def prepare(self) -> int:
        """Warm the session, and settle how many runs a thread makes in a turn."""
        timed = self._feeds[: self.job.timed]
        until, quickest = time.perf_counter() + _WARM, math.inf
        while quickest == math.inf or time.perf_counter() < until:
            for feeds in timed:
                began = time.perf_counter()
                self._session.run(feeds)
                quickest = min(quickest, time.perf_counter() - began)
        block = _ENERGY_BLOCK if self.job.objective == "energy" else _BLOCK
        runs = max(math.ceil(block / quickest), len(timed))
        if self.job.objective == "latency.p99":
            runs = max(runs, _TAIL_RUNS)
        self._runs = math.ceil(runs / len(timed)) * len(timed)
        return self._runs

    def turn(self) -> dict[str, Any]:
        """Run a turn and return its figure, small where it is good; and what was wrong with its last outputs."""
        if not self._runs:
            self.prepare()
        objective = self.job.objective
        before = self._meter.read() if self._meter is not None else ()
        times, elapsed, outputs = self._timed(self._runs)
        if objective == "energy":
            assert self._meter is not None
            figure = self._meter.joules(before, self._meter.read()) / self._runs
        elif objective == "throughput":
            figure = elapsed / (self._runs * self.job.concurrency * self.job.batch)
        else:
            figure = float(np.percentile(times, 99) if objective == "latency.p99" else np.median(times))
        return {"figure": figure, "wrong": self._wrong(outputs)}

    def tail(self, limit: float, runs: int, seconds: float) -> dict[str, Any]:
        """Make single runs under the load, and count those over a limit."""
        until, over, made, found = time.perf_counter() + seconds, 0, 0, []
        while made < runs and time.perf_counter() < until:
            times, _, outputs = self._timed(max(1, min(_TAIL_RUNS, runs - made) // self.job.concurrency))
            found.append(times)
            over += int(np.count_nonzero(times > limit))
            made += len(times)
            if wrong := self._wrong(outputs):
                return {"wrong": wrong}
        return {"runs": made, "over": over, "p99": float(np.percentile(np.concatenate(found), 99)), "wrong": ""}

    def determinism(self, grade: str) -> dict[str, Any]:
        """Test a grade of determinism."""
        from xpuruntime.locks.determinism import session_determinism

        found = session_determinism(self._session, grade, inputs=self._feeds[0], trust=self.job.trust)  # type: ignore[arg-type]
        worst = next((one for one in found.tests if one.verdict in ("failed", "not_tested")), None)
        return {"reached": found.reached, "reason": "" if worst is None else f"{worst.grade}: {worst.reason}"}

    def shares(self) -> dict[str, float]:
        """Return the share of time of each operator type, of an instrumented run."""
        report = self._session.explain(self._feeds[0], runs=3)
        times: dict[str, float] = {}
        for unit in report.units:
            if unit.time is not None:
                times[unit.op] = times.get(unit.op, 0.0) + unit.time.value
        total = sum(times.values())
        return {op: one / total for op, one in times.items()} if total else {}

    def close(self) -> None:
        """Close the session and end the threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._session.close()

    def _reference(self, index: int) -> dict[str, Any]:
        return read_arrays(Path(self.job.samples) / f"outputs-{index}")

    def _wrong(self, last: tuple[int, dict[str, Any]]) -> str:
        """Compare outputs of a timed run with the reference: a fast answer must still be the right one."""
        found = compare_within(self._reference(last[0]), last[1], self._tolerance)
        return "" if found.passed else f"while it was timed, for input {last[0]}, {found.figures}"

    def _timed(self, runs: int) -> tuple[np.ndarray[Any, Any], float, tuple[int, dict[str, Any]]]:
        """Return the seconds of all runs, of all together, and the last outputs of the first thread."""
        run, feeds, count = self._session.run, self._feeds[: self.job.timed], self.job.concurrency
        again = time.perf_counter() + _AGAIN
        run(feeds[0])
        while time.perf_counter() < again:
            run(feeds[0])
        if count == 1:
            began = time.perf_counter()
            times, last = _loop(run, feeds, runs, 0)
            return times, time.perf_counter() - began, last
        self._threads = self._threads or ThreadPoolExecutor(count)
        gate = threading.Barrier(count + 1)

        def work(first: int) -> tuple[np.ndarray[Any, Any], tuple[int, dict[str, Any]]]:
            gate.wait()
            return _loop(run, feeds, runs, first)

        waiting = [self._threads.submit(work, index) for index in range(count)]
        began = time.perf_counter()
        gate.wait()
        found = [one.result() for one in waiting]
        elapsed = time.perf_counter() - began
        return np.concatenate([times for times, _ in found]), elapsed, found[0][1]


def _loop(
    run: Callable[..., Any], feeds: Sequence[dict[str, Any]], runs: int, first: int
) -> tuple[np.ndarray[Any, Any], tuple[int, dict[str, Any]]]:
    clock, times, outputs, index = time.perf_counter, np.empty(runs), {}, 0
    for number in range(runs):
        index = (first + number) % len(feeds)
        began = clock()
        outputs = run(feeds[index])
        times[number] = clock() - began
    return times, (index, dict(outputs))


_runner: Runner


def open_runner(job: dict[str, Any]) -> dict[str, Any]:
    """Open the candidate of this process."""
    global _runner
    _runner = Runner(msgspec.convert(job, Job))
    return _runner.facts


def call(method: str, **arguments: Any) -> Any:
    """Call a method of this process's runner."""
    return getattr(_runner, method)(**arguments)
