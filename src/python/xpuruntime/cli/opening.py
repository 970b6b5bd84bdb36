# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Open a session from a command's options."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from xpuruntime.cli.inputs import Feeds, read_feeds
from xpuruntime.cli.output import error_line, working

if TYPE_CHECKING:
    from xpuruntime.cli.choice import Choice
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.inference import InferenceSession

__all__ = ["open_session", "prepare"]


def prepare(
    model: str, values: list[str] | None, dims: list[str] | None, *, trust: bool = False
) -> tuple[ModelInfo, Feeds]:
    """Read the model's facts and its inputs, and say on stderr when inputs are made up."""
    from xpuruntime.engines.model import read_model
    from xpuruntime.inference.artifacts import artifact_model

    info = artifact_model(model) or read_model(model, trust=trust)
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
