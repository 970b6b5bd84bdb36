# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The JSON Schema of lock files, made of the types themselves."""

from __future__ import annotations

from typing import Any

from xpuruntime.evidence.schemas import schema_of
from xpuruntime.lockfile.records import SCHEMA, Lock

__all__ = ["lock_schema"]


def lock_schema() -> dict[str, Any]:
    """Return the JSON Schema of a lock file."""
    return schema_of(Lock, SCHEMA, "A lock of xpuruntime", {})
