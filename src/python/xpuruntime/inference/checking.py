# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`compare_session`: the outputs of an open session beside those of fp32 on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.accuracy import limits_of
from xpuruntime.evidence.tolerances import compare_within
from xpuruntime.inference.loading import reference_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.evidence.tolerances import ProbeResult, Tolerance
    from xpuruntime.inference.session import InferenceSession

__all__ = ["compare_session", "tolerance_of"]


def compare_session(session: InferenceSession, inputs: Mapping[str, Any] | None) -> ProbeResult:
    """Run a session and the model as it is, in fp32 on the CPU, and compare within the tolerance of the session."""
    request = session._request
    reference = reference_of(session._engine, request, session._machine, inputs)
    answer = session.run(reference.feeds)
    return compare_within(reference.outputs, answer, tolerance_of(session), session.model.random_outputs)


def tolerance_of(session: InferenceSession) -> Tolerance:
    """Return how far from the reference the outputs of a session may be."""
    return limits_of(session._request, session.plan.settings.get("computes"))
