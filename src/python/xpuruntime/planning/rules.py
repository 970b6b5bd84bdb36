# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of kernel keys that are the same for all engines: a choice that is left to them, and rules for no node."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.engines.control_builder import ENGINE_CHOICE, show
from xpuruntime.evidence.records import Control
from xpuruntime.policies.name_patterns import NameSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xpuruntime.engines.base import Request
    from xpuruntime.policies import KernelPolicy

__all__ = ["with_free_choices", "without_nodes"]


def with_free_choices(policy: KernelPolicy, controls: Iterable[Control], engine: str) -> list[Control]:
    """Return the controls, where a key of kernels that leaves the choice to the engine is enforced by any engine."""
    stated: dict[str, str | tuple[str, ...]] = {f"kernels.{op}": use for op, use in policy.preferences.items()}
    rules = {f"kernels.rules[{index}]": rule for index, rule in enumerate(policy.rules)}
    stated |= {key: rule.use for key, rule in rules.items() if rule.use is not None and rule.precision is None}
    found = {control.key: control for control in controls}
    for key, use in stated.items():
        names = (use,) if isinstance(use, str) else use
        requested = show(rules.get(key, use))
        if names[0] in ("auto", "torch"):
            reason = f"{names[0]} leaves the choice to the engine"
            if names[0] == "torch":
                reason = (
                    f"torch is what the framework runs by default, and {engine} runs without PyTorch: {engine} chooses"
                )
            found[key] = Control(
                key=key, requested=requested, resolved=ENGINE_CHOICE, enforceability="enforced", reason=reason
            )
        elif "torch" in names and key in found:
            found[key] = msgspec.structs.replace(found[key], requested=requested)
    return list(found.values())


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
