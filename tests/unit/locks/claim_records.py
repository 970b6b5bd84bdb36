# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims and results made by hand."""

from __future__ import annotations

from xpuruntime.locks.verification.claims import Claim, ClaimCode
from xpuruntime.locks.verification.result import VerificationResult

#: Text that means something to XML, HTML, Markdown, JSON, OpenMetrics, GitHub and terminals.
HOSTILE = 'a|b`c`<b>&amp;"q" %0A::error::x\r\n\x1b[31m\x00 \ud800 ]]> \\n @team, e:f {x} 가 \U0001f600 \u202e #1'


def claim(id: str, verdict: str = "pass", **more: object) -> Claim:
    """Make a claim of the section that its id begins with."""
    codes = {"pass": "ok", "fail": "substituted", "inconclusive": "key_inconclusive", "skipped": "allowed"}
    facts = {
        "requested": "asked",
        "observed": "seen",
        "reason": "a reason",
        "code": codes.get(verdict, verdict),
        **more,
    }
    facts["code"] = ClaimCode(facts["code"])
    return Claim(id=id, section=id.partition(".")[0], verdict=verdict, **facts)  # type: ignore[arg-type]


def result(*claims: Claim, **more: object) -> VerificationResult:
    """Make a result of claims."""
    facts = {"model": "model.onnx", "model_sha256": "0" * 64, "created": "2026-01-02T03:04:05Z", "version": "0.1.0"}
    return VerificationResult(claims=claims, **{**facts, **more})  # type: ignore[arg-type]
