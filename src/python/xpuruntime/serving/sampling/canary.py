# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Canary`: sampled answers compared with those of a reference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.evidence.tolerances import compare_within
from xpuruntime.serving.batching.requests import check_request
from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.models.opening import batch_feeds
from xpuruntime.serving.sampling.watcher import Watcher, tolerance_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.evidence.tolerances import ProbeResult
    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.serving.batching.layout import Layout
    from xpuruntime.serving.batching.requests import Feed
    from xpuruntime.serving.models.model_settings import CanarySettings, ModelSettings

__all__ = ["Canary"]


class Canary(Watcher):
    """Compares sampled answers with those of a reference.

    Parameters
    ----------
    session : InferenceSession
    layout : Layout
    settings : ModelSettings
    canary : CanarySettings
    reference : InferenceSession or None
        ``None``: the session itself, with the request alone.
    """

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
            self.drift = max((one.max_rel for one in result.outputs), default=0.0)
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
