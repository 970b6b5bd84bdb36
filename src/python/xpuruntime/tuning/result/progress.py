# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TuneProgress`: the state of a running search, for progress callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from xpuruntime.tuning.result.tune_result import CandidateResult

__all__ = ["TuneProgress"]


class TuneProgress(NamedTuple):
    """Where a search stands.

    Attributes
    ----------
    stage : str
    elapsed, budget : float
        Seconds.
    candidates : tuple of CandidateResult
        Those known so far.
    live : tuple of str
        Those that are measured now, on all devices.
    round, rounds : int
        Of the race or duel that went on last, and the most it may have.
    """

    stage: str
    elapsed: float
    budget: float
    candidates: tuple[CandidateResult, ...]
    live: tuple[str, ...] = ()
    round: int = 0
    rounds: int = 0
