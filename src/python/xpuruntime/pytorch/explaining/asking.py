# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Asking`: what the policies that held in a block ask for, of calls that passed no override."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.pytorch.routing import DEFAULT_ID, NATIVE_WORDS

if TYPE_CHECKING:
    from xpuruntime.policies import KernelPolicy
    from xpuruntime.policies.call_facts import CallFacts
    from xpuruntime.policies.compiled_rules import Preference
    from xpuruntime.pytorch.held import Held

__all__ = ["Asking", "means_more", "request_of", "uncertain"]


class Asking:
    """The policies that held at some time in a block."""

    def __init__(self) -> None:
        self._policies: dict[int, KernelPolicy] = {}
        self._held: dict[int, Held] = {}

    def note(self, held: Held | None) -> None:
        """Take note of a policy that holds."""
        if held is not None:
            self._policies.setdefault(held.number, held.policy.kernels)
            self._held.setdefault(held.number, held)

    def unmatched(self) -> tuple[str, ...]:
        """Return a sentence for each rule of a module that no call has matched."""
        return tuple(sentence for held in self._held.values() for sentence in held.rule_use.unmatched())

    def asked(self, facts: CallFacts) -> tuple[tuple[str, ...], str, bool]:
        """Return what is asked for a call, the key that asks, and whether that is sure.

        Nothing and ``"default"`` where what is asked for is what PyTorch does anyway.
        """
        for kernels in self._policies.values():
            found, sure = request_of(kernels, facts)
            if found is not None:
                return found.use, found.source, sure
        return (), "default", True


def request_of(kernels: KernelPolicy, facts: CallFacts) -> tuple[Preference | None, bool]:
    """Return the first preference for a call that asks for more than PyTorch's own choice, and whether it is sure."""
    result = kernels.compiled_rules.match(facts)
    op = str(facts.op)
    found = next((one for one in result.preferences if means_more(op, one.use)), None)
    return found, result.certainty != "unknown"


def uncertain(source: str) -> str:
    """Return that a rule depends on facts of a call that are not known."""
    return f"whether {source} means these calls cannot be told"


def means_more(op: str, words: tuple[str, ...]) -> bool:
    """Say whether words ask for more than PyTorch's own choice."""
    return any(word != "auto" and NATIVE_WORDS[op].get(word) != DEFAULT_ID[op] for word in words)
