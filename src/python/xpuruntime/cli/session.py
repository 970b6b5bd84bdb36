# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Model, inputs and session of a command line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from xpuruntime.cli.inputs import Feeds, read_feeds
from xpuruntime.cli.output import error_line, working

if TYPE_CHECKING:
    from xpuruntime.cli.session_options import SessionOptions
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.inference import InferenceSession

__all__ = ["open_session", "prepare", "report_probe_inputs"]


def prepare(
    model: str, values: list[str] | None, dims: list[str] | None, *, trust: bool = False
) -> tuple[ModelInfo, Feeds]:
    """Read the model's facts and its inputs."""
    from xpuruntime.artifacts.manifest import artifact_model
    from xpuruntime.engines.model import read_model

    info = artifact_model(model) or read_model(model, trust=trust)
    return info, read_feeds(info, values, dims)


def report_probe_inputs(feeds: Feeds) -> None:
    """Print on stderr which inputs are generated."""
    note = feeds.note()
    if note:
        error_line(note, label="note")


def open_session(
    model: str,
    session_options: SessionOptions,
    feeds: Feeds,
    *,
    as_json: bool,
    lock: str | None = None,
    frozen: bool = False,
) -> tuple[InferenceSession, float]:
    """Plan and load a model. Return the session and how long that took, in microseconds.

    What `feeds` generated is said once the session is open: a policy that is wrong is said alone. Inputs that are given
    are those with which a converted model is compared with fp32.
    """
    from xpuruntime.inference import InferenceSession

    start = time.perf_counter_ns()
    with working("planning and loading", as_json=as_json):
        arguments = session_options.arguments()
        if lock is None and _probes_with(session_options, feeds):
            arguments["calibration"] = [dict(feeds.arrays)]
        session = InferenceSession(model, lock=lock, frozen=frozen, **arguments)
    took = (time.perf_counter_ns() - start) / 1e3
    report_probe_inputs(feeds)
    return session, took


def _probes_with(session_options: SessionOptions, feeds: Feeds) -> bool:
    """Whether the first calibration input, which is to be the one given, is a probe and nothing else here."""
    from pathlib import Path

    from xpuruntime.policies import Policy

    if feeds.probed or not feeds.arrays or session_options.calibration is not None:
        return False
    stated = (
        Policy.coerce(session_options.policy)
        if session_options.policy is not None and Path(session_options.policy).is_file()
        else None
    )
    if stated is not None and stated.calibration is not None:
        return False
    precision = session_options.precision or (stated.execution.precision if stated is not None else None)
    return precision in ("fp16", "bf16") or (stated is not None and stated.accuracy is not None and precision != "int8")
