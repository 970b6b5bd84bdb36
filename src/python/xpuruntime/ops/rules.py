# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernel policies in the form in which the core's dispatcher holds them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.policies import KernelPolicy, Policy, TuningPolicy
from xpuruntime.policies.call_facts import ANY_CALL, bounds_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xpuruntime.policies.compiled_rules import CompiledRule
    from xpuruntime.policies.kernel_rules import RuleMatch

__all__ = ["compile_rules", "core_rules", "tuning_rule"]


def compile_rules(policy: Policy | KernelPolicy) -> _core.KernelRules:
    """Return the kernel rules that may match calls of no node and module, compiled once for each value."""
    if isinstance(policy, Policy):
        return _compile(policy.kernels, "strict" if policy.mode == "strict" else "prefer")
    return _compile(policy, "prefer")


@lru_cache(maxsize=256)
def _compile(policy: KernelPolicy, enforcement: str) -> _core.KernelRules:
    place = ANY_CALL._replace(node=None, module=None)
    return core_rules(policy, policy.compiled_rules.matching(place), enforcement)


def core_rules(
    policy: KernelPolicy, rules: Iterable[CompiledRule], enforcement: str, log: _core.DecisionLog | None = None
) -> _core.KernelRules:
    """Return rules as the core holds them, which compares sizes, types, devices and phases, and no names."""
    defaults = [
        {"match": {"op": op}, "use": list(preference.use), "source": preference.source}
        for op, preference in policy.compiled_rules.short_forms.items()
    ]
    return _core.KernelRules(
        **tuning_rule(policy),
        rules=[
            {"match": _match(rule.rule.match), "use": list(rule.use), "source": rule.source}
            for rule in rules
            if rule.use
        ],
        defaults=defaults,
        enforcement=enforcement,
        auto_strategy=policy.auto_strategy,
        log=log,
    )


def tuning_rule(policy: KernelPolicy) -> dict[str, Any]:
    """Return the argument of `_core.KernelRules` that says how kernels are measured; none for the usual way."""
    rule = policy.tuning
    if rule == TuningPolicy():
        return {}
    return {"tuning": {"min_effect": rule.min_effect, "confidence": rule.confidence, "budget": rule.budget}}


def _match(match: RuleMatch) -> dict[str, Any]:
    stated: dict[str, Any] = {}
    for name in ("op", "device"):
        if (text := getattr(match, name)) is not None:
            stated[name] = text
    for name in ("m", "n", "k", "head_dim", "kv"):
        if (condition := getattr(match, name)) is not None:
            stated[name] = bounds_of(condition)
    for name, plural in (("dtype", "dtypes"), ("phase", "phases")):
        if (words := getattr(match, name)) is not None:
            stated[plural] = [words] if isinstance(words, str) else list(words)
    return stated
