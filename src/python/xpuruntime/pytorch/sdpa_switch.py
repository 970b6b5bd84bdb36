# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What of a policy for attention PyTorch has a switch for: the SDPA backends of the whole process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.policies import Policy

__all__ = ["attention_settled", "attention_switch"]


def attention_settled(policy: Policy) -> bool:
    """Say whether the short form of attention is done by `attention_switch` for all calls, at no cost for each."""
    del policy
    return False


def attention_switch(policy: Policy) -> Callable[[], Any] | None:
    """Set PyTorch's switches for what `attention_settled` says. Returns what gives them back, or ``None``.

    Raises
    ------
    PolicyError
        The policy is strict, and this PyTorch cannot do it.
    """
    del policy
    return None
