# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RequestedKernels`: what the policies active in a block request for calls that passed no override."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.pytorch.dispatch.route import DEFAULT_ID, NATIVE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xpuruntime.policies import KernelPolicy
    from xpuruntime.policies.call_facts import CallFacts
    from xpuruntime.policies.compiled_rules import Preference
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy

__all__ = ["RequestedKernels", "request_of", "requests_other_kernel", "uncertain"]


class RequestedKernels:
    """The policies that held at some time in a block."""

    def __init__(self) -> None:
        self._policies: dict[int, KernelPolicy] = {}
        self._active: dict[int, CompiledPolicy] = {}

    def note(self, active: CompiledPolicy | None) -> None:
        """Take note of a policy that holds."""
        if active is not None:
            self._policies.setdefault(active.number, active.policy.kernels)
            self._active.setdefault(active.number, active)

    def unmatched(self) -> tuple[str, ...]:
        """Return a sentence for each rule of a module that no call has matched."""
        return tuple(sentence for active in self._active.values() for sentence in active.rule_use.unmatched())

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
    found = next((one for one in result.preferences if requests_other_kernel(op, one.use)), None)
    return found, result.certainty != "unknown"


def uncertain(source: str) -> str:
    """Return that a rule depends on facts of a call that are not known."""
    return f"whether {source} matches these calls is not known"


def requests_other_kernel(op: str, kernel_names: Iterable[str]) -> bool:
    """Say whether kernel names ask for more than PyTorch's own choice."""
    return any(
        kernel_name != "auto" and NATIVE_NAMES[op].get(kernel_name) != DEFAULT_ID[op] for kernel_name in kernel_names
    )
