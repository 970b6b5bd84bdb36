# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Subject`: the session that is verified, with its policy, inputs and limits, and what a lock expects of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.inference.locked import surroundings
from xpuruntime.lockfile.drift import ValidatorKind
from xpuruntime.lockfile.validators import compare_validators
from xpuruntime.locks.verification.claims import Claim, ClaimCode
from xpuruntime.policies.document import position_of
from xpuruntime.policies.verify_policy import VerifyPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.inference import InferenceSession
    from xpuruntime.lockfile.measured import LockedRatio
    from xpuruntime.lockfile.records import Lock
    from xpuruntime.locks.verification.claims import Section
    from xpuruntime.locks.verification.metrics import FileMetric, Metric
    from xpuruntime.policies import Policy, VerifySpeed
    from xpuruntime.policies.files import Document

__all__ = ["MACHINE", "Subject", "elsewhere", "expected_ratio", "not_locked"]


class Subject(NamedTuple):
    """Session, policy, inputs and limits that the sections share."""

    session: InferenceSession
    model: Any
    document: Document | None
    feeds: dict[str, Any]
    given: bool
    reopen: Callable[[], InferenceSession]
    opened_s: float
    metrics: tuple[Metric | FileMetric, ...]
    asked: frozenset[str]
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
        place = None if self.document is None else position_of(self.document.root, key)
        line, column = place or (None, None)
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
