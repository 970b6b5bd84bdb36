# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernel policies in the form in which the core's dispatcher holds them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.policies import KernelPolicy, Policy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xpuruntime.policies.kernel_rule import KernelRule, RuleMatch

__all__ = ["compile_placed", "compile_rules"]

_MOST = 2**63 - 1
#: No number is in it.
_NOTHING = (1, 0)


def compile_rules(policy: Policy | KernelPolicy, mode: str | None = None) -> _core.KernelRules:
    """Return a policy's kernel rules, compiled once for each value.

    Parameters
    ----------
    policy : Policy or KernelPolicy
    mode : {"prefer", "strict", "auto"}, optional
        Instead of the policy's own; a `KernelPolicy` has none, and stands for ``"prefer"``. Under ``"strict"`` a kernel
        that cannot serve raises, otherwise another one serves and the decision says why.
    """
    kernels = policy.kernels if isinstance(policy, Policy) else policy
    if mode is None:
        mode = policy.mode if isinstance(policy, Policy) else "prefer"
    return _compile(kernels, "strict" if mode == "strict" else "prefer")


@lru_cache(maxsize=256)
def _compile(policy: KernelPolicy, enforcement: str) -> _core.KernelRules:
    return compile_placed(policy, tuple(enumerate(policy.rules)), enforcement)


def compile_placed(
    policy: KernelPolicy,
    placed: Iterable[tuple[int, KernelRule]],
    enforcement: str,
    log: _core.DecisionLog | None = None,
) -> _core.KernelRules:
    """Return the short forms of a policy compiled with other rules than its own, each with the place it goes back to.

    Parameters
    ----------
    policy : KernelPolicy
    placed : iterable of (int, KernelRule)
        Decisions name a rule by its place: ``"kernels.rules[0]"``.
    enforcement : {"prefer", "strict"}
    log : DecisionLog, optional
        Where decisions are recorded, instead of the log of the process.
    """
    rules = [
        {"match": _match(rule.match), "use": _words(rule.use), "source": f"kernels.rules[{place}]"}
        for place, rule in placed
        if rule.use is not None
    ]
    defaults = [
        {"match": {"op": op}, "use": _words(kernel), "source": f"kernels.{op}"}
        for op, kernel in policy.preferences.items()
    ]
    return _core.KernelRules(
        rules=rules, defaults=defaults, enforcement=enforcement, auto_strategy=policy.auto_strategy, log=log
    )


def _match(match: RuleMatch) -> dict[str, Any]:
    stated: dict[str, Any] = {}
    for name in ("op", "device", "node", "module"):
        if (text := getattr(match, name)) is not None:
            stated[name] = text
    for name in ("m", "n", "k", "head_dim"):
        if (condition := getattr(match, name)) is not None:
            stated[name] = _range(condition)
    for name, plural in (("dtype", "dtypes"), ("phase", "phases")):
        if (words := getattr(match, name)) is not None:
            stated[plural] = _words(words)
    return stated


def _words(words: str | tuple[str, ...]) -> list[str]:
    return [words] if isinstance(words, str) else list(words)


def _range(condition: int | str) -> tuple[int, int]:
    """Return the first and the last number that meet a condition in the canonical form of `IntRange`."""
    if isinstance(condition, int):
        return condition, condition
    if ".." in condition:
        first, _, last = condition.partition("..")
        return int(first), int(last)
    sign = condition.rstrip("0123456789")
    bound = int(condition[len(sign) :])
    if sign == ">":
        return (bound + 1, _MOST) if bound < _MOST else _NOTHING
    if sign == "<":
        return (0, bound - 1) if bound > 0 else _NOTHING
    return (bound, _MOST) if sign == ">=" else (0, bound)
