# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""JSON Schema of tuning specifications."""

from __future__ import annotations

from typing import Any

from xpuruntime.policies.compound_kinds import object_schema
from xpuruntime.tuning.spec.tune_spec import TuneSpec

__all__ = ["tune_schema"]


def tune_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a specification, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:xpuruntime:tune:1",
        "title": "xpuruntime tuning specification",
        "description": "What is searched, for which objective, under which constraints.",
        **object_schema(TuneSpec.DOCUMENT),
    }
