# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""An HTTP client under MLPerf LoadGen, which decides when each request is issued and computes the percentiles.

``pip install mlcommons-loadgen==6.0.17``. The Server scenario issues requests at random moments (Poisson), whatever
the server does, and counts a latency from the moment at which a request was due; the Offline scenario issues all at
once. Requests go over connections that are kept, one at a time on each; one that finds all of them busy waits. Answers
are compared with the right ones after a run, so that this takes none of its time. Figures are those of LoadGen's detail
log; beside them the client records each latency itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import selectors
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from serving_load import CLOSED, Connection

if TYPE_CHECKING:
    from serving_load import Requests

__all__ = ["Outcome", "Sample", "loadgen_module", "offline_scenario", "read_detail", "read_samples", "server_scenario"]

CONNECTIONS = 256
#: Seconds that an answer is waited for once its request was sent.
_PATIENCE = 30.0
_MARK = ":::MLLOG "
_OK = b"http/1.1 200 "


class Sample(NamedTuple):
    """A sample in LoadGen's trace: when it was due, how much later it was issued, and its latency, in seconds."""

    due: float
    delay: float
    latency: float


@dataclass
class Outcome:
    """What LoadGen logged, and what the client recorded.

    Parameters
    ----------
    log : dict
        Values of LoadGen's detail log.
    samples : list of Sample
        In the order in which they were issued; of the Server scenario only.
    own : list of float
        Seconds from the issue of each to its answer, by the client's clock.
    answers : list of tuple
        Index, head and body of each; the head is ``CLOSED`` where the connection was closed instead.
    requests : Requests
    busy : float
        Processor time of this process in a second of the run.
    """

    log: dict[str, Any]
    samples: list[Sample]
    own: list[float]
    answers: list[tuple[int, bytes, bytes]]
    requests: Requests
    busy: float

    @cached_property
    def lost(self) -> int:
        """How many had no answer, or an error. LoadGen counts their latencies too."""
        return len(self.own) - sum(head.startswith(_OK) for _, head, _ in self.answers)

    @cached_property
    def wrong(self) -> int:
        """How many had a wrong answer."""
        return sum(head.startswith(_OK) and not self.requests.right(at, head, body) for at, head, body in self.answers)

    @property
    def per_second(self) -> float:
        """Right answers a second."""
        rates = ("result_completed_samples_per_sec", "result_samples_per_second")
        right = 1 - (self.lost + self.wrong) / len(self.own)
        return right * next(float(self.log[name]) for name in rates if name in self.log)

    def to_plain(self) -> dict[str, Any]:
        """Return LoadGen's rate and percentiles, beside the percentiles of what the client recorded."""
        found: dict[str, Any] = {
            "generator": f"LoadGen {str(self.log['loadgen_version']).partition(' ')[0]}",
            "scenario": self.log["effective_scenario"],
            "valid": self.log["result_validity"] == "VALID",
            "answered": len(self.own) - self.lost - self.wrong, "lost": self.lost, "wrong": self.wrong,
            "per_second": self.per_second, "client_busy": self.busy,
        }  # fmt: skip
        if self.samples:
            delays = [sample.delay for sample in self.samples]
            recorded = [delay + own for delay, own in zip(delays, self.own, strict=True)]
            for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
                found[name] = self.log[f"result_{100 * share:.2f}_percentile_latency_ns"] / 1e6
                found[f"recorded_{name}"] = 1e3 * _percentile(recorded, share)
            found["issued_late_p99_ms"] = 1e3 * _percentile(delays, 0.99)
        return found


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def read_detail(text: str) -> dict[str, Any]:
    """Return the values of a detail log by key; raises RuntimeError where LoadGen logged an error."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(_MARK):
            entry = json.loads(line[len(_MARK) :])
            if entry["metadata"]["is_error"]:
                raise RuntimeError(f"LoadGen: {entry['value']}")
            found[entry["key"]] = entry["value"]
    return found


def read_samples(text: str) -> list[Sample]:
    """Return the samples of a trace in the order in which they were issued."""
    found = {}
    for line in text.splitlines():
        if line.startswith('{"name":"Sample",') and '"ph":"b"' in line:
            entry = json.loads(line.rstrip(","))
            made = entry["args"]
            found[made["sample_seq"]] = Sample(
                entry["ts"] / 1e6, made["issue_start_ns"] / 1e9, made["complete_ns"] / 1e9
            )
    return [found[at] for at in sorted(found)]


def loadgen_module() -> Any:
    """Return LoadGen; ends the program where it is not installed."""
    try:
        import mlperf_loadgen
    except ImportError:
        raise SystemExit("this takes MLPerf LoadGen. Fix: pip install mlcommons-loadgen==6.0.17") from None
    return mlperf_loadgen


class _Job(NamedTuple):
    """A request that was issued: its place in the order of issue, LoadGen's name of it, its index, and when."""

    place: int
    id: int
    index: int
    since: float


