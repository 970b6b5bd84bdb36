# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The rules that the operators of one session decide by."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from xpuruntime.engines.onnxruntime.rewriting.rule_query import module_of
from xpuruntime.policies.call_facts import ANY_CALL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xpuruntime import _core
    from xpuruntime.policies import KernelPolicy

__all__ = ["THREADS", "session_rules", "xpuruntime_threads"]

#: How many threads the kernels of the CPU share; see the reference of environment variables.
THREADS = "XPURUNTIME_CPU_THREADS"


def xpuruntime_threads() -> int | None:
    """Return the thread count that the environment sets for xpuruntime kernels on the CPU, or ``None``."""
    text = os.environ.get(THREADS, "")
    return int(text) if text.isdecimal() else None


def session_rules(
    policy: KernelPolicy, nodes: Iterable[str], *, strict: bool, log: _core.DecisionLog | None = None
) -> _core.OnnxRuntimeRules:
    """Return a policy's rules under a name that nodes can carry; keep it until the sessions are open."""
    from xpuruntime import _core
    from xpuruntime.ops.call_context import core_rules

    enforcement = "strict" if strict else "prefer"
    made: dict[tuple[int, ...], _core.KernelRules] = {}

    def rules_at(node: str | None) -> _core.KernelRules:
        facts = ANY_CALL._replace(node=node, module=module_of(node or "") or None)
        rules = [rule for rule in policy.compiled_rules.matching(facts) if rule.use]
        places = tuple(rule.index for rule in rules)
        if places not in made:
            made[places] = core_rules(policy, rules, enforcement, log)
        return made[places]

    return _core.OnnxRuntimeRules(rules_at(None), {node: rules_at(node) for node in nodes})
