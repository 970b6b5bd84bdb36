# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Unmatched rules: rules that can match no call, and rules of modules that matched none, are reported."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import UnsupportedOperationError, warn
from xpuruntime.ops.call_context import kernel_ids
from xpuruntime.ops.torch_kernels import is_torch_kernel
from xpuruntime.policies.call_facts import ANY_CALL, UNKNOWN, CallFacts, Glob
from xpuruntime.policies.document import nearest, question
from xpuruntime.policies.kernel_rules import FAMILIES, KERNEL_IDS, SOURCE_PREFIXES
from xpuruntime.pytorch.call_scope import module_names
from xpuruntime.pytorch.dispatch.route import NATIVE_NAMES
from xpuruntime.pytorch.providers.bound import rejection_of_word

if TYPE_CHECKING:
    import torch

    from xpuruntime.policies import Policy
    from xpuruntime.policies.kernel_rules import RuleMatch
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy

_FIX = (
    "write the path as in named_modules() of the model, say with root= at which module paths begin, or leave the rule "
    "out where that module does not run"
)
#: Modules that a message names.
_MOST = 4
#: Kinds of calls that are kept until they are compared with the rules.
_KINDS = 4096


class RuleUse:
    """Which rules of modules have met their module, of one policy."""

    def __init__(self, policy: Policy) -> None:
        self._lock = threading.Lock()
        self._rules = policy.kernels.compiled_rules
        self._open: dict[int, RuleMatch] = {
            rule.index: rule.rule.match
            for rule in self._rules.rules
            if rule.use and (rule.rule.match.module is not None or rule.rule.match.node is not None)
        }
        self._others: dict[int, dict[str, None]] = {}
        #: Kinds of calls that were not compared yet, each with the names of the places that they came from.
        self._calls: dict[CallFacts, dict[tuple[Any, Any], None]] = {}

    def note(self, facts: CallFacts) -> None:
        """Take note of a kind of calls; an earlier rule may decide them.

        A rule has its module where any call came from that. Whether it was one of the rule's operation does not count.
        """
        if not self._open:
            return
        with self._lock:
            kind = facts._replace(node=UNKNOWN, module=UNKNOWN)
            self._calls.setdefault(kind, {})[facts.node, facts.module] = None
            if len(self._calls) >= _KINDS:
                self._compare()

    def _compare(self) -> None:
        places = {call_site: None for names in self._calls.values() for call_site in names}
        for node, module in places:
            for rule in self._rules.matching(ANY_CALL._replace(node=node, module=module)):
                self._open.pop(rule.index, None)
        if self._open:
            for kind, names in self._calls.items():
                for rule in self._rules.matching(kind):
                    if rule.index in self._open:
                        modules = self._others.setdefault(rule.index, {})
                        modules.update((module or "", None) for _, module in names)
        self._calls.clear()

    def unmatched(self) -> list[str]:
        """Return a sentence for each rule that no call matched, though some would have if they were of its module."""
        with self._lock:
            self._compare()
            unmatched_rules = [
                (at, match, list(self._others[at])) for at, match in self._open.items() if at in self._others
            ]
        return [_sentence(at, match, others) for at, match, others in unmatched_rules]


def _sentence(at: int, match: RuleMatch, others: list[str]) -> str:
    stated = match.module if match.module is not None else match.node
    key = "module" if match.module is not None else "node"
    named = [repr(other) if other else "the model itself, or none that is known" for other in others[:_MOST]]
    if len(others) > _MOST:
        named.append(f"{len(others) - _MOST} more")
    near = nearest(str(stated), module_names.known())
    hint = question(near if near != stated else None)
    return f"kernels.rules[{at}] ({key}: {stated}) matched no call: they came from {', '.join(named)}{hint}"


