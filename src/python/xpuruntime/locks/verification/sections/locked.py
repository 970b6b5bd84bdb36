# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of a lock: one for each kind of difference between it and what runs here."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from xpuruntime.lockfile.codes import DriftCode, ValidatorKind
from xpuruntime.locks.relock import lock
from xpuruntime.locks.verification.claim_codes import ClaimCode
from xpuruntime.locks.verification.claims import Claim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xpuruntime.lockfile.drift import LockDrift
    from xpuruntime.locks.verification.sections.subject import Subject

__all__ = ["MACHINE", "lock_claims"]

#: Kinds of validators that identify a machine.
MACHINE = (ValidatorKind.DEVICE, ValidatorKind.CPU_ISA)
_NAMED = 4


def lock_claims(subject: Subject) -> Iterator[Claim]:
    """Check the lock as ``xrt lock --check`` does, and yield a claim for each code of what differs."""
    found = lock(subject.model, output=subject.lock, check=True, **subject.options)
    groups: dict[DriftCode, list[LockDrift]] = {}
    for drift in found.drifts:
        groups.setdefault(drift.code, []).append(drift)
    identity = found.lock.identity
    if not groups:
        entries, blind = len(identity.entries) + len(identity.calls), identity.unobservable
        yield Claim(
            id="evidence.lock",
            section="evidence",
            requested=f"as in {subject.lock}",
            observed=f"the same; {blind} kernels are not reported" if blind else "the same",
            verdict="pass",
            code=ClaimCode.OK,
            reason=f"{entries} entries and {len(identity.validators)} validators hold"
            + (f"; only validators stand for the kernels of {blind} entries, which are not reported" if blind else "")
            + "".join(f"; {one.code} {one.subject} is not in the lock" for one in found.lacking),
            figures={
                "entries": float(entries),
                "unobservable": float(blind),
                "validators": float(len(identity.validators)),
            },
        )
    elsewhere = not groups.keys().isdisjoint(MACHINE)
    for code, drifts in groups.items():
        first, more = drifts[0], len(drifts) - _NAMED
        take = f"`xrt lock MODEL -o {shlex.quote(str(subject.lock))} --accept {code} --why TEXT`"
        if code == DriftCode.PLAN and DriftCode.POLICY in groups:
            take = "as for evidence.lock.policy, from which it follows"
        differs = ClaimCode.LOCK_STALE if first.validator else ClaimCode.LOCK_DIFFERS
        yield Claim(
            id=f"evidence.lock.{code}",
            section="evidence",
            requested=first.expected,
            observed=first.found,
            verdict="inconclusive" if elsewhere else "fail",
            code=ClaimCode.OTHER_MACHINE if elsewhere else differs,
            reason="; ".join(one.difference for one in drifts[:_NAMED]) + (f"; and {more} more" if more > 0 else ""),
            fix=first.restore or take,
            figures={"differences": float(len(drifts))},
        )
