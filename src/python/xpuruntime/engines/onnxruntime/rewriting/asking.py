# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a kernel policy asks of one node, before the sizes of a run are known."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.onnxruntime.kernel_options import by_option
from xpuruntime.engines.onnxruntime.rewriting.records import Asked
from xpuruntime.policies.kernel_rule import contains

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.onnxruntime.rewriting.records import Candidate
    from xpuruntime.policies import KernelPolicy
    from xpuruntime.policies.kernel_rule import RuleMatch

__all__ = ["Asking", "kernels_of", "module_of"]

_SIZES = ("m", "n", "k", "head_dim")


def module_of(node: str) -> str:
    """Return the module that a node's name speaks of: ``"/encoder/layers.0/MatMul"`` is of ``"encoder.layers.0"``.

    Empty where the name has no path.
    """
    parts = [part for part in re.split(r"[/.]", node) if part]
    return ".".join(parts[:-1])


def kernels_of(op: str, word: str) -> tuple[str, ...]:
    """Return the ids of our kernels that a word of a policy means; empty for a word that means none."""
    from xpuruntime import _core

    _ready()
    return tuple(_core.KernelRegistry.instance().find(op, word.partition("@")[0]))


@functools.cache
def _ready() -> None:
    """Let plugins register their kernels, and the core find the vendors' libraries."""
    from xpuruntime.ops.ambient import prepare

    prepare()


class Asking:
    """A kernel policy, asked about the nodes of a graph.

    Parameters
    ----------
    policy : KernelPolicy
    device : str
        Concrete, such as ``"cuda:0"``.
    arch : str or None
        Such as ``"sm90"``.
    """

    def __init__(self, policy: KernelPolicy, device: str, arch: str | None) -> None:
        self.policy = policy
        self.device = device
        self.arch = arch

    @property
    def speaks(self) -> bool:
        """Whether the policy asks any kernel of ours for anything."""
        stated: list[tuple[str | None, Any]] = list(self.policy.preferences.items())
        stated += [(rule.match.op, rule.use) for rule in self.policy.rules if rule.use is not None]
        return any(self.ours(op, _tuple(words)) for op, words in stated)

    def asked(self, candidate: Candidate) -> Asked | None:
        """Return what the policy asks of a node; ``None`` where it asks no kernel of ours for any size."""
        found: list[tuple[tuple[str, ...], str, bool]] = []
        for index, rule in enumerate(self.policy.rules):
            if rule.use is None:
                continue
            holds = self._holds(rule.match, candidate)
            if holds is not False:
                found.append((_tuple(rule.use), f"kernels.rules[{index}]", holds is True))
            if holds:
                break
        else:
            words = self.policy.get(candidate.op)
            if words is not None:
                found.append((_tuple(words), f"kernels.{candidate.op}", True))
        ours = [(words, key) for words, key, _ in found if self.ours(candidate.op, words)]
        if not ours:
            return None
        certain = any(sure for _, _, sure in found)
        words, key = ours[0]
        others = [key for words, key, _ in found if (words, key) not in ours]
        rest = ""
        if not certain:
            rest = "sizes that no rule is for go to the default choice of our dispatcher"
        elif others:
            rest = f"sizes of {', '.join(others)} go to the default choice of our dispatcher"
        return Asked(words, key, tuple(key for _, key in ours), rest)

    def is_free(self, candidate: Candidate) -> bool:
        """Whether the policy leaves the choice for every size of a node."""
        for rule in self.policy.rules:
            if rule.use is not None and self._holds(rule.match, candidate) is not False:
                return _tuple(rule.use) == ("auto",)
        return _tuple(self.policy.get(candidate.op) or "auto") == ("auto",)

    def ours(self, op: str | None, words: tuple[str, ...]) -> bool:
        """Whether one of these words, before any ``auto``, means a kernel of ours."""
        from xpuruntime.policies.kernel_ids import OPS

        for word in words:
            if word == "auto":
                return False
            ops = (op,) if op is not None else OPS
            if all(by_option(one, word, cuda=self.device.startswith("cuda")) for one in ops):
                return False  # ONNX Runtime has it itself, and it comes first
            if any(kernels_of(one, word) for one in ops):
                return True
        return False

    def _holds(self, match: RuleMatch, candidate: Candidate) -> bool | None:
        """Say whether a rule is for a node; ``None``: for some sizes of it."""
        facts: dict[str, Any] = {
            "op": candidate.op,
            "dtype": candidate.dtype,
            "device": self.device,
            "arch": self.arch,
            "node": candidate.node,
            "module": module_of(candidate.node) or None,
            "phase": "infer",
        }
        without = match.replace(**dict.fromkeys(_SIZES)) if _stated_sizes(match) else match
        if without.stated_fields() and not without.matches(**facts):
            return False
        return _sizes_hold(match, candidate.sizes)


def _stated_sizes(match: RuleMatch) -> list[str]:
    return [name for name in _SIZES if getattr(match, name) is not None]


def _sizes_hold(match: RuleMatch, known: Mapping[str, int | None]) -> bool | None:
    certain: bool | None = True
    for name in _stated_sizes(match):
        if name not in known:
            return False  # the operation has no such size
        size = known[name]
        if size is None:
            certain = None
        elif not contains(getattr(match, name), size):
            return False
    return certain


def _tuple(words: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else words or ()
