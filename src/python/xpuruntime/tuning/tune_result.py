# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Search results: the winner or why there is none, as values, JSON, text, tables and a page; progress of a search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import msgspec

from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.evidence.documents import Page
from xpuruntime.evidence.page.document import assemble
from xpuruntime.files.writing import write_whole
from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.notebook import Badge, escaped, fragment, fragment_table
from xpuruntime.policies import Policy
from xpuruntime.policies.kinds import share_text
from xpuruntime.printable import bytes_text
from xpuruntime.tables import table

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from rich.console import RenderableType

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
        return render_page(self)

    def __rich__(self) -> RenderableType:
        """Return headline and tables."""
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


_HEAD = {"winner": "bold green", "tied": "bold green", "none": "bold red", "undecided": "bold yellow"}
_STYLE = {
    CandidateCode.WINNER: "bold green",
    CandidateCode.CONTROL: "cyan",
    CandidateCode.UNDECIDED: "yellow",
}
_MOST = 25


def changes_text(changes: Mapping[str, Any]) -> str:
    """Return changed keys in short, such as ``"openvino threads=1"``."""
    words: list[str] = []
    for key, value in changes.items():
        name = key.removeprefix("execution.")
        if name == "engine":
            words.insert(0, str(value))
        elif name != "device":
            words.append(f"{name.rpartition('.')[2] if name.startswith('provider_options.') else name}={value}")
    return " ".join(words) or "the policy that was given"


def figure_text(objective: str, figure: float | None) -> str:
    """Return a figure of an objective with its unit."""
    if figure is None:
        return "-"
    if objective == "throughput":
        return f"{1 / figure:,.1f} rows/s"
    if objective == "memory":
        return bytes_text(round(figure))
    if objective == "energy":
        return f"{figure:.4g} J"
    return f"{figure * 1e6:,.1f} us" if figure < 0.01 else f"{figure * 1e3:,.2f} ms"


def ranked(result: TuneResult) -> list[CandidateResult]:
    """Return the candidates, the winner first, then the control, then by figure; those without one at the end."""
    order = {CandidateCode.WINNER: 0, CandidateCode.CONTROL: 1}
    return sorted(
        result.candidates,
        key=lambda candidate: (order.get(candidate.code, 2), candidate.figure is None, candidate.figure or 0.0),
    )


def render(result: TuneResult) -> RenderableType:
    """Return headline, the policy that was found, and a table of candidates."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(result.headline, style=_HEAD[result.verdict]), Text(result.reason)]
    parts.append(Text(f"{result.model}: {result.question}, confidence {result.confidence:g}, {result.elapsed:.0f} s"))
    if result.changes:
        parts.append(Text("changed: " + ", ".join(f"{key}: {value}" for key, value in result.changes.items())))
    several = len(result.devices) > 1
    if several:
        parts.append(Text(f"devices: {', '.join(result.devices)}"))
    device = ("device",) if several else ()
    shown = table(
        "candidates", ("id", "candidate", *device, result.objective, "gain", "memory", "max rel error", "code")
    )
    rows = ranked(result)
    for row in rows[:_MOST]:
        shown.add_row(
            Text(row.id), Text(changes_text(row.changes)), *((Text(row.device),) if several else ()),
            figure_text(result.objective, row.figure),
            "-" if row.gain is None else f"{row.gain} of {row.gain.against}",
            "-" if row.memory is None else bytes_text(row.memory),
            "-" if row.error is None else f"{row.error:.2g}",
            Text(row.code, style=_STYLE.get(row.code, "")),
        )  # fmt: skip
    parts.append(shown)
    if len(rows) > _MOST:
        parts.append(Text(f"and {len(rows) - _MOST} more; the HTML page and the JSON have all, with their reasons"))
    of: dict[str, list[str]] = {}
    for row in rows[:_MOST]:
        if row.code not in (CandidateCode.CONTROL, CandidateCode.DUPLICATE):
            of.setdefault(row.reason, []).append(row.id)
    parts += [Text(f"{', '.join(ids)}: {reason}") for reason, ids in of.items()]
    parts += [Text(f"note: {note}") for note in result.notes]
    return Group(*parts)


_PARTS = ("elements", "sorting", "intervals", "tuned", "shell", "tuning")


def render_page(result: TuneResult) -> str:
    """Return the page. It loads nothing, from nowhere, and shows all text of the result as text."""
    name = result.model.replace("\\", "/").rpartition("/")[2]
    return assemble("tuning.html", "search", _PARTS, f"{result.headline} - {name}", _data(result), _fragment(result))


def _data(result: TuneResult) -> dict[str, Any]:
    known = [
        ("model", result.model),
        ("objective", result.question),
        ("inputs", result.inputs),
        ("devices", ", ".join(result.devices)),
        ("decided", f"at a confidence of {result.confidence:g}, gains from {share_text(result.min_effect)}"),
        ("took", f"{result.elapsed:.0f} s of {result.budget:.0f} s"),
        ("created", result.created),
        ("version", result.version),
        ("exit code", str(result.exit_code)),
        *((stage, str(count)) for stage, count in result.stages.items()),
    ]
    return {
        "headline": result.headline,
        "reason": result.reason,
        "exit": result.exit_code,
        "objective": result.objective,
        "least": 1 + result.min_effect,
        "known": [list(pair) for pair in known if pair[1]],
        "candidates": [_candidate(result, candidate) for candidate in ranked(result)],
        "policy": Policy.coerce(result.policy).dumps("yaml") if result.policy else "",
        "notes": list(result.notes),
    }


def _candidate(result: TuneResult, candidate: CandidateResult) -> dict[str, Any]:
    return {
        "id": candidate.id,
        "engine": candidate.engine or "-",
        "name": changes_text(candidate.changes),
        "keys": [
            *([key, str(value)] for key, value in candidate.changes.items()),
            *([["measured on", candidate.device]] if len(result.devices) > 1 and candidate.figure is not None else []),
            *([["CUDA graph", candidate.cuda_graph]] if candidate.cuda_graph not in (None, "off") else []),
        ],
        "code": candidate.code,
        "reason": candidate.reason,
        "ran": candidate.figure is not None,
        "front": candidate.id in result.front,
        "figure": candidate.figure,
        "figureText": figure_text(result.objective, candidate.figure),
        "gain": None if candidate.gain is None else candidate.gain.value,
        "interval": None
        if candidate.gain is None
        else {name: getattr(candidate.gain, name) for name in ("value", "low", "high", "against")},
        "gainText": "-" if candidate.gain is None else f"{candidate.gain} of {candidate.gain.against}",
        "memory": candidate.memory,
        "memoryText": "-" if candidate.memory is None else bytes_text(candidate.memory),
        "error": candidate.error,
        "errorText": "-" if candidate.error is None else f"{candidate.error:.2g}",
        "start": candidate.start,
        "startText": "-" if candidate.start is None else f"{candidate.start:.2f} s",
    }


def _fragment(result: TuneResult) -> str:
    """Return headline and candidates, for browsers without scripts."""
    kind = {0: "honoured", 1: "substituted"}.get(result.exit_code, "unobservable")
    rows = [
        (
            candidate.id,
            changes_text(candidate.changes),
            figure_text(result.objective, candidate.figure),
            Badge(candidate.code),
            candidate.reason,
        )
        for candidate in ranked(result)
    ]
    head = f"<p class='xrt-headline xrt-{kind}'>{escaped(result.headline)}</p>"
    columns = ("id", "candidate", "figure", "code", "reason")
    return fragment([head, fragment_table("Candidates", columns, rows)])
