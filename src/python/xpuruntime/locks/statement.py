# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A lock as an unsigned in-toto statement, for tools that sign."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.lockfile.canonical import lock_bytes
from xpuruntime.locks.verification.outputs.in_toto import STATEMENT
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from xpuruntime.lockfile.records import Lock

__all__ = ["PREDICATE", "lock_statement"]

PREDICATE = "https://xpuruntime.dev/attestation/lock/v1"


def lock_statement(lock: Lock, path: str) -> str:
    """Return the JSON text of the statement; its subjects are the lock, the model and its external data."""
    identity = lock.identity
    digest = hashlib.sha256(lock_bytes(lock)).hexdigest()
    subjects = [{"name": printable(Path(path).name), "digest": {"sha256": digest}}]
    if identity.model is not None:
        files = {identity.model.name: identity.model.sha256, **identity.model.external}
        subjects += [{"name": printable(name), "digest": {"sha256": sha256}} for name, sha256 in files.items()]
    plan, policy = identity.plan, identity.policy
    predicate: dict[str, Any] = {
        "lock": lock.digest,
        "engine": None if plan is None else plan.engine,
        "device": None if plan is None else plan.device,
        "policy": None if policy is None else {"sha256": policy.sha256},
        "validators": [
            {"kind": one.kind, "key": printable(one.key), "expect": one.expect} for one in identity.validators
        ],
        "units": {
            "observed": sum(one.known == "observed" for one in identity.entries),
            "unobservable": sum(one.known == "unobservable" for one in identity.entries),
        },
        "accepted": [{"code": one.code, "why": printable(one.why)} for one in lock.provenance.accepted],
    }
    statement = {"_type": STATEMENT, "subject": subjects, "predicateType": PREDICATE, "predicate": predicate}
    return json.dumps(statement, indent=2, ensure_ascii=False) + "\n"
