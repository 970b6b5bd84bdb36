# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The JSON Schemas of specifications and results of searches."""

from __future__ import annotations

from typing import Any

from xpuruntime.evidence.schemas import schema_of
from xpuruntime.policies.compound_kinds import object_schema
from xpuruntime.tuning.result import SCHEMA, TuneResult
from xpuruntime.tuning.spec import TuneSpec

__all__ = ["tune_result_schema", "tune_schema"]


def tune_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a specification, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:xpuruntime:tune:1",
        "title": "xpuruntime tuning specification",
        "description": "What is searched, for which objective, under which constraints.",
        **object_schema(TuneSpec.DOCUMENT),
    }


def tune_result_schema() -> dict[str, Any]:
    """Return the JSON Schema of `TuneResult.to_dict`."""
    added = {
        "headline": {"type": "string", "description": "The result in one line."},
        "exit_code": {"type": "integer", "description": "0 a winner or a proven tie, 1 no candidate, 4 undecided."},
    }
    return schema_of(TuneResult, SCHEMA, "A search of xpuruntime for a policy", added)
