# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Shadow`: a share of the requests under a second policy, with a verdict on outputs and times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.tolerances import compare_within
from xpuruntime.measuring.statistics import Margin, RatioComparison, RatioVerdict, compare, look_rounds
from xpuruntime.serving.sampling.watcher import Watcher, tolerance_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.serving.batching.layout import Layout
    from xpuruntime.serving.batching.requests import Feed
    from xpuruntime.serving.models.model_settings import ModelSettings, ShadowSettings

__all__ = ["Shadow"]

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
            self.worst = max(self.worst, *(one.max_rel for one in result.outputs), 0.0)
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
            found = self.comparison
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
                if found is None
                else {
                    "verdict": found.verdict.value,
                    "ratio": found.ratio,
                    "low": found.low,
                    "high": found.high,
                    "confidence": found.confidence,
                    "margin": found.margin,
                    "rounds": found.rounds,
                    "too_noisy": found.too_noisy,
                },
                "rounds": len(self._times["shadow"]),
                "next_look": next((one for one in self._looks if one > len(self._times["shadow"])), None),
            }

    def _close(self) -> None:
        self._other.close()
