# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of determinism: one for each grade up to the one that the policy asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.locks.determinism import session_determinism
from xpuruntime.locks.verification.claim_codes import ClaimCode
from xpuruntime.locks.verification.claims import Claim, ClaimVerdict
from xpuruntime.policies.execution_policy import DETERMINISM_GRADES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xpuruntime.evidence.sections.determinism import GradeTest
    from xpuruntime.locks.verification.sections.subject import Subject

__all__ = ["determinism_claims"]

_FIX = "find the node with `xrt determinism`, or ask for a lower grade"


def determinism_claims(subject: Subject) -> Iterator[Claim]:
    """Test the higher of the grades of ``verify.determinism`` and ``execution.determinism``, and those below it."""
    stated = {
        "verify.determinism": subject.limits.determinism,
        "execution.determinism": subject.policy.execution.determinism,
    }
    key, grade = max(stated.items(), key=lambda one: DETERMINISM_GRADES.index(one[1]))
    if grade == "none":
        return
    inputs = subject.feeds if subject.given else None
    found = session_determinism(subject.session, grade, inputs=inputs, trust=subject.trust)
    broken = any(test.verdict == "failed" for test in found.tests)
    for test in found.tests:
        yield subject.placed(_claim(test, broken=broken), key)


def _claim(test: GradeTest, *, broken: bool) -> Claim:
    untested: tuple[ClaimVerdict, ClaimCode] = (
        ("skipped", ClaimCode.NOT_APPLICABLE) if broken else ("inconclusive", ClaimCode.NOT_TESTED)
    )
    verdicts: dict[str, tuple[ClaimVerdict, ClaimCode]] = {
        "passed": ("pass", ClaimCode.OK),
        "failed": ("fail", ClaimCode.NONDETERMINISTIC),
        "not_applicable": ("skipped", ClaimCode.NOT_APPLICABLE),
        "not_tested": untested,
    }
    verdict, code = verdicts[test.verdict]
    first = test.first_difference
    figures = {"trials": float(test.trials)}
    if first is not None and first.ulp_max is not None:
        figures["ulp_max"] = float(first.ulp_max)
    return Claim(
        id=f"determinism.{test.grade}",
        section="determinism",
        requested="the same bits",
        observed=f"{test.verdict.replace('_', ' ')}, {test.trials} results compared",
        verdict=verdict,
        code=code,
        reason=test.reason if first is None else f"{test.reason}; first difference: {first}",
        fix=_FIX if verdict == "fail" else None,
        figures=figures,
    )
