# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Candidate` and `Trial`: a policy that is tried, the outcome of opening it, and the exceptions of measuring it."""

from __future__ import annotations

from typing import Any

import msgspec

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.measuring.statistics import CandidateCode

__all__ = ["CONTROL", "USED_UP", "Candidate", "CandidateFailed", "DeviceLost", "OutOfTime", "Trial"]

#: The id of the user's own policy.
CONTROL = "c0"
#: Why something was not measured, or not to its end.
USED_UP = "the budget of time was used up"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that is tried."""

    id: str
    engine: str
    device: str
    changes: dict[str, Any]
    policy: dict[str, Any]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What came of opening a candidate and comparing its outputs."""

    code: CandidateCode | None = None
    reason: str = ""
    start: float | None = None
    memory: int | None = None
    error: float | None = None
    cosine: float | None = None
    run: float | None = None
    graph: str | None = None
    seconds: float = 0.0


class CandidateFailed(XpuRuntimeError):  # noqa: N818  read as a sentence
    """A candidate failed while it was measured. Private to this package: it becomes the candidate's code and reason."""

    def __init__(self, code: CandidateCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = CandidateCode(code), reason


class DeviceLost(XpuRuntimeError):  # noqa: N818  read as a sentence
    """The device that candidates were measured on went away: no fault of theirs."""


class OutOfTime(XpuRuntimeError):  # noqa: N818  read as a sentence
    """The budget ended while something was measured. It is no fault of the candidate's, and no line of the journal."""

    def __init__(self) -> None:
        super().__init__(USED_UP)
