# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Claim` and `VerificationResult`: what a session is verified for, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from xpuruntime.codes import Code
from xpuruntime.evidence.render_text.tables import table
from xpuruntime.files.paths import json_bytes, json_text
from xpuruntime.policies.verify_policy import Inconclusive

if TYPE_CHECKING:
    import os
    from pathlib import Path
    from typing import Self

    from rich.console import RenderableType

__all__ = [
    "SCHEMA",
    "SECTIONS",
    "VERDICTS",
    "Claim",
    "ClaimCode",
    "ClaimVerdict",
    "Section",
    "VerificationResult",
    "place_text",
    "render",
    "worst_first",
]

Section = Literal["evidence", "accuracy", "determinism", "speed", "memory", "start", "audit"]
ClaimVerdict = Literal["pass", "fail", "inconclusive", "unobservable", "skipped"]

#: In the order in which they are checked.
SECTIONS: tuple[Section, ...] = ("evidence", "accuracy", "determinism", "memory", "start", "audit", "speed")
#: The worst first.
VERDICTS: tuple[ClaimVerdict, ...] = ("fail", "inconclusive", "unobservable", "skipped", "pass")


class ClaimCode(Code):
    """Why a claim has its verdict.

    Attributes
    ----------
    rule : str
        Identifier, such as ``"XRT1001"``. It is never given to another code.
    rule_name : str
        Name of the rule in camel case.
    """

    rule: str
    rule_name: str

    def __new__(cls, word: str, rule: str = "", rule_name: str = "", meaning: str = "") -> Self:
        """Make a member of its word, its rule and its meaning."""
        code = str.__new__(cls, word)
        code._value_ = word
        code.rule, code.rule_name, code.meaning = rule, rule_name, meaning
        return code

    OK = "ok", "XRT0000", "Ok", "The claim holds."
    SUBSTITUTED = "substituted", "XRT1001", "KeySubstituted", "Something else ran than a policy key asks for."
    UNSUPPORTED = "unsupported", "XRT1002", "KeyUnsupported", "The engine cannot honour a policy key."
    KEY_INCONCLUSIVE = (
        "key_inconclusive",
        "XRT1003",
        "KeyInconclusive",
        "A policy key was tested without a value to compare.",
    )
    UNOBSERVABLE = "unobservable", "XRT1004", "KeyUnobservable", "Nothing shows whether a policy key was honoured."
    NOT_OBSERVED = (
        "not_observed",
        "XRT1005",
        "RequiredEvidenceMissing",
        "Evidence that the policy requires was not observed.",
    )
    MISPLACED = "misplaced", "XRT1006", "UnitMisplaced", "A unit ran on another device than the plan's."
    INCOMPLETE = "incomplete", "XRT1007", "EvidenceIncomplete", "The instrumented pass broke off or lacks records."
    NOT_OPENED = "not_opened", "XRT1008", "SessionNotOpened", "The model could not be opened under the policy."
    LOCK_DIFFERS = "lock_differs", "XRT1009", "LockEntryDiffers", "Something else ran than the lock records."
    LOCK_STALE = "lock_stale", "XRT1010", "LockStale", "A validator of the lock does not hold here."
    OTHER_MACHINE = (
        "other_machine",
        "XRT1011",
        "OtherMachine",
        "The lock was made on another machine: nothing can be compared.",
    )
    OUT_OF_TOLERANCE = "out_of_tolerance", "XRT2001", "OutputOutOfTolerance", "An output is too far from the reference."
    NOT_COMPARED = "not_compared", "XRT2002", "OutputNotCompared", "An output could not be compared with the reference."
    BELOW_FLOOR = "below_floor", "XRT2003", "MetricBelowFloor", "A metric of the user is below its least value."
    METRIC_FAILED = "metric_failed", "XRT2004", "MetricFailed", "A metric of the user raised, or returned no number."
    METRIC_CRASHED = (
        "metric_crashed",
        "XRT2005",
        "MetricCrashed",
        "A metric of the user ended its process before it returned.",
    )
    METRIC_TIMEOUT = "metric_timeout", "XRT2006", "MetricTimeout", "A metric of the user did not return in time."
    METRIC_NOT_GIVEN = (
        "metric_not_given",
        "XRT2007",
        "MetricNotGiven",
        "The policy has the least value of a metric whose function was not given.",
    )
    METRIC_MEMORY = "metric_memory", "XRT2008", "MetricMemory", "A metric of the user held more memory than it may."
    METRIC_DISK_FULL = (
        "metric_disk_full",
        "XRT2009",
        "MetricDiskFull",
        "A disk was full while a metric of the user ran.",
    )
    NONDETERMINISTIC = (
        "nondeterministic",
        "XRT3001",
        "Nondeterministic",
        "Results do not repeat bit for bit in the grade asked for.",
    )
    NOT_TESTED = "not_tested", "XRT3002", "DeterminismNotTested", "A grade of determinism could not be tested."
    SLOWER = "slower", "XRT4001", "Slower", "The session is slower than its control, beyond the margin."
    UNDECIDED = (
        "undecided",
        "XRT4002",
        "SpeedUndecided",
        "The interval of the slowdown holds the margin after the budget.",
    )
    NOISY = "noisy", "XRT4003", "MachineTooNoisy", "The control differs from itself by too much to compare with."
    WORKER_FAILED = "worker_failed", "XRT4004", "WorkerFailed", "A worker process gave no measurement."
    NO_CONTROL = "no_control", "XRT4005", "NoControl", "There is no control to compare the speed with."
    MEMORY_GROWTH = "memory_growth", "XRT5001", "MemoryGrowth", "The memory of the process grew over repeated runs."
    MEMORY_PEAK = "memory_peak", "XRT5002", "MemoryPeak", "The process held more memory than is allowed."
    SLOW_START = "slow_start", "XRT6001", "SlowStart", "Opening the session took longer than is allowed."
    START_UNDECIDED = (
        "start_undecided",
        "XRT6002",
        "StartUndecided",
        "Times to open the session are too noisy to compare.",
    )
    OTHER_WORK = (
        "other_work",
        "XRT7001",
        "OtherWorkWhenTimed",
        "Outputs of timed runs differ from those of untimed runs.",
    )
    CACHED = "cached", "XRT7002", "ResultsCached", "Repeated inputs are faster than new ones: results are cached."
    CACHE_UNDECIDED = (
        "cache_undecided",
        "XRT7003",
        "CacheUndecided",
        "Times of new and repeated inputs are too noisy to compare.",
    )
    RAISED = "raised", "XRT8001", "CheckRaised", "The engine or the check itself raised an error."
    ALLOWED = "allowed", "XRT9001", "DeviationAllowed", "The policy allows this deviation."
    NOT_APPLICABLE = "not_applicable", "XRT9002", "NotApplicable", "There is nothing to test."