class _Client:
    """Sends what LoadGen issues in LoadGen's thread, and receives answers in another one."""

    def __init__(self, requests: Requests, connections: int) -> None:
        self.loadgen, self.requests = loadgen_module(), requests
        self.pending: deque[_Job] = deque()
        self.idle: deque[Connection] = deque()
        self.busy: dict[Connection, _Job] = {}
        self.own: list[float] = []
        self.answers: list[tuple[int, bytes, bytes]] = []
        self.failed: BaseException | None = None
        self._lock, self._stop = threading.Lock(), False
        self._selector = selectors.DefaultSelector()
        for _ in range(connections):
            one = Connection(requests)
            self._selector.register(one.socket, selectors.EVENT_READ, one)
            self.idle.append(one)

    def issue(self, ids: list[int], indices: list[int]) -> None:
        """Send requests, or keep them until a connection is idle."""
        now = time.perf_counter()
        sent = []
        with self._lock:
            for made, index in zip(ids, indices, strict=True):
                job = _Job(len(self.own), made, index, now)
                self.own.append(0.0)
                self.pending.append(job)
            while self.pending and self.idle and self.failed is None:
                one = self.idle.popleft()
                sent.append((one, self._assign(one)))
            dropped = self._dropped() if self.failed is not None else []
        self._complete(dropped)
        for one, job in sent:
            self._send(one, job)

    def _assign(self, one: Connection) -> _Job:
        job = self.busy[one] = self.pending.popleft()
        one.since = time.perf_counter()  # it is silent from now on
        return job

    def _send(self, one: Connection, job: _Job) -> None:
        with contextlib.suppress(OSError):  # the receiving thread sees that the connection is closed
            one.send(job.index, one.since)

    def _complete(self, jobs: list[_Job]) -> None:
        if jobs:
            self.loadgen.QuerySamplesComplete([self.loadgen.QuerySampleResponse(job.id, 0, 0) for job in jobs])

    def _dropped(self) -> list[_Job]:
        """Return all requests that have no answer yet, which then have none."""
        jobs = [*self.busy.values(), *self.pending]
        self.busy.clear()
        self.pending.clear()
        return jobs

    def receive(self) -> None:
        """Take answers until the run ends; where the server is gone, so is each request."""
        try:
            while not self._stop:
                for key, _ in self._selector.select(0.2):
                    self._take(key.data)
                self._give_up()
        except BaseException as error:  # LoadGen waits for all requests, so they have to end
            with self._lock:
                self.failed = error
                dropped = self._dropped()
            self._complete(dropped)

    def _take(self, one: Connection) -> None:
        try:
            found = one.receive()
        except OSError:
            found = CLOSED, b""
        if found is None:
            return
        now = time.perf_counter()
        with self._lock:
            job = self.busy.pop(one, None)
        if job is not None:
            self._complete([job])
            self.own[job.place] = now - job.since
            self.answers.append((job.index, *found))
        if job is None or found[0] is CLOSED:
            self._reopen(one)
        self._next(one)

    def _next(self, one: Connection) -> None:
        """Use a connection that is neither busy nor among the idle ones."""
        with self._lock:
            if not self.pending:
                self.idle.append(one)
                return
            job = self._assign(one)
        self._send(one, job)

    def _reopen(self, one: Connection) -> None:
        with self._lock:
            with contextlib.suppress(ValueError):
                self.idle.remove(one)
            job = self.busy.pop(one, None)  # it was sent while the server closed the connection
        self._selector.unregister(one.socket)
        one.socket.close()
        one.open()
        self._selector.register(one.socket, selectors.EVENT_READ, one)
        if job is not None:
            self._complete([job])
            self.answers.append((job.index, CLOSED, b""))

    def _give_up(self) -> None:
        """Close connections whose answer does not come."""
        before = time.perf_counter() - _PATIENCE
        with self._lock:
            silent = [one for one in self.busy if one.since < before]
        for one in silent:
            self._reopen(one)
            self._next(one)

    def run(self, settings: Any) -> Outcome:
        """Run a test of LoadGen, and then compare the answers."""
        loadgen = self.loadgen
        logs = loadgen.LogSettings()
        logs.enable_trace = settings.scenario == loadgen.TestScenario.Server
        receiver = threading.Thread(target=self.receive)
        count = len(self.requests.sent)
        system = loadgen.ConstructFastSUT(self.issue, lambda: None)
        library = loadgen.ConstructQSL(count, count, lambda _: None, lambda _: None)
        gc.collect()
        gc.disable()  # a collection would hold requests back
        receiver.start()
        cpu, start = time.process_time(), time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder:
                logs.log_output.outdir = folder
                loadgen.StartTestWithLogSettings(system, library, settings, logs, "")
                cpu, seconds = time.process_time() - cpu, time.perf_counter() - start
                log = read_detail((Path(folder) / "mlperf_log_detail.txt").read_text())
                samples = read_samples((Path(folder) / "mlperf_log_trace.json").read_text())
        finally:
            gc.enable()
            self._stop = True
            receiver.join()
            for key in list(self._selector.get_map().values()):
                key.data.socket.close()
            self._selector.close()
            loadgen.DestroySUT(system)
            loadgen.DestroyQSL(library)
        if self.failed is not None:
            raise RuntimeError(f"the server was gone in the middle of a run: {self.failed}") from self.failed
        return Outcome(log, samples, self.own, self.answers, self.requests, cpu / seconds)


