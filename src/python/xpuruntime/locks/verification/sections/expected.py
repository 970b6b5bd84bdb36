# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Expected values of a lock for speed, memory and start; and the claims where it has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from xpuruntime.inference.locked import surroundings
from xpuruntime.lockfile.validators import compare_validators
from xpuruntime.locks.verification.claim_codes import ClaimCode
from xpuruntime.locks.verification.claims import Claim
from xpuruntime.locks.verification.sections.locked import MACHINE

if TYPE_CHECKING:
    from xpuruntime.lockfile.measured import LockedRatio
    from xpuruntime.locks.verification.sections.subject import Subject
    from xpuruntime.locks.verification.vocabulary import Section
    from xpuruntime.policies import VerifySpeed

__all__ = ["elsewhere", "expected_ratio", "not_locked"]


def elsewhere(subject: Subject, id: str, section: Section) -> Claim | None:
    """Return the claim of a lock that was made on another machine, of which figures cannot be compared."""
    lock, session = subject.locked, subject.session
    if lock is None:
        return None
    identity = msgspec.structs.replace(
        lock.identity, validators=tuple(one for one in lock.identity.validators if one.kind in MACHINE)
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
        reason=f"the lock was made on another machine: {drifts[0].difference}",
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
    found = subject.locked.measured.ratios.get(metric)
    id = f"speed.{metric}"
    if found is None:
        return not_locked(id, "speed", f"ratio of {metric} to a control", "verify.speed")
    if found.control != checks.control:
        what = f"ratio of {metric} to the control '{checks.control}', only to '{found.control}'"
        return not_locked(id, "speed", what, "verify.speed.control")
    threads = subject.policy.execution.threads
    if found.margin is msgspec.UNSET and found.control == "reference" and threads is not None:
        return not_locked(
            id, "speed", f"ratio of {metric} to a control with execution.threads {threads}", "verify.speed"
        )
    return found
