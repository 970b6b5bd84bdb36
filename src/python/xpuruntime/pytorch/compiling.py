# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `torch.compile` has to know of the policy in force."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from xpuruntime.policies import Policy

__all__ = ["policy_changed"]

_TAG = "xpuruntime-"


def policy_changed(policy: Policy | None) -> None:
    """Have code compiled from now on be cached for this policy alone, and forget what was compiled for another."""
    config = torch.compiler.config
    before = config.cache_key_tag
    rest = before.partition(_TAG)[0]
    tag = (
        ""
        if policy is None
        else _TAG + hashlib.sha256(json.dumps(policy.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
    )
    if rest + tag == before:
        return
    config.cache_key_tag = rest + tag
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