def impossible_rules(policy: Policy, root: torch.nn.Module | None) -> list[tuple[str, str, str, str]]:
    """Return the rules that can match no call: operation, rule, reason, and a fix.

    Their operation has no such size, or no module of `root` has a path that they are for.
    """
    rules = []
    paths = None
    for rule in policy.kernels.compiled_rules.rules:
        match = rule.rule.match
        op = match.op or ""
        why, fix = rule.lacking_sizes()
        if why:
            rules.append((op, rule.source, why, fix))
            continue
        if root is None or not rule.use:
            continue
        for key in ("module", "node"):
            stated = getattr(match, key)
            if stated is None:
                continue
            if paths is None:
                paths = [path for _, path, _ in module_names.walk(root)]
            test = Glob(stated)
            if not any(map(test, paths)):
                why = f"root has no module {stated!r}{question(nearest(stated, paths))}"
                rules.append((op, rule.source, why, "write the path as in named_modules() of root"))
    return rules


def _refuse_absent(policy: Policy) -> None:
    """Refuse mistyped kernels; where strict, also keys and rules none of whose kernels has its package here."""
    uses = [(op, f"kernels.{op}", policy.kernels.get(op)) for op in FAMILIES]
    uses += [(rule.rule.match.op or "", rule.source, rule.rule.use) for rule in policy.kernels.compiled_rules.rules]
    for op, source, use in uses:
        kernel_names = (use,) if isinstance(use, str) else tuple(use or ())
        ops = (op,) if op else tuple(FAMILIES)
        absent = {name: _absence(ops, name) for name in kernel_names}
        mistyped = [name for name, why in absent.items() if why == _NOBODY and _of_known_package(name)]
        none_here = policy.mode == "strict" and all(absent.values())
        refused = kernel_names if none_here else mistyped
        if not refused:
            continue
        near = nearest(refused[0], [name for name, (own, _) in KERNEL_IDS.items() if set(own) & set(ops)])
        why = " and ".join(dict.fromkeys(absent[name] for name in refused))
        meant = near if why == _NOBODY else None
        fix = f"{f'write {meant}, or' if meant else 'use'} a kernel that `xrt kernels` lists"
        fix += ", put 'auto' last, or use mode: prefer" if none_here and not mistyped else ""
        reason = f"{source} asks for {', '.join(refused)}, and {why}{question(meant)}"
        raise UnsupportedOperationError(reason, fix=fix, engine="torch")


def _of_known_package(name: str) -> bool:
    """Whether a name is of PyTorch or of a backend that is here: one of another may come with a plugin or a build."""
    package, dot, _ = name.partition("@")[0].partition(".")
    return not dot or package == "torch" or any(kernel_ids(op, package) for op in FAMILIES)


_NOBODY = "there is no such kernel"


def _absence(ops: Sequence[str], name: str) -> str:
    """Return why a name can serve no call of any of some operations here; empty where it may."""
    reasons = []
    for op in ops:
        if name in FAMILIES[op] or name.startswith(SOURCE_PREFIXES):
            return ""
        if is_torch_kernel(name):
            reasons.append(rejection_of_word(name, op))
        else:
            plain = name.partition("@")[0]
            known = plain in NATIVE_NAMES.get(op, {}) or plain in KERNEL_IDS or kernel_ids(op, plain)
            reasons.append("" if known else _NOBODY)
    if not all(reasons):
        return ""
    return _NOBODY if _NOBODY in reasons else reasons[0] if len(ops) == 1 else ""


def refuse_impossible(active: CompiledPolicy) -> None:
    """Refuse unknown kernels, and warn of rules that can match no call, which a strict policy refuses too."""
    _refuse_absent(active.policy)
    rules = active.impossible_rules(active.root)
    if not rules or active.policy.mode == "auto":
        return
    msg = "; ".join(f"{rule} can match no call: {why}" for _, rule, why, _ in rules)
    msg += f". Fix: {rules[0][3]}"
    if active.strict:
        raise UnsupportedOperationError(msg, engine="torch")
    warn(msg)


def report(active: CompiledPolicy | None) -> None:
    """Warn of rules that matched no call under a policy that holds no more. Raises where it is strict."""
    if active is None or active.policy.mode == "auto":
        return
    for sentence in active.rule_use.unmatched():
        msg = f"{sentence}. Fix: {_FIX}"
        if active.strict:
            raise UnsupportedOperationError(msg, engine="torch")
        warn(msg)
