# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Unsigned in-toto statements, for tools that sign: the form of all, and that of a lock."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from xpuruntime.lockfile.canonical import lock_bytes
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from xpuruntime.lockfile.records import Lock

_STATEMENT = "https://in-toto.io/Statement/v1"
_LOCK = "https://xpuruntime.dev/attestation/lock/v1"


def statement_text(predicate_type: str, subjects: Sequence[dict[str, Any]], predicate: dict[str, Any]) -> str:
    """Return the JSON text of a statement."""
    statement = {"_type": _STATEMENT, "subject": subjects, "predicateType": predicate_type, "predicate": predicate}
    return printable(json.dumps(statement, indent=2, ensure_ascii=False)) + "\n"


def descriptor(path: str, digest: str) -> dict[str, Any]:
    """Return the resource descriptor of a file: its name without the folder, and its SHA-256."""
    return {"name": printable(PurePath(path).name or path), "digest": {"sha256": digest.removeprefix("sha256:")}}


def lock_statement(lock: Lock, path: str) -> str:
    """Return the JSON text of the statement; its subjects are the lock, the model and its external data."""
    identity = lock.identity
    subjects = [descriptor(path, hashlib.sha256(lock_bytes(lock)).hexdigest())]
    if identity.model is not None:
        subjects.append(descriptor(identity.model.name, identity.model.sha256))
        subjects += [
            {"name": printable(name), "digest": {"sha256": sha256}} for name, sha256 in identity.model.external.items()
        ]
    plan, policy = identity.plan, identity.policy
    predicate: dict[str, Any] = {
        "lock": lock.digest,
        "engine": None if plan is None else plan.engine,
        "device": None if plan is None else plan.device,
        "policy": None if policy is None else {"sha256": policy.sha256},
        "validators": [
            {"kind": validator.kind, "key": printable(validator.key), "expect": validator.expect}
            for validator in identity.validators
        ],
        "units": {
            "observed": len(identity.entries) - identity.unobservable,
            "unobservable": identity.unobservable,
        },
        "accepted": [
            {"code": acceptance.code, "why": printable(acceptance.why)} for acceptance in lock.provenance.accepted
        ],
    }
    return statement_text(_LOCK, subjects, predicate)
