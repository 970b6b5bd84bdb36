# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The rules that the operators of one session decide by."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from xpuruntime.engines.onnxruntime.options import by_option
from xpuruntime.policies.call_facts import ANY_CALL, UNKNOWN, CallFacts, unknown_sizes
from xpuruntime.policies.compiled_rules import certainty_of, conditions_of
from xpuruntime.policies.kernel_rules import OPS, RuleMatch

if TYPE_CHECKING:
    from xpuruntime import _core
    from xpuruntime.ops.decision_log import Decision
    from xpuruntime.policies import KernelPolicy

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
    kernel_rules: dict[tuple[int, ...], _core.KernelRules] = {}

    def rules_at(node: str | None) -> _core.KernelRules:
        facts = ANY_CALL._replace(node=node, module=module_of(node or "") or None)
        rules = [rule for rule in policy.compiled_rules.matching(facts) if rule.use]
        places = tuple(rule.index for rule in rules)
        if places not in kernel_rules:
            kernel_rules[places] = core_rules(policy, rules, enforcement, log)
        return kernel_rules[places]

    return _core.OnnxRuntimeRules(rules_at(None), {node: rules_at(node) for node in nodes})


def module_of(node: str) -> str:
    """Return the module that a node's name speaks of: ``"/encoder/layers.0/MatMul"`` is of ``"encoder.layers.0"``.

    Empty where the name has no path.
    """
    parts = [part for part in re.split(r"[/.]", node) if part]
    return ".".join(parts[:-1])


def kernels_of(op: str, word: str) -> tuple[str, ...]:
    """Return the ids of xpuruntime kernels that a word of a policy means; empty for a word that means none."""
    from xpuruntime.ops.call_context import kernel_ids

    _ready()
    return kernel_ids(op, word.partition("@")[0])


@functools.cache
def _ready() -> None:
    from xpuruntime.ops.call_context import prepare

    prepare()


def facts_of_node(candidate: RewriteCandidate, device: str, arch: str | None) -> CallFacts:
    """Return the facts of a node of a graph: sizes that the graph leaves open are unknown."""
    sizes: dict[str, Any] = unknown_sizes(candidate.op)
    sizes.update((name, size) for name, size in candidate.sizes.items() if size is not None)
    return CallFacts(
        op=candidate.op,
        dtype=UNKNOWN if candidate.dtype is None else candidate.dtype,
        device=device,
        arch=arch,
        node=candidate.node,
        module=module_of(candidate.node) or None,
        phase="infer",
        **sizes,
    )


def facts_of_decision(decision: Decision, op: str, device: str, arch: str | None) -> CallFacts:
    """Return the facts of a call of a rewritten node, by the decision of the dispatcher."""
    shapes = decision.shapes
    sizes: dict[str, Any] = {}
    if "a" in shapes and "b" in shapes:
        sizes.update(m=shapes["a"][-2], k=shapes["a"][-1], n=shapes["b"][-1])
    if "q" in shapes:
        sizes.update(head_dim=shapes["q"][-1], kv=shapes["k"][-2])
    return CallFacts(
        op=op,
        dtype=decision.dtype,
        device=device,
        arch=arch,
        node=decision.node,
        module=module_of(decision.node) or None,
        phase=decision.phase,
        **sizes,
    )


