# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A verification as an unsigned in-toto statement, predicate ``test-result/v0.1``, for tools that sign."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.errors import InputError
from xpuruntime.locks.statement import descriptor, statement_text
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from xpuruntime.locks.verification.claims import VerificationResult

__all__ = ["to_in_toto"]

_PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"


def to_in_toto(result: VerificationResult) -> str:
    """Return the JSON text of the statement: the model is its subject, policy and lock its configuration."""
    if result.model_sha256 is None:
        raise InputError(f"{result.model} has no digest, and an in-toto statement is about a file: verify a model file")
    configuration = [("policy", result.policy, result.policy_sha256), ("lock", result.lock, result.lock_sha256)]
    return statement_text(
        _PREDICATE,
        [descriptor(result.model, result.model_sha256)],
        {
            "result": {"pass": "PASSED", "warn": "WARNED", "inconclusive": "WARNED", "fail": "FAILED"}[result.verdict],
            "configuration": [descriptor(file or what, digest) for what, file, digest in configuration if digest],
            "passedTests": [printable(one.id) for one in result.of("pass")],
            "warnedTests": [
                printable(one.id) for one in result.of("inconclusive", "unobservable") if result.effect(one) != "fail"
            ],
            "failedTests": [printable(one.id) for one in result.claims if result.effect(one) == "fail"],
        },
    )
