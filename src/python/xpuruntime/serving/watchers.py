# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Watchers run sampled requests once more after their answer: the canary and the shadow of a model."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.artifacts.manifest import find_artifact
from xpuruntime.errors import PolicyError
from xpuruntime.evidence.tolerances import compare_within
from xpuruntime.inference import comparing
from xpuruntime.inference.session import InferenceSession
from xpuruntime.measuring.statistics import Margin, RatioComparison, RatioVerdict, compare, look_rounds
from xpuruntime.policies import Policy
from xpuruntime.serving.batching.execution import Slice, assemble, take_apart
from xpuruntime.serving.batching.requests import check_request
from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.models.loading import batch_feeds

if TYPE_CHECKING:
    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.evidence.tolerances import ProbeResult, Tolerance
    from xpuruntime.serving.batching.layout import Layout
    from xpuruntime.serving.batching.requests import Feed, Job
    from xpuruntime.serving.messages import InferResponse
    from xpuruntime.serving.models.model_settings import CanarySettings, ModelSettings, ShadowSettings

#: Samples that may wait; more are dropped and counted.
_WAITING = 4


class Watcher(ABC):
    """Takes samples and runs them in a thread of its own."""

    name: str

    def __init__(self, session: InferenceSession, layout: Layout, settings: ModelSettings) -> None:
        self._session, self._layout = session, layout
        batching = settings.batching
        self._fixed = batching.max_batch_size if batching.shapes == "fixed" else 0
        self._most = batching.max_batch_size
        self._samples: queue.Queue[tuple[Feed, dict[str, Any]] | None] = queue.Queue(_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.runs = self.dropped = self.errors = 0
        self.last_error = ""

    def offer(self, job: Job, response: InferResponse) -> None:
        """Take a request that was answered, if it is to be sampled. Returns at once."""
        if self._closed or not self._sampled():
            return
        if self._most and job.feed.rows > self._most:
            self.dropped += 1  # it was split, so that it cannot run as one
            return
        if self._samples.full():
            self.dropped += 1
            return
        feed = replace(job.feed, arrays={name: array.copy() for name, array in job.feed.arrays.items()})
        try:
            self._samples.put_nowait((feed, {output.name: output.data.copy() for output in response.outputs}))
        except queue.Full:
            self.dropped += 1
            return
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._work, name=f"xpuruntime-{self.name}", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """End the thread, and close the other session."""
        self._closed = True
        with self._lock:
            thread = self._thread
        if thread is not None:
            while not self._samples.empty():
                try:
                    self._samples.get_nowait()
                except queue.Empty:
                    break
            self._samples.put(None)
            thread.join(10.0)
            if thread.is_alive():
                return
        self._close()

    def settle(self, timeout: float = 10.0) -> bool:
        """Wait until all samples were run; return whether they were."""
        end = time.monotonic() + timeout
        while self._samples.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.002)
        return not self._samples.unfinished_tasks

    def verdict(self) -> tuple[bool, str]:
        """Return whether the model may stay ready, else why not."""
        return True, ""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return what was found so far, as plain values."""

    @abstractmethod
    def _sampled(self) -> bool:
        """Return whether the next request is sampled."""

    @abstractmethod
    def _check(self, feed: Feed, outputs: Mapping[str, Any]) -> None:
        """Run one sample."""

    @abstractmethod
    def _close(self) -> None:
        """Close what this has opened."""

    def _run(self, session: InferenceSession, feed: Feed, fixed: int = 0) -> tuple[dict[str, Any], float]:
        feed_slice = Slice(feed, 0, feed.rows)
        assembly = assemble(self._layout, [feed_slice], fixed)
        begin = time.perf_counter()
        results = session.run(assembly.feeds)
        took = time.perf_counter() - begin
        return take_apart(self._layout, results, assembly.rows, [feed_slice])[0], took

    def _work(self) -> None:
        while (sample := self._samples.get()) is not None:
            try:
                self._check(*sample)
            except Exception as error:  # of the sample alone: the model has answered
                self.errors += 1
                self.last_error = f"{type(error).__name__}: {error}"
            else:
                self.runs += 1
            self._samples.task_done()
        self._samples.task_done()


def tolerance_of(session: InferenceSession, rtol: float | None, atol: float | None) -> Tolerance:
    """Return the tolerance that is stated, the rest as `xpuruntime.verify` has it for the session."""
    stated = {name: value for name, value in (("rtol", rtol), ("atol", atol)) if value is not None}
    return msgspec.structs.replace(comparing.tolerance_of(session), **stated)


class Canary(Watcher):
    """Compares sampled answers with those of a reference."""

    name = "canary"

    def __init__(
        self,
        session: InferenceSession,
        layout: Layout,
        settings: ModelSettings,
        canary: CanarySettings,
        reference: InferenceSession | None,
    ) -> None:
        super().__init__(session, layout, settings)
        self._canary, self._reference, self._seen = canary, reference, 0
        self.tolerance = tolerance_of(session, canary.rtol, canary.atol)
        self.last: ProbeResult | None = None
        self.bitwise = self.outside = 0
        self.drift = self.worst_drift = 0.0
        self._first_probe()

    def _sampled(self) -> bool:
        with self._lock:
            self._seen += 1
            return self._seen % self._canary.every == 0

    def _first_probe(self) -> None:
        """Answer the canary once with a probe input, so that a model that is wrong from the start is never ready."""
        feeds = batch_feeds(self._session, self._layout, 1)
        tensors = [
            InferTensor(name, self._layout.inputs[name].datatype, tuple(array.shape), _bits(array))
            for name, array in feeds.items()
        ]
        feed = check_request(InferRequest("", tensors), self._layout, fixed=bool(self._fixed))
        self._check(feed, self._run(self._session, feed, self._fixed)[0])
        self.runs += 1

    def _check(self, feed: Feed, outputs: Mapping[str, Any]) -> None:
        if self._reference is None:
            want, _ = self._run(self._session, feed, self._fixed)
        else:
            want, _ = self._run(self._reference, _unpadded(feed))
        result = compare_within(
            {name: want[name] for name in outputs}, outputs, self.tolerance, self._session.model.random_outputs
        )
        same = all(want[name].tobytes() == outputs[name].tobytes() for name in outputs)
        with self._lock:
            self.last = result
            self.bitwise += same
            self.outside += not result.passed
            self.drift = max((output.max_rel for output in result.outputs), default=0.0)
            self.worst_drift = max(self.worst_drift, self.drift)

    def verdict(self) -> tuple[bool, str]:
        """Return whether the last sample was in tolerance."""
        last = self.last
        if last is None or last.passed:
            return True, ""
        return False, f"the last canary is out of tolerance: {last.figures}"

    def to_dict(self) -> dict[str, Any]:
        """Return what was found so far, as plain values."""
        with self._lock:
            return {
                "every": self._canary.every,
                "against": self._canary.against,
                "runs": self.runs,
                "dropped": self.dropped,
                "errors": self.errors,
                "last_error": self.last_error,
                "out_of_tolerance": self.outside,
                "bitwise_equal": self.bitwise,
                "drift": self.drift,
                "worst_drift": self.worst_drift,
                "tolerance": {"rtol": self.tolerance.rtol, "atol": self.tolerance.atol},
                "last": None if self.last is None else str(self.last),
            }

    def _close(self) -> None:
        if self._reference is not None:
            self._reference.close()


def _bits(array: Any) -> Any:
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def _unpadded(feed: Feed) -> Feed:
    """Return a request as it came, for a session that takes any shape."""
    return replace(feed, targets=dict(feed.lengths))


#: Rounds at which the times are looked at: from the first to the last.
_ROUNDS = (9, 1000)


class Shadow(Watcher):
    """Runs a share of the requests under a second policy, beside the first, and compares outputs and times.

    Each sample runs on both sessions, and on the first one twice, in changing order; the answer that the client got
    had other requests in its batch, so its time says nothing here.
    """

    name = "shadow"

    def __init__(
        self,
        session: InferenceSession,
        layout: Layout,
        settings: ModelSettings,
        shadow: ShadowSettings,
        other: InferenceSession,
    ) -> None:
        super().__init__(session, layout, settings)
        self._shadow, self._other = shadow, other
        self.tolerance = tolerance_of(other, shadow.rtol, shadow.atol)
        self._due = 0.0
        self._times: dict[str, list[float]] = {"shadow": [], "control": [], "twin": []}
        self._looks = look_rounds(*_ROUNDS)
        self.comparison: RatioComparison | None = None
        self.outside = 0
        self.worst = 0.0
        self.last = ""

    def _sampled(self) -> bool:
        with self._lock:
            self._due += self._shadow.share
            if self._due < 1:
                return False
            self._due -= 1
            return True

    def _check(self, feed: Feed, outputs: Mapping[str, Any]) -> None:
        del outputs
        order = ["control", "shadow", "twin"]
        taken: dict[str, tuple[dict[str, Any], float]] = {}
        for which in order if self.runs % 2 else reversed(order):
            session = self._other if which == "shadow" else self._session
            taken[which] = self._run(session, feed, self._fixed)
        result = compare_within(
            taken["control"][0], taken["shadow"][0], self.tolerance, self._session.model.random_outputs
        )
        with self._lock:
            self.outside += not result.passed
            self.worst = max(self.worst, *(output.max_rel for output in result.outputs), 0.0)
            self.last = result.figures
            if len(self._times["shadow"]) < self._looks[-1] and not self._decided():
                for which, (_, seconds) in taken.items():
                    self._times[which].append(max(seconds, 1e-9))
                if len(self._times["shadow"]) in self._looks:
                    self.comparison = compare(
                        self._times["shadow"],
                        self._times["control"],
                        twin=self._times["twin"],
                        margin=Margin(relative=self._shadow.margin),
                        looks=len(self._looks),
                    )

    def _decided(self) -> bool:
        return self.comparison is not None and self.comparison.verdict is not RatioVerdict.INCONCLUSIVE

    def to_dict(self) -> dict[str, Any]:
        """Return what was found so far, as plain values."""
        with self._lock:
            comparison = self.comparison
            return {
                "policy": self._shadow.policy,
                "share": self._shadow.share,
                "engine": f"{self._other.plan.engine}@{self._other.plan.device}",
                "precision": self._other.plan.precision,
                "runs": self.runs,
                "dropped": self.dropped,
                "errors": self.errors,
                "last_error": self.last_error,
                "out_of_tolerance": self.outside,
                "worst_drift": self.worst,
                "last": self.last,
                "time": None
                if comparison is None
                else {
                    "verdict": comparison.verdict.value,
                    "ratio": comparison.ratio,
                    "low": comparison.low,
                    "high": comparison.high,
                    "confidence": comparison.confidence,
                    "margin": comparison.margin,
                    "rounds": comparison.rounds,
                    "too_noisy": comparison.too_noisy,
                },
                "rounds": len(self._times["shadow"]),
                "next_look": next((look for look in self._looks if look > len(self._times["shadow"])), None),
            }

    def _close(self) -> None:
        self._other.close()


def make_watchers(
    path: str,
    settings: ModelSettings,
    session: InferenceSession,
    layout: Layout,
    registry: EngineRegistry | None,
) -> list[Watcher]:
    """Return the canary and the shadow that the settings ask for."""
    watchers: list[Watcher] = []
    try:
        if settings.canary is not None:
            reference = None
            if settings.canary.against == "reference":
                reference = _reference(path, settings)
            watchers.append(Canary(session, layout, settings, settings.canary, reference))
        if settings.shadow is not None:
            other = InferenceSession(
                path, policy=Policy.load(settings.shadow.policy), trust=settings.trust, registry=registry
            )
            watchers.append(Shadow(session, layout, settings, settings.shadow, other))
    except BaseException:
        for watcher in watchers:
            watcher.close()
        raise
    return watchers


def _reference(path: str, settings: ModelSettings) -> InferenceSession:
    if not path or find_artifact(path) is not None:
        raise PolicyError(
            "canary.against: 'reference' runs the model file on the CPU, and there is none to run. Fix: state "
            "against: self, or serve the model file"
        )
    engine = "torch" if path.endswith(".pt2") else "onnxruntime"
    return InferenceSession(path, policy=Policy(), engine=engine, device="cpu", trust=settings.trust)