class RuleQuery:
    """A kernel policy, queried for the nodes of a graph."""

    def __init__(self, policy: KernelPolicy, device: str, arch: str | None) -> None:
        self.policy = policy
        self.device = device
        self.arch = arch
        self._named: dict[tuple[str | None, tuple[str, ...]], bool] = {}
        self._queried: dict[CallFacts, None] = {}

    @property
    def requests_kernels(self) -> bool:
        """Whether the policy requests a kernel of this library for anything."""
        compiled = self.policy.compiled_rules
        stated: list[tuple[str | None, tuple[str, ...]]] = [
            (op, preference.use) for op, preference in compiled.short_forms.items()
        ]
        stated += [(rule.rule.match.op, rule.use) for rule in compiled.rules if rule.use]
        return any(self.names_kernel(op, use) for op, use in stated)

    def requested(self, candidate: RewriteCandidate) -> KernelRequest | None:
        """Return what the policy requests for a node; ``None`` where no kernel of this library for any size."""
        facts = facts_of_node(candidate, self.device, self.arch)
        self._queried[facts] = None
        result = self.policy.compiled_rules.match(facts)
        preferences = [preference for preference in result.preferences if preference.source != "default"]
        named = [preference for preference in preferences if self.names_kernel(candidate.op, preference.use)]
        if not named:
            return None
        others = [preference.source for preference in preferences if preference not in named]
        rest = ""
        if result.preferences[-1].source == "default":
            rest = "sizes that no rule is for go to the default choice of xpuruntime's dispatcher"
        elif others:
            rest = f"sizes of {', '.join(others)} go to the default choice of xpuruntime's dispatcher"
        return KernelRequest(named[0].use, named[0].source, tuple(preference.source for preference in named), rest)

    def may_match(self, match: RuleMatch) -> bool:
        """Whether a rule by itself is, or may be at some size, for a node that was asked about."""
        conditions = conditions_of(match)
        return any(certainty_of(conditions, facts) != "no" for facts in self._queried)

    def is_free(self, candidate: RewriteCandidate) -> bool:
        """Whether the policy leaves the choice for every size of a node."""
        facts = facts_of_node(candidate, self.device, self.arch)
        return self.policy.compiled_rules.match(facts).use == ("auto",)

    def names_kernel(self, op: str | None, words: tuple[str, ...]) -> bool:
        """Whether one of these words, before any ``auto``, means a kernel of this library; ``None``: of any operation.

        Answers are kept: rules by the thousand state few different kernels.
        """
        key = (op, words)
        if key not in self._named:
            self._named[key] = self._names_kernel(op, words)
        return self._named[key]

    def _names_kernel(self, op: str | None, words: tuple[str, ...]) -> bool:
        for word in words:
            if word == "auto":
                return False
            ops = (op,) if op is not None else OPS
            if all(by_option(op, word, cuda=self.device.startswith("cuda")) for op in ops):
                return False  # ONNX Runtime has it itself, and it comes first
            if any(kernels_of(op_, word) for op_ in ops):
                return True
        return False


#: The domain of xpuruntime's operators, version 1.
DOMAIN = "xpuruntime"


class KernelRequest(msgspec.Struct, frozen=True):
    """What a policy asks of one node."""

    words: tuple[str, ...]
    key: str
    keys: tuple[str, ...] = ()
    rest: str = ""


class NewTranspose(msgspec.Struct, frozen=True):
    """A Transpose that is put before a rewritten node: ``result = Transpose(source, perm)``."""

    name: str
    source: str
    perm: tuple[int, ...]
    result: str


class Form(msgspec.Struct, frozen=True):
    """One way to write a part of a graph as one of xpuruntime's operators."""

    op: str
    inputs: tuple[str, ...]
    output: str
    attributes: dict[str, Any]
    nodes: tuple[str, ...]
    describe: Callable[[int], dict[str, Any]]
    before: tuple[NewTranspose, ...] = ()


class RewriteCandidate(msgspec.Struct, frozen=True):
    """A node that one of xpuruntime's operators could replace, or why none can."""

    node: str
    op: str
    op_type: str
    dtype: str | None
    sizes: dict[str, int | None]
    forms: tuple[Form, ...] = ()
    refusal: str = ""


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """One node that becomes an xpuruntime operator."""

    node: str
    graph: str
    kind: str
    op: str
    inputs: tuple[str, ...]
    output: str
    attributes: dict[str, Any]
    nodes: tuple[str, ...]
    before: tuple[NewTranspose, ...] = ()
    words: tuple[str, ...] = ()
    key: str = ""
    keys: tuple[str, ...] = ()
    rest: str = ""

    def __str__(self) -> str:
        """Return it in one line, without the node's name."""
        folded = [name for name in self.nodes if name != self.node]
        shown = ", ".join(folded[:4]) + (f" and {len(folded) - 4} more" if len(folded) > 4 else "")
        text = f"{DOMAIN}.{self.op}" + (f" with {shown}" if folded else "")
        text += f" by {', '.join(self.words)} ({self.key})"
        return text + (f"; {self.rest}" if self.rest else "")


class UnrewrittenNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that a policy asks an xpuruntime kernel for and that stays with ONNX Runtime, with the reason."""

    node: str
    kind: str
    words: tuple[str, ...]
    key: str
    keys: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        """Return it in one line, without the node's name."""
        return f"stays with ONNX Runtime, although {self.key} asks for {', '.join(self.words)}: {self.reason}"


class FoundRewrites(msgspec.Struct, frozen=True):
    """What `find_rewrites` found."""

    rewrites: tuple[Rewrite, ...] = ()
    left: tuple[UnrewrittenNode, ...] = ()
    free: tuple[Rewrite, ...] = ()


T = TypeVar("T", Rewrite, UnrewrittenNode)


def by_key(records: Iterable[T]) -> dict[str, list[T]]:
    """Return what was found for nodes, by each policy key that may ask for their kernels."""
    grouped: dict[str, list[T]] = {}
    for record in records:
        for key in record.keys:
            grouped.setdefault(key, []).append(record)
    return grouped
