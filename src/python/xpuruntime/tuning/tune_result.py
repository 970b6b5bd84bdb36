# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Search results: the winner or why there is none, as values and JSON; and progress of a search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import msgspec

from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.evidence.documents import Page
from xpuruntime.files.writing import write_whole
from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.policies import Policy
from xpuruntime.policies.kinds import share_text

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from rich.console import RenderableType

__all__ = [
    "CALLED",
    "SCHEMA",
    "CandidateResult",
    "Ratio",
    "TuneProgress",
    "TuneResult",
]

SCHEMA = "xpuruntime.tune_result/1"

#: Calls of a session, in words.
CALLED = {"run": "plain runs", "bind": "bound runs"}
#: What the candidate does to the objective where it is better.
_BETTER = {"memory": "less memory", "energy": "less energy"}


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A gain with its interval: how many times better a candidate is than another, 1.31 [1.28, 1.34].

    Attributes
    ----------
    value, low, high : float
    against : str
        The id of the other.
    rounds : int
    """

    value: float
    low: float
    high: float
    against: str
    rounds: int

    def __str__(self) -> str:
        """Return it as text."""
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


class CandidateResult(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate and its result.

    Attributes
    ----------
    id : str
        ``"c0"`` is the user's own policy.
    engine : str
    device : str
        Where it was opened and raced.
    changes : dict of str to object
        Policy keys that it states beside or in place of those of the base policy.
    code : CandidateCode
    reason : str
        One sentence.
    figure : float or None
        Median of its turns, in the unit of the objective: seconds, bytes or joules; of throughput, seconds a row.
    gain : Ratio or None
        Against whom it raced.
    start : float or None
        Seconds until the first result.
    memory : int or None
        Most bytes of the process.
    error : float or None
        Largest difference from the reference, as a share of its largest magnitude.
    cosine : float or None
    cuda_graph : str or None
        Of bound runs: ``"captured"``, ``"off"``, or the reason why none was captured.
    """

    id: str
    engine: str
    device: str
    changes: dict[str, Any]
    code: CandidateCode
    reason: str
    figure: float | None = None
    gain: Ratio | None = None
    start: float | None = None
    memory: int | None = None
    error: float | None = None
    cosine: float | None = None
    cuda_graph: str | None = None


class TuneResult(Page, frozen=True, kw_only=True):
    """What a search found.

    Attributes
    ----------
    schema : str
    created : str
        ISO 8601, UTC.
    version : str
        Of xpuruntime.
    model : str
    model_sha256 : str
    objective : str
    batch, concurrency : int
    call : {"run", "bind"}
        How the model was called: ``session.run`` with host arrays, or bound buffers.
    inputs : str
        Where the inputs are from.
    devices : tuple of str
        Those that candidates were measured on.
    hardware : dict of str to object
        What these devices are of.
    verdict : {"winner", "tied", "none", "undecided"}
        ``none``: no candidate keeps the constraints. ``undecided``: the budget ended before anything was proven.
    reason : str
        One sentence.
    winner : str or None
        The id of the candidate that won.
    gain : Ratio or None
        Of the final duel: how many times better than the user's own policy.
    changes : dict of str to object
        Policy keys of the winner that differ from the user's own policy.
    policy : dict
        The policy to use: that of the winner, else the user's own.
    min_effect, confidence : float
    candidates : tuple of CandidateResult
    front : tuple of str
        Candidates of which none other is better in objective, memory and error at once.
    stages : dict of str to int
        How many candidates each stage had.
    elapsed, budget : float
        Seconds.
    notes : tuple of str
        What limits the result.
    """

    STATED: ClassVar = ("headline", "exit_code")

    schema: str = SCHEMA
    created: str = ""
    version: str = ""
    model: str
    model_sha256: str = ""
    objective: str
    batch: int = 1
    concurrency: int = 1
    call: Literal["run", "bind"] = "run"
    inputs: str = ""
    devices: tuple[str, ...] = ()
    hardware: dict[str, Any] = msgspec.field(default_factory=dict)
    verdict: Literal["winner", "tied", "none", "undecided"]
    reason: str
    winner: str | None = None
    gain: Ratio | None = None
    changes: dict[str, Any] = msgspec.field(default_factory=dict)
    policy: dict[str, Any] = msgspec.field(default_factory=dict)
    min_effect: float
    confidence: float
    candidates: tuple[CandidateResult, ...] = ()
    front: tuple[str, ...] = ()
    stages: dict[str, int] = msgspec.field(default_factory=dict)
    elapsed: float = 0.0
    budget: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The exit code of ``xrt tune``: 0 a winner or a proven tie, 1 no candidate, 4 undecided."""
        return {"winner": 0, "tied": 0, "none": 1, "undecided": 4}[self.verdict]

    @property
    def headline(self) -> str:
        """The result in one line."""
        if self.verdict == "winner":
            better = _BETTER.get(self.objective, "faster")
            return f"{self.gain} {better}" if self.gain is not None else "a policy that keeps the constraints"
        if self.verdict == "tied":
            return f"tied: nothing is better by {share_text(self.min_effect)}"
        return "no candidate keeps the constraints" if self.verdict == "none" else "undecided"

    @property
    def question(self) -> str:
        """What was measured, and how the model was called, in words."""
        load = f"at batch {self.batch} and concurrency {self.concurrency}"
        return f"{self.objective} of {CALLED[self.call]} {load}"

    def candidate(self, id: str) -> CandidateResult:
        """Return a candidate by its id. Raises KeyError."""
        return {candidate.id: candidate for candidate in self.candidates}[id]

    def tuned_policy(self) -> Policy:
        """Return the policy to use: that of the winner, else the user's own.

        Raises
        ------
        UnsupportedOperationError
            Nothing keeps the constraints, or nothing was decided.
        """
        if self.verdict in ("none", "undecided"):
            raise UnsupportedOperationError(f"there is no tuned policy: {self.reason}")
        return Policy.coerce(self.policy)

    def write_policy(self, path: str | os.PathLike[str]) -> Path:
        """Write the policy to use, as YAML with a comment that has the interval.

        Raises
        ------
        UnsupportedOperationError
        InputError
            The file cannot be written.
        """
        policy = self.tuned_policy()
        named = ", ".join(self.changes) or "nothing"
        lines = [
            f"# {self.headline}, {self.question}, confidence {self.confidence:g}",
            f"# of {self.model}, by xrt tune {self.version} on {self.created}; changed: {named}",
        ]
        text = "".join(f"{' '.join(line.split())}\n" for line in lines)
        return write_whole(path, text + policy.dumps("yaml"), "the policy")

    def to_html(self) -> str:
        """Return one page for a browser, which loads nothing from elsewhere: style, script and data are in it."""
        from xpuruntime.tuning.result_text import render_page

        return render_page(self)

    def __rich__(self) -> RenderableType:
        """Return headline and tables."""
        from xpuruntime.tuning.result_text import render

        return render(self)


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