SCHEMA = "xpuruntime.verification/1"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a session is verified for.

    Attributes
    ----------
    id : str
        The section and what in it, such as ``"evidence.execution.precision"``; unique in a result.
    section : str
    requested, observed : str
        What must hold, and what was found, as text.
    verdict : {"pass", "fail", "inconclusive", "unobservable", "skipped"}
        ``inconclusive``: it was tested, and the test did not decide. ``unobservable``: nothing shows it either way.
        ``skipped``: it was not tested; the reason says why.
    code : ClaimCode
        Machine-readable reason.
    reason : str
        One sentence.
    fix : str or None
        The command or the policy edit that resolves it, where one is known.
    figures : dict of str to float
        Measured numbers by name.
    key : str or None
        The policy key that states it.
    line, column : int or None
        Where the policy file states it, counted from 1.
    inconclusive : {"fail", "warn", "pass"} or None
        What this claim does to the exit code where it is inconclusive; ``None``: as `VerificationResult.inconclusive`.
    """

    id: str
    section: Section
    requested: str
    observed: str
    verdict: ClaimVerdict
    code: ClaimCode
    reason: str
    fix: str | None = None
    figures: dict[str, float] = {}
    key: str | None = None
    line: int | None = None
    column: int | None = None
    inconclusive: Inconclusive | None = None

    @property
    def name(self) -> str:
        """The id without the section; the section itself where there is nothing else."""
        return self.id.partition(".")[2] or self.id


class VerificationResult(msgspec.Struct, frozen=True, kw_only=True):
    """All claims of one verification.

    Attributes
    ----------
    schema : str
        ``"xpuruntime.verification/1"``.
    created : str
        When it was made: ISO 8601, UTC.
    version : str
        Of xpuruntime.
    model : str
    model_sha256 : str or None
    policy : str or None
        The policy file; ``None`` where the policy was no file.
    policy_sha256 : str or None
        Of the file, else of the policy as JSON.
    lock : str or None
        The lock file that was verified, if any.
    lock_sha256 : str or None
    engine, device : str or None
        Who ran it; ``None`` where no session could be opened.
    claims : tuple of Claim
        In the order of the sections.
    inconclusive : {"fail", "warn", "pass"} or None
        What an inconclusive claim does to the exit code: 1, 0 with a warning, 0; ``None``: 4.
    comparable : bool
        False where this machine is another than the lock's, so that nothing can be compared: exit code 3.
    notes : tuple of str
        What limits the result, such as inputs that were generated.
    facts : dict of str to str
        What of the machine can change a result: load, throttling, clocks, packages.
    """

    schema: str = SCHEMA
    created: str = ""
    version: str = ""
    model: str
    model_sha256: str | None = None
    policy: str | None = None
    policy_sha256: str | None = None
    lock: str | None = None
    lock_sha256: str | None = None
    engine: str | None = None
    device: str | None = None
    claims: tuple[Claim, ...] = ()
    inconclusive: Inconclusive | None = None
    comparable: bool = True
    notes: tuple[str, ...] = ()
    facts: dict[str, str] = {}

    def of(self, *verdicts: ClaimVerdict) -> tuple[Claim, ...]:
        """Return the claims with one of these verdicts, in their order."""
        return tuple(one for one in self.claims if one.verdict in verdicts)

    def effect(self, claim: Claim) -> Literal["fail", "undecided", "warn", "none"]:
        """Return what a claim does to the exit code."""
        if claim.verdict == "fail":
            return "fail"
        if claim.verdict != "inconclusive":
            return "none"
        word = claim.inconclusive or self.inconclusive
        return {"fail": "fail", "warn": "warn", "pass": "none", None: "undecided"}[word]  # type: ignore[return-value]

    @property
    def verdict(self) -> Literal["pass", "warn", "fail", "inconclusive"]:
        """What came of it as a whole; ``warn``: passed, with inconclusive claims that only warn."""
        effects = {self.effect(one) for one in self.claims}
        if "fail" in effects:
            return "fail"
        if "undecided" in effects or not self.comparable or not self._anything:
            return "inconclusive"
        return "warn" if "warn" in effects else "pass"

    @property
    def exit_code(self) -> int:
        """The exit code of ``xrt verify``: 0 passed, 1 failed, 3 not comparable here, 4 inconclusive."""
        if self.verdict == "inconclusive":
            return 4 if self.comparable else 3
        return 1 if self.verdict == "fail" else 0

    @property
    def _anything(self) -> bool:
        """Whether anything was tested to an end, or left undecided by consent."""
        return any(one.verdict in ("pass", "fail", "inconclusive") for one in self.claims)

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        if not self.comparable:
            return "not comparable: this is another machine than the lock's"
        if not self._anything:
            return "nothing verified"
        counts = [
            (len(self.of(verdict)), _WORDS[verdict]) for verdict in VERDICTS if verdict not in ("skipped", "pass")
        ]
        told = [f"{number} {word}" for number, word in counts if number]
        passed = len(self.of("pass"))
        if not told:
            return f"verified: {passed} claim{'' if passed == 1 else 's'} passed"
        return ", ".join([*told, f"{passed} passed"] if passed else told)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and scalars, with `headline`, `verdict` and `exit_code` in them."""
        found: dict[str, Any] = msgspec.json.decode(json_bytes(self))
        said = {"headline": self.headline, "verdict": self.verdict, "exit_code": self.exit_code}
        return {"schema": found.pop("schema"), **said, **found}

    def to_json(self, indent: int | None = 2) -> str:
        """Return JSON text; `indent` ``None`` gives one line."""
        return json_text(self.to_dict(), indent=indent)

    def to_html(self) -> str:
        """Return one page for a browser, which loads nothing from elsewhere: style, script and data are in it."""
        from xpuruntime.locks.verification.pages import render_page

        return render_page(self)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page of `to_html`, as `save` does with the format ``"html"``."""
        return self.save(path, "html")

    def save(self, path: str | os.PathLike[str], format: str = "json") -> Path:
        """Write the result in a format: a name of `xpuruntime.locks.verification.formats.FORMATS`.

        The file is replaced as a whole or not at all.

        Raises
        ------
        InputError
            There is no such format, or the file cannot be written.
        """
        from xpuruntime.locks.verification.formats import write_output

        return write_output(self, format, path)

    def __str__(self) -> str:
        from xpuruntime.evidence.render_text.tables import plain

        return plain(self.__rich__(), width=100)

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import rich_fragment

        return rich_fragment(self.__rich__())

    def __rich__(self) -> RenderableType:

        return render(self)


_WORDS = {"fail": "failed", "inconclusive": "inconclusive", "unobservable": "unobservable"}


_STYLE = {"pass": "green", "fail": "bold red", "inconclusive": "bold yellow", "unobservable": "yellow", "skipped": ""}
_HEAD = {"pass": "bold green", "warn": "bold yellow", "fail": "bold red", "inconclusive": "bold yellow"}
_WIDTHS = {"claim": 24, "verdict": 12}


def worst_first(claims: tuple[Claim, ...]) -> list[Claim]:
    """Return claims by verdict, the worst first, otherwise in their order."""
    return sorted(claims, key=lambda one: VERDICTS.index(one.verdict))


def place_text(result: VerificationResult, claim: Claim) -> str:
    """Return where the policy states a claim, such as ``"policy.yaml:7:3"``; empty where no file does."""
    return f"{result.policy}:{claim.line}:{claim.column}" if result.policy and claim.line else ""


def render(result: VerificationResult) -> RenderableType:
    """Return headline, a table of all claims, and the reasons of those that did not pass."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(result.headline, style=_HEAD[result.verdict])]
    where = f"{result.model} on {result.engine}@{result.device}" if result.engine else result.model
    parts.append(Text(where + (f", lock {result.lock}" if result.lock else "")))
    claims = worst_first(result.claims)
    if claims:
        shown = table("claims", ("claim", "requested", "observed", "verdict"), widths=_WIDTHS)
        for one in claims:
            shown.add_row(
                Text(one.id), Text(one.requested), Text(one.observed), Text(one.verdict, style=_STYLE[one.verdict])
            )
        parts.append(shown)
    for one in claims:
        if one.verdict == "pass":
            continue
        place = place_text(result, one)
        parts.append(Text(f"{one.verdict}: {one.id}: {one.reason}{f' ({place})' if place else ''}"))
        if one.fix:
            parts.append(Text(f"  fix: {one.fix}"))
    parts += [Text(f"note: {note}") for note in result.notes]
    return Group(*parts)
