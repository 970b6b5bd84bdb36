# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RuleQuery`: the kernels that a policy requests for one node, before the sizes of a run are known."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.onnxruntime.kernel_options import by_option
from xpuruntime.engines.onnxruntime.rewriting.records import KernelRequest
from xpuruntime.policies.call_facts import UNKNOWN, CallFacts, unknown_sizes
from xpuruntime.policies.kernel_rules import OPS

if TYPE_CHECKING:
    from xpuruntime.engines.onnxruntime.rewriting.records import RewriteCandidate
    from xpuruntime.ops.decision_log import Decision
    from xpuruntime.policies import KernelPolicy

__all__ = ["RuleQuery", "facts_of_decision", "facts_of_node", "kernels_of", "module_of"]


def module_of(node: str) -> str:
    """Return the module that a node's name speaks of: ``"/encoder/layers.0/MatMul"`` is of ``"encoder.layers.0"``.

    Empty where the name has no path.
    """
    parts = [part for part in re.split(r"[/.]", node) if part]
    return ".".join(parts[:-1])


def kernels_of(op: str, word: str) -> tuple[str, ...]:
    """Return the ids of xpuruntime kernels that a word of a policy means; empty for a word that means none."""
    from xpuruntime import _core

    _ready()
    return tuple(_core.KernelRegistry.instance().find(op, word.partition("@")[0]))


@functools.cache
def _ready() -> None:
    """Let plugins register their kernels, and the core find the vendors' libraries."""
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

    @property
    def requests_kernels(self) -> bool:
        """Whether the policy requests a kernel of this library for anything."""
        compiled = self.policy.compiled_rules
        stated: list[tuple[str | None, tuple[str, ...]]] = [
            (op, preference.use) for op, preference in compiled.short_forms.items()
        ]
        stated += [(rule.rule.match.op, rule.use) for rule in compiled.rules if rule.use]
        return any(self.names_kernel(op, use) for op, use in stated)

    def asked(self, candidate: RewriteCandidate) -> KernelRequest | None:
        """Return what the policy requests for a node; ``None`` where no kernel of this library for any size."""
        result = self.policy.compiled_rules.match(facts_of_node(candidate, self.device, self.arch))
        found = [one for one in result.preferences if one.source != "default"]
        named = [one for one in found if self.names_kernel(candidate.op, one.use)]
        if not named:
            return None
        others = [one.source for one in found if one not in named]
        rest = ""
        if result.preferences[-1].source == "default":
            rest = "sizes that no rule is for go to the default choice of xpuruntime's dispatcher"
        elif others:
            rest = f"sizes of {', '.join(others)} go to the default choice of xpuruntime's dispatcher"
        return KernelRequest(named[0].use, named[0].source, tuple(one.source for one in named), rest)

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
            if all(by_option(one, word, cuda=self.device.startswith("cuda")) for one in ops):
                return False  # ONNX Runtime has it itself, and it comes first
            if any(kernels_of(one, word) for one in ops):
                return True
        return False
