# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of a verification, and what they are made about."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import msgspec

from xpuruntime.codes import Code
from xpuruntime.inference.locked import surroundings
from xpuruntime.lockfile.drift import ValidatorKind
from xpuruntime.lockfile.validators import compare_validators
from xpuruntime.policies.document import position_of
from xpuruntime.policies.verify_policy import Inconclusive, VerifyPolicy

if TYPE_CHECKING:
    from xpuruntime.inference import InferenceSession
    from xpuruntime.lockfile.measured import LockedRatio
    from xpuruntime.lockfile.records import Lock
    from xpuruntime.locks.verification.metrics import FileMetric, Metric
    from xpuruntime.locks.verification.result import VerificationResult
    from xpuruntime.policies import Policy, VerifySpeed
    from xpuruntime.policies.files import Document

Section = Literal["evidence", "accuracy", "generation", "determinism", "speed", "memory", "start", "audit"]
ClaimVerdict = Literal["pass", "fail", "inconclusive", "unobservable", "skipped"]

#: In the order in which they are checked.
SECTIONS: tuple[Section, ...] = (
    "evidence", "accuracy", "generation", "determinism", "memory", "start", "audit", "speed"
)  # fmt: skip
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
        Where the policy file states it, or where the lock has what differs, counted from 1.
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


def worst_first(claims: tuple[Claim, ...]) -> list[Claim]:
    """Return claims by verdict, the worst first, otherwise in their order."""
    return sorted(claims, key=lambda claim: VERDICTS.index(claim.verdict))


def place_text(result: VerificationResult, claim: Claim) -> str:
    """Return where a file states a claim, such as ``"policy.yaml:7:3"``; empty where none does."""
    file = result.file_of(claim)
    return f"{file}:{claim.line}:{claim.column or 1}" if file and claim.line else ""


class Subject(NamedTuple):
    """Session, policy, inputs and limits that the sections share."""

    session: InferenceSession
    model: Any
    document: Document | None
    feeds: dict[str, Any]
    own_inputs: bool
    reopen: Callable[[], InferenceSession]
    opened_s: float
    metrics: tuple[Metric | FileMetric, ...]
    sections: frozenset[str]
    budget: float | None
    against: str | None
    lock: str | None
    locked: Lock | None
    options: dict[str, Any]

    @property
    def policy(self) -> Policy:
        """The policy of the session."""
        return self.session.policy

    @property
    def trust(self) -> bool:
        """Whether the session was opened with ``trust``."""
        trusted: bool = self.options["trust"]
        return trusted

    @property
    def limits(self) -> VerifyPolicy:
        """The policy's section ``verify``, or its defaults."""
        return self.policy.verify or VerifyPolicy()

    def placed(self, claim: Claim, key: str) -> Claim:
        """Return a claim with the policy key that states it, and where the policy file does so."""
        position = None if self.document is None else position_of(self.document.root, key)
        line, column = position or (None, None)
        return msgspec.structs.replace(claim, key=key, line=line, column=column)


#: Kinds of validators that identify a machine.
MACHINE = (ValidatorKind.DEVICE, ValidatorKind.CPU_ISA)


def elsewhere(subject: Subject, id: str, section: Section) -> Claim | None:
    """Return the claim of a lock that was made on another machine, of which figures cannot be compared."""
    lock, session = subject.locked, subject.session
    if lock is None:
        return None
    identity = msgspec.structs.replace(
        lock.identity,
        validators=tuple(validator for validator in lock.identity.validators if validator.kind in MACHINE),
    )
    plan = session.plan
    here = surroundings(plan.engine, plan.device, session._machine, session.model, like=identity.model)
    drifts = compare_validators(identity, here)
    if not drifts:
        return None
    return Claim(
        id=id,
        section=section,
        requested="as locked",
        observed="-",
        verdict="inconclusive",
        code=ClaimCode.OTHER_MACHINE,
        reason=f"the lock was made on another machine: {drifts[0].text}",
        fix=drifts[0].restore,
    )


def not_locked(id: str, section: Section, what: str, key: str) -> Claim:
    """Return the claim of something that a lock does not have."""
    return Claim(
        id=id,
        section=section,
        requested="as locked",
        observed="-",
        verdict="unobservable",
        code=ClaimCode.UNOBSERVABLE,
        reason=f"the lock has no {what}",
        fix=f"state {key} in the policy, and measure it: `xrt lock MODEL --upgrade`",
    )


def expected_ratio(subject: Subject, metric: str, checks: VerifySpeed) -> LockedRatio | Claim:
    """Return the ratio to the control that a lock has of a metric, or the claim of why it cannot be compared with."""
    assert subject.locked is not None
    ratio = subject.locked.measured.ratios.get(metric)
    id = f"speed.{metric}"
    if ratio is None:
        return not_locked(id, "speed", f"ratio of {metric} to a control", "verify.speed")
    if ratio.control != checks.control:
        what = f"ratio of {metric} to the control '{checks.control}', only to '{ratio.control}'"
        return not_locked(id, "speed", what, "verify.speed.control")
    threads = subject.policy.execution.threads
    if ratio.margin is msgspec.UNSET and ratio.control == "reference" and threads is not None:
        return not_locked(
            id, "speed", f"ratio of {metric} to a control with execution.threads {threads}", "verify.speed"
        )
    return ratio
