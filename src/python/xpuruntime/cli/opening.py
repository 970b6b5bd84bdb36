# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Open a session from a command's options."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.cli.inputs import Feeds, read_feeds
from xpuruntime.cli.output import error_line, working

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.inference import InferenceSession

__all__ = ["Choice", "open_session", "prepare"]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What the options that every session takes say; ``None`` leaves it to the policy."""

    policy: str | None = None
    device: str | None = None
    engine: str | None = None
    precision: str | None = None
    calibration: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `InferenceSession` and of `plan`. Engines may be a list with commas."""
        names = self.engine.split(",") if self.engine and "," in self.engine else self.engine
        return {
            "policy": self.policy,
            "device": self.device,
            "engine": names,
            "precision": self.precision,
            "calibration": self.calibration,
        }


def prepare(model: str, values: list[str] | None, dims: list[str] | None) -> tuple[ModelInfo, Feeds]:
    """Read the model's facts and its inputs, and say on stderr when inputs are made up."""
    from xpuruntime.engines.model import read_model
    from xpuruntime.inference.artifacts import artifact_model

    info = artifact_model(model) or read_model(model)
    feeds = read_feeds(info, values, dims)
    note = feeds.note()
    if note:
        error_line(note, label="note")
    return info, feeds


def open_session(model: str, choice: Choice, *, as_json: bool) -> tuple[InferenceSession, float]:
    """Plan and load a model. Return the session and how long that took, in microseconds."""
    from xpuruntime.inference import InferenceSession

    start = time.perf_counter_ns()
    with working("planning and loading", as_json=as_json):
        session = InferenceSession(model, **choice.arguments())
    return session, (time.perf_counter_ns() - start) / 1e3
