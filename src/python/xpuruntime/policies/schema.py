# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The JSON Schema of policy files, for editors."""

from __future__ import annotations

from typing import Any

from xpuruntime.policies.compound_kinds import object_schema
from xpuruntime.policies.policy import Policy

__all__ = ["policy_schema"]


def policy_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a policy file, as a new dict.

    It accepts every file that `Policy.load` accepts, as long as truth values are written ``true`` and ``false``, and
    refuses unknown keys, bad words and wrong types. What depends on several keys together is left to `Policy.load`.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:xpuruntime:policy:1",
        "title": "xpuruntime policy",
        "description": "What is requested of a run: engine, device, precision, kernels, memory, accuracy and "
        "calibration; and which claims `xrt verify` checks.",
        **object_schema(Policy.DOCUMENT),
    }
