# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A verification as an unsigned in-toto statement, predicate ``test-result/v0.1``, for tools that sign."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from xpuruntime.locks.verification.claims import VerificationResult

__all__ = ["PREDICATE", "STATEMENT", "to_in_toto"]

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"


def to_in_toto(result: VerificationResult) -> str:
    """Return the JSON text of the statement: the model is its subject, policy and lock its configuration.

    Raises
    ------
    InputError
        The digest of the model is not known, as for a module in memory.
    """
    if result.model_sha256 is None:
        raise InputError(f"{result.model} has no digest, and an in-toto statement is about a file: verify a model file")
    configuration = [("policy", result.policy, result.policy_sha256), ("lock", result.lock, result.lock_sha256)]
    statement: dict[str, Any] = {
        "_type": STATEMENT,
        "subject": [_descriptor(result.model, result.model_sha256)],
        "predicateType": PREDICATE,
        "predicate": {
            "result": {"pass": "PASSED", "warn": "WARNED", "inconclusive": "WARNED", "fail": "FAILED"}[result.verdict],
            "configuration": [_descriptor(file or what, digest) for what, file, digest in configuration if digest],
            "passedTests": [printable(one.id) for one in result.of("pass")],
            "warnedTests": [
                printable(one.id) for one in result.of("inconclusive", "unobservable") if result.effect(one) != "fail"
            ],
            "failedTests": [printable(one.id) for one in result.claims if result.effect(one) == "fail"],
        },
    }
    return json.dumps(statement, indent=2, ensure_ascii=False) + "\n"


def _descriptor(path: str, digest: str) -> dict[str, Any]:
    return {"name": printable(PurePath(path).name or path), "digest": {"sha256": digest.removeprefix("sha256:")}}
