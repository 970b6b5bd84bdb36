# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""JSON Schema of search results."""

from __future__ import annotations

from typing import Any

from xpuruntime.evidence.schemas import schema_of
from xpuruntime.tuning.result.tune_result import SCHEMA, TuneResult

__all__ = ["tune_result_schema"]


def tune_result_schema() -> dict[str, Any]:
    """Return the JSON Schema of `TuneResult.to_dict`."""
    added = {
        "headline": {"type": "string", "description": "The result in one line."},
        "exit_code": {"type": "integer", "description": "0 a winner or a proven tie, 1 no candidate, 4 undecided."},
    }
    return schema_of(TuneResult, SCHEMA, "A search of xpuruntime for a policy", added)
