# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The JSON Schema of verifications, made of the types themselves."""

from __future__ import annotations

from typing import Any

from xpuruntime.evidence.schemas import schema_of
from xpuruntime.locks.verification.claims import SCHEMA, VerificationResult

__all__ = ["verification_schema"]


def verification_schema() -> dict[str, Any]:
    """Return the JSON Schema of `VerificationResult.to_dict`."""
    added = {
        "headline": {"type": "string", "description": "The verdict in a few words."},
        "verdict": {
            "enum": ["pass", "warn", "fail", "inconclusive"],
            "description": "What came of it as a whole; warn: passed, with inconclusive claims that only warn.",
        },
        "exit_code": {"enum": [0, 1, 3, 4], "description": "The exit code of `xrt verify`."},
    }
    return schema_of(VerificationResult, SCHEMA, "A verification of xpuruntime", added)
