# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernel rules that name nodes which the model does not have."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.policies.name_patterns import NameSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xpuruntime.engines.base import Request
    from xpuruntime.evidence.records import Control

__all__ = ["without_nodes"]


def without_nodes(request: Request, controls: Iterable[Control]) -> list[Control]:
    """Return the controls, where a rule whose pattern names no node of the model is unsupported: it does nothing."""
    names = [node.name for node in request.model.nodes]
    known = NameSet(names)
    rules = request.policy.kernels.rules
    patterns = {f"kernels.rules[{index}]": rule.match.node for index, rule in enumerate(rules)}
    return [
        _nothing(control, pattern, names)
        if (pattern := patterns.get(control.key)) and not known.matches(pattern)
        else control
        for control in controls
    ]


def _nothing(control: Control, pattern: str, names: list[str]) -> Control:
    near = difflib.get_close_matches(pattern.strip("*"), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return msgspec.structs.replace(
        control,
        resolved="-",
        enforceability="unsupported",
        reason=f"the pattern {pattern!r} names no node of the model{hint}",
        fix="correct match.node, or remove the rule; `xrt explain` lists the nodes",
    )
