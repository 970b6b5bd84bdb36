# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch's own process-wide switches, set for a policy and given back after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.policies import Policy

__all__ = ["Switches", "set_switches", "settled_by_switches"]


def settled_by_switches(policy: Policy, op: str) -> bool:
    """Say whether the short form of `op` is done by a switch for all calls, so that no call is looked at."""
    from xpuruntime.pytorch.sdpa_switch import attention_settled

    if op == "attention" and attention_settled(policy):
        return True
    words = policy.kernels.get(op)
    return words in ("torch", f"torch.{op}", "auto") and not (
        words == "auto" and policy.kernels.auto_strategy == "best_performance"
    )


class Switches:
    """Switches that are set, each with what gives it back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def release(self) -> None:
        """Give them back, last first. Idempotent."""
        while self._undo:
            self._undo.pop()()


def set_switches(policy: Policy) -> Switches:
    """Set what `policy` settles by switches."""
    from xpuruntime.pytorch.sdpa_switch import attention_switch

    switches = Switches()
    undo = attention_switch(policy)
    if undo is not None:
        switches._undo.append(undo)
    return switches
