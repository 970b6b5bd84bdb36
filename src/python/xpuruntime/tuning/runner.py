# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Runner`: one open candidate, compared with the reference and timed; and the functions that a worker calls.

A worker process has one runner. Arrays go through folders that both processes see.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.engines.arrays import digest_parts
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning
from xpuruntime.evidence.tolerances import Tolerance, compare_within
from xpuruntime.inference import InferenceSession
from xpuruntime.inference.calls import Calls, open_calls
from xpuruntime.locks.worker_side.xrt_session_worker import read_arrays
from xpuruntime.measuring.conditions import EnergyMeter, open_meter
from xpuruntime.runtime.cpu_and_memory import process_memory

if TYPE_CHECKING:
    from xpuruntime.engines.registry import EngineRegistry

#: Seconds of warming before the first turn and before each; of a turn at least.
_WARM, _AGAIN, _BLOCK = 0.1, 0.002, 0.02
#: Seconds of a turn in which energy is measured, whose counters are some tens of milliseconds apart.
_ENERGY_BLOCK = 0.5
#: Seconds after which a counter of energy that stands still is given up.
_ENERGY_MOST = 10.0
#: Runs of a turn from which a 99th percentile is taken.
_TAIL_RUNS = 100
#: Runs of each input before a thread is timed: a CUDA graph is captured in the first ones of a thread.
_THREAD_RUNS = 3


class RunnerJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner is to open and to measure."""

    model: str
    policy: dict[str, Any]
    trust: bool
    calibration: str | None
    samples: str
    count: int
    tolerance: dict[str, Any]
    objective: str = "latency.p50"
    batch: int = 1
    concurrency: int = 1
    call: str = "run"
    timed: int = 8


class Runner:
    """One candidate, opened."""

    def __init__(self, job: RunnerJob, registry: EngineRegistry | None = None) -> None:
        self.job = job
        folder = Path(job.samples)
        self._feeds = [read_arrays(folder / f"inputs-{index}") for index in range(job.count)]
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", XpuRuntimeWarning)
            self._session = InferenceSession(
                job.model, policy=job.policy, trust=job.trust, calibration=job.calibration, registry=registry
            )
        self._calls = open_calls(self._session, self._feeds, job.call)
        self._calls.prepared(0)()
        self.start = time.perf_counter() - began
        self._tolerance = Tolerance(**job.tolerance)
        self._threads: ThreadPoolExecutor | None = None
        self._of_thread = threading.local()
        self._opened = [self._calls]
        self._meter = open_meter(self._session.plan.device) if job.objective == "energy" else None
        self._runs, self._quickest = 0, math.inf
        #: Digests of outputs that passed, by input.
        self._passed: dict[int, bytes] = {}

    @property
    def facts(self) -> dict[str, Any]:
        """Seconds until the first result and of the quickest run, most memory so far, and what became of a graph."""
        run = None if self._quickest == math.inf else self._quickest
        memory = process_memory().most_resident
        return {"start": self.start, "memory": memory, "run": run, "graph": self._calls.graph}

    def check(self) -> dict[str, Any]:
        """Compare the outputs for all inputs with the reference, in order, and those for the first once more."""
        error, cosine, decided = 0.0, 1.0, False
        for index in [*range(self.job.count), 0]:
            self._calls.poison()
            run = self._calls.prepared(index)
            began = time.perf_counter()
            results = run()
            self._quickest = min(self._quickest, time.perf_counter() - began)
            outputs = self._calls.outputs(index, results)
            comparison = compare_within(
                self._reference(index), outputs, self._tolerance, self._session.model.random_outputs
            )
            error = max([error, *(output.max_rel for output in comparison.outputs)])
            cosine = min(cosine, 1.0 if comparison.cosine is None else comparison.cosine)
            if not comparison.passed:
                reason = f"for input {index}, {comparison.figures}"
                return {"passed": False, "reason": reason, "error": error, "cosine": cosine, **self.facts}
            decided = decided or not all(output.undecided for output in comparison.outputs)
            self._passed[index] = digest_of(outputs)
        if not decided:
            reason = (
                f"its accuracy cannot be judged: {comparison.inconclusive}. Fix: give inputs like those of production"
            )
            return {"passed": False, "reason": reason, "error": error, "cosine": cosine, **self.facts}
        return {"passed": True, "reason": "", "error": error, "cosine": cosine, **self.facts}

    def prepare(self) -> int:
        """Warm the session, and settle how many runs a thread makes in a turn."""
        timed = self._timed_inputs
        until, quickest = time.perf_counter() + _WARM, math.inf
        while quickest == math.inf or time.perf_counter() < until:
            for index in timed:
                run = self._calls.prepared(index)
                began = time.perf_counter()
                run()
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
        if self._meter is not None:
            figure, outputs = self._joules(self._meter)
            return {"figure": figure, "wrong": self._wrong(outputs)}
        times, elapsed, outputs = self._timed(self._runs)
        if objective == "throughput":
            figure = elapsed / (self._runs * self.job.concurrency * self.job.batch)
        else:
            figure = float(np.percentile(times, 99) if objective == "latency.p99" else np.median(times))
        return {"figure": figure, "wrong": self._wrong(outputs)}

    def _joules(self, meter: EnergyMeter) -> tuple[float, tuple[int, dict[str, Any]]]:
        """Return the joules of a run, over as many runs as the counter takes to move, and the last outputs."""
        before, began, runs = meter.read(), time.perf_counter(), 0
        while True:
            _, _, outputs = self._timed(self._runs)
            runs += self._runs
            used = meter.joules(before, meter.read())
            if used > 0:
                return used / runs, outputs
            if time.perf_counter() - began > _ENERGY_MOST:
                msg = f"the energy counter stood still for {_ENERGY_MOST:g} s of runs. Fix: take another objective"
                raise UnsupportedOperationError(msg)

    def count_slow_runs(self, limit: float, runs: int, seconds: float) -> dict[str, Any]:
        """Make single runs under the load, and count those over a limit."""
        until, over, count, slow = time.perf_counter() + seconds, 0, 0, []
        while count < runs and time.perf_counter() < until:
            times, _, outputs = self._timed(max(1, min(_TAIL_RUNS, runs - count) // self.job.concurrency))
            slow.append(times)
            over += int(np.count_nonzero(times > limit))
            count += len(times)
            if wrong := self._wrong(outputs):
                return {"wrong": wrong}
        return {"runs": count, "over": over, "p99": float(np.percentile(np.concatenate(slow), 99)), "wrong": ""}

    def determinism(self, grade: str) -> dict[str, Any]:
        """Test a grade of determinism."""
        from xpuruntime.locks.determinism import session_determinism

        tested = session_determinism(self._session, grade, inputs=self._feeds[0], trust=self.job.trust)  # type: ignore[arg-type]
        worst = next((test for test in tested.tests if test.verdict in ("failed", "not_tested")), None)
        return {"reached": tested.reached, "reason": "" if worst is None else f"{worst.grade}: {worst.reason}"}

    def op_time_shares(self) -> dict[str, float]:
        """Return the share of time of each operator type, of an instrumented run."""
        report = self._session.explain(self._feeds[0], runs=3)
        times: dict[str, float] = {}
        for unit in report.units:
            if unit.time is not None:
                times[unit.op] = times.get(unit.op, 0.0) + unit.time.value
        total = sum(times.values())
        return {op: spent / total for op, spent in times.items()} if total else {}

    def close(self) -> None:
        """Close the session and end the threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        while self._opened:
            self._opened.pop().close()
        self._session.close()

    @property
    def _timed_inputs(self) -> range:
        return range(min(self.job.timed, len(self._feeds)))

    def _reference(self, index: int) -> dict[str, Any]:
        return read_arrays(Path(self.job.samples) / f"outputs-{index}")

    def _wrong(self, last: tuple[int, dict[str, Any]]) -> str:
        index, outputs = last
        digest = digest_of(outputs)
        if self._passed.get(index) == digest:
            return ""
        comparison = compare_within(
            self._reference(index), outputs, self._tolerance, self._session.model.random_outputs
        )
        if comparison.passed:
            self._passed[index] = digest
        return "" if comparison.passed else f"while it was timed, for input {index}, {comparison.figures}"

    def _timed(self, runs: int) -> tuple[np.ndarray[Any, Any], float, tuple[int, dict[str, Any]]]:
        """Return the seconds of all runs, of all together, and the last outputs of the first thread."""
        timed, count = self._timed_inputs, self.job.concurrency
        again = time.perf_counter() + _AGAIN
        self._calls.prepared(0)()
        while time.perf_counter() < again:
            self._calls.prepared(0)()
        if count == 1:
            self._calls.poison()
            began = time.perf_counter()
            times, last, outputs = _loop(self._calls, timed, runs, 0)
            return times, time.perf_counter() - began, (last, self._calls.outputs(last, outputs))
        self._threads = self._threads or ThreadPoolExecutor(count)
        gate = threading.Barrier(count + 1)

        def work(first: int) -> tuple[np.ndarray[Any, Any], int, Any, Calls]:
            try:
                calls = self._calls_of_thread()
                calls.poison()
            except BaseException:
                gate.abort()
                raise
            gate.wait()
            return *_loop(calls, timed, runs, first), calls

        waiting = [self._threads.submit(work, index) for index in range(count)]
        with contextlib.suppress(threading.BrokenBarrierError):  # the thread that failed says why
            gate.wait()
        began = time.perf_counter()
        wait(waiting)
        elapsed = time.perf_counter() - began
        failed = [error for future in waiting if (error := future.exception()) is not None]
        if failed:
            raise next((error for error in failed if not isinstance(error, threading.BrokenBarrierError)), failed[0])
        done = [future.result() for future in waiting]
        _, last, outputs, calls = done[0]
        return np.concatenate([result[0] for result in done]), elapsed, (last, calls.outputs(last, outputs))

    def _calls_of_thread(self) -> Calls:
        """Return the calls of this thread. The first time each timed input is run, as often as a graph needs."""
        calls: Calls | None = getattr(self._of_thread, "calls", None)
        if calls is None:
            calls = self._of_thread.calls = open_calls(self._session, self._feeds, self.job.call)
            self._opened.append(calls)
            for index in [*self._timed_inputs] * _THREAD_RUNS:
                calls.prepared(index)()
        return calls


def _loop(calls: Calls, timed: Sequence[int], runs: int, first: int) -> tuple[np.ndarray[Any, Any], int, Any]:
    clock, times, index, outputs = time.perf_counter, np.empty(runs), 0, None
    for number in range(runs):
        index = timed[(first + number) % len(timed)]
        run = calls.prepared(index)
        began = clock()
        outputs = run()
        times[number] = clock() - began
    return times, index, outputs


def digest_of(arrays: Mapping[str, Any]) -> bytes:
    """Return a digest over names, types, shapes and values of host arrays."""
    digest = hashlib.sha256()
    for part in digest_parts(arrays):
        digest.update(part)
    return digest.digest()


_runner: Runner


def open_runner(job: dict[str, Any]) -> dict[str, Any]:
    """Open the candidate of this process."""
    global _runner
    _runner = Runner(msgspec.convert(job, RunnerJob))
    return _runner.facts


def call(method: str, **arguments: Any) -> Any:
    """Call a method of this process's runner."""
    return getattr(_runner, method)(**arguments)
