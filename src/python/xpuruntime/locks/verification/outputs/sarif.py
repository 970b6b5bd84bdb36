# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A verification as SARIF 2.1.0, for code scanning: each claim that did not pass, at the line of its policy key."""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from xpuruntime.printable import printable

if TYPE_CHECKING:
    from xpuruntime.locks.verification.claim_codes import ClaimCode
    from xpuruntime.locks.verification.claims import Claim, VerificationResult

__all__ = ["FINGERPRINT", "to_sarif"]

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
#: Names the fingerprint, which identifies the same finding in another run.
FINGERPRINT = "xrtClaim/v1"
_LEVELS = {"fail": "error", "inconclusive": "warning", "unobservable": "note"}


def to_sarif(result: VerificationResult) -> str:
    """Return the JSON text. Claims that passed or were skipped are no results."""
    found = [one for one in result.claims if one.verdict in _LEVELS]
    codes = sorted({one.code for one in found}, key=lambda code: code.rule)
    places = {code: place for place, code in enumerate(codes)}
    driver = {
        "name": "xrt verify",
        "version": result.version,
        "rules": [_rule(code) for code in codes],
    }
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": True, "exitCode": result.exit_code}],
        "columnKind": "unicodeCodePoints",
        "results": [_result(result, one, places[one.code]) for one in found],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def _rule(code: ClaimCode) -> dict[str, Any]:
    return {"id": code.rule, "name": code.rule_name, "shortDescription": {"text": code.meaning}}


def _result(result: VerificationResult, claim: Claim, index: int) -> dict[str, Any]:
    fix = f" Fix: {claim.fix}" if claim.fix else ""
    text = printable(f"{claim.id}: {claim.reason}; requested {claim.requested}, observed {claim.observed}.{fix}")
    level = "error" if result.effect(claim) == "fail" else _LEVELS[claim.verdict]
    return {
        "ruleId": claim.code.rule,
        "ruleIndex": index,
        "level": level,
        "message": {"text": text},
        "locations": [_location(result, claim)],
        "partialFingerprints": {FINGERPRINT: _fingerprint(claim.code.rule, claim)},
        "properties": {"verdict": claim.verdict, "claim": printable(claim.id), "figures": claim.figures},
    }


def _location(result: VerificationResult, claim: Claim) -> dict[str, Any]:
    """Return the policy key, else the first line of the policy, else the model, where no line can be named."""
    file = result.policy or result.model
    physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(file)}}
    physical["region"] = {"startLine": claim.line or 1, "startColumn": claim.column or 1}
    return {"physicalLocation": physical, "logicalLocations": [{"fullyQualifiedName": printable(claim.id)}]}


def _uri(path: str) -> str:
    pure = PurePath(path)
    text = quote(pure.as_posix(), errors="backslashreplace")
    return f"file://{text}" if pure.is_absolute() else text


def _fingerprint(rule: str, claim: Claim) -> str:
    return hashlib.sha256(f"{rule}|{claim.key or ''}|{claim.id}".encode(errors="surrogatepass")).hexdigest()
