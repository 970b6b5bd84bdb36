# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of a lock: one for each kind of difference between it and what runs here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.locks.relock import lock
from xpuruntime.locks.verification.claims import Claim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xpuruntime.lockfile.drift import Drift
    from xpuruntime.locks.verification.sections.subject import Subject

__all__ = ["MACHINE", "OTHER_MACHINE", "lock_claims"]

#: Code of the claims of a lock that was made on another machine.
OTHER_MACHINE = "other_machine"
#: Kinds of validators that identify a machine.
MACHINE = ("device", "cpu_isa")
_NAMED = 4


def lock_claims(subject: Subject) -> Iterator[Claim]:
    """Check the lock as ``xrt lock --check`` does, and yield a claim for each code of what differs."""
    found = lock(subject.model, output=subject.lock, check=True, **subject.options)
    groups: dict[str, list[Drift]] = {}
    for drift in found.drifts:
        groups.setdefault(drift.code, []).append(drift)
    identity = found.lock.identity
    if not groups:
        entries = len(identity.entries) + len(identity.calls)
        yield Claim(
            id="evidence.lock",
            section="evidence",
            requested=f"as in {subject.lock}",
            observed="the same",
            verdict="pass",
            code="ok",
            reason=f"{entries} entries and {len(identity.validators)} validators hold",
            figures={"entries": float(entries), "validators": float(len(identity.validators))},
        )
    elsewhere = any(code in MACHINE for code in groups)
    for code, drifts in groups.items():
        first, more = drifts[0], len(drifts) - _NAMED
        yield Claim(
            id=f"evidence.lock.{code}",
            section="evidence",
            requested=first.expected,
            observed=first.found,
            verdict="inconclusive" if elsewhere else "fail",
            code=OTHER_MACHINE if elsewhere else "lock_stale" if first.validator else "lock_differs",
            reason="; ".join(str(one).partition(". Fix: ")[0] for one in drifts[:_NAMED])
            + (f"; and {more} more" if more > 0 else ""),
            fix=first.restore or f"`xrt lock --accept {code} --why TEXT`",
            figures={"differences": float(len(drifts))},
        )