def server_scenario(
    requests: Requests,
    rate: float,
    seconds: float,
    *,
    connections: int = CONNECTIONS,
    target_ms: float = 10_000.0,
    seed: int = 0,
) -> Outcome:
    """Run the Server scenario: requests at random moments, so many a second.

    Parameters
    ----------
    requests : Requests
    rate : float
        Requests a second.
    seconds : float
        How long requests are issued.
    connections : int
    target_ms : float
        The p99 that LoadGen's verdict is about.
    seed : int
        Of the random moments.
    """
    loadgen = loadgen_module()
    settings = loadgen.TestSettings()
    settings.scenario, settings.mode = loadgen.TestScenario.Server, loadgen.TestMode.PerformanceOnly
    settings.server_target_qps = rate
    settings.server_target_latency_percentile = 0.99
    settings.server_target_latency_ns = int(target_ms * 1e6)
    settings.schedule_rng_seed = seed
    settings.min_duration_ms, settings.min_query_count = int(seconds * 1e3), 1
    return _Client(requests, connections).run(settings)


def offline_scenario(requests: Requests, expected: float, seconds: float, *, connections: int = CONNECTIONS) -> Outcome:
    """Run the Offline scenario: all requests at once, as many as `expected` a second take so many seconds, and 10 %."""
    loadgen = loadgen_module()
    settings = loadgen.TestSettings()
    settings.scenario, settings.mode = loadgen.TestScenario.Offline, loadgen.TestMode.PerformanceOnly
    settings.offline_expected_qps = expected
    settings.min_duration_ms, settings.min_query_count = int(seconds * 1e3), 1
    return _Client(requests, connections).run(settings)
