# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Measurements of a lock: times, memory and samples of outputs, which are no part of its identity."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypedDict

import msgspec

from xpuruntime.policies.kinds import share_text

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Bytes = Annotated[int, msgspec.Meta(ge=0)]
_Figure = Annotated[float, msgspec.Meta(gt=0)]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen, keyword-only value; a file with a key that it lacks is refused."""


class OutputSample(_Record, frozen=True, kw_only=True):
    """Values of one output at evenly spaced places, to compare within a tolerance."""

    name: str
    at: str
    values: tuple[float, ...]


class LatencyFigures(TypedDict, total=False):
    """Times of whole runs in microseconds.

    Attributes
    ----------
    p50, fastest, slowest : float
    rounds, calls : int
        How many rounds were timed, and the calls in each.
    call : {"run", "bind"}
        What was timed; ``"run"`` where it is left out.
    remarks : list of str
        What else the machine did meanwhile.
    """

    p50: _Figure
    fastest: _Figure
    slowest: _Figure
    rounds: _Count
    calls: _Count
    call: Literal["run", "bind"]
    remarks: list[str]


class LockedRatio(_Record, frozen=True, kw_only=True):
    """How long something took beside a control that was timed in the same rounds.

    Attributes
    ----------
    control : {"reference", "anchor"}
        As ``verify.speed.control`` of a policy.
    ratio, low, high : float
        Median of the ratios of the rounds, and its interval.
    confidence : float
        Of the interval.
    rounds : int
    margin : float
        Of speed: the slowdown that counted, as a share; a lock of an earlier release does not have it.
    """

    control: Literal["reference", "anchor"]
    ratio: _Figure
    low: _Figure
    high: _Figure
    confidence: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    rounds: _Count
    margin: _Figure | msgspec.UnsetType = msgspec.UNSET

    def doubt(self, metric: str, margin: float) -> str:
        """Return why a slowdown by a margin, a share, cannot be decided against this ratio; empty where it can."""
        off = self.high / self.ratio - 1
        if off <= margin / 2:
            return ""
        rounds = math.ceil(self.rounds * (math.log1p(off) / math.log1p(margin / 2)) ** 2)
        return (
            f"this lock cannot decide a slowdown of {share_text(margin)} of {metric}: its ratio {self.ratio:.3f} "
            f"[{self.low:.3f}, {self.high:.3f}] may be off by {share_text(off)}, more than half of that. "
            f"It takes about {rounds} rounds in place of {self.rounds}, a margin of {share_text(2 * off)}, "
            "or a quieter machine"
        )


class BatchTime(_Record, frozen=True, kw_only=True):
    """How long runs of one batch size took, on arrays of the host.

    Attributes
    ----------
    rows : int
    median_us, longest_us : float
    runs : int
        How many were timed.
    """

    rows: _Count
    median_us: _Figure
    longest_us: _Figure
    runs: _Count


class SessionMemory(_Record, frozen=True, kw_only=True):
    """What one more session of the model takes of its device.

    Attributes
    ----------
    device : str
    bytes : int
    rows : int
        Of the batches that it had run.
    """

    device: str
    bytes: _Bytes
    rows: _Count


class Measured(_Record, frozen=True, kw_only=True):
    """What was measured when the lock was made; no part of the identity.

    Attributes
    ----------
    latency_us : LatencyFigures
        Of plain runs, or with ``call: bind`` of bound ones; empty where none was timed.
    ratios : dict of str to LockedRatio
        By ``"latency.p50"``, ``"latency.p99"`` and ``"start"``: those that the policy's section ``verify`` asks for.
    memory_peak : int or None
        Bytes that a process of its own held at most while it opened the model and ran it; ``None`` where the policy
        has no section ``verify``, or the operating system does not report it.
    samples : tuple of OutputSample
        Of outputs whose grade is ``"tolerance"``.
    batches : tuple of BatchTime
        Times by batch size in ascending order, all other sizes being the locked ones: those that were asked for.
    memory : SessionMemory or None
        Measured with the largest of `batches`; ``None`` where there are none, or the system does not say.
    """

    latency_us: LatencyFigures = {}
    ratios: dict[str, LockedRatio] = {}
    memory_peak: _Bytes | None = None
    samples: tuple[OutputSample, ...] = ()
    batches: tuple[BatchTime, ...] = ()
    memory: SessionMemory | None = None

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why slowdowns that the policy does not allow cannot be decided against the ratios."""
        names = ((name, ratio, ratio.margin) for name, ratio in self.ratios.items())
        texts = (figure.doubt(name, margin) for name, figure, margin in names if margin is not msgspec.UNSET)
        return tuple(text for text in texts if text)
