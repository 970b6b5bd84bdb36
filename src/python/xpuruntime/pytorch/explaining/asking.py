# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Asking`: what the policies that held in a block ask for, of calls that passed no override."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.pytorch.routing import DEFAULT_ID, NATIVE_WORDS

if TYPE_CHECKING:
    from xpuruntime.policies import KernelPolicy
    from xpuruntime.pytorch.held import Held

__all__ = ["Asking", "means_more"]


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

    def asked(self, op: str, **facts: Any) -> tuple[tuple[str, ...], str, bool]:
        """Return what is asked for, the key that asks, and whether that is sure.

        Parameters
        ----------
        op : str
        **facts
            As for `KernelPolicy.choose`. Where a rule depends on one that is ``None`` it may be meant or not; it is
            taken to be, and that is not sure.

        Returns
        -------
        tuple of (tuple of str, str, bool)
            Nothing and ``"default"`` where what is asked for is what PyTorch does anyway.
        """
        for kernels in self._policies.values():
            words, source = kernels.choose(op, **facts)
            if means_more(op, words):
                return words, source, True
            if source.startswith("kernels.rules"):
                continue
            for index, rule in enumerate(kernels.rules):
                used = () if rule.use is None else (rule.use,) if isinstance(rule.use, str) else tuple(rule.use)
                if used and means_more(op, used) and _may_match(rule.match, op, facts):
                    return used, f"kernels.rules[{index}]", False
        return (), "default", True


def means_more(op: str, words: tuple[str, ...]) -> bool:
    """Say whether words ask for more than PyTorch's own choice."""
    return any(word != "auto" and NATIVE_WORDS[op].get(word) != DEFAULT_ID[op] for word in words)


def _may_match(match: Any, op: str, facts: dict[str, Any]) -> bool:
    keys = ("m", "n", "k", "head_dim", "dtype", "device", "module")
    stated = {name: None for name in keys if facts.get(name) is None and getattr(match, name) is not None}
    if not stated:
        return False  # all that it depends on is known, and it was looked at
    rest = {name: getattr(match, name) for name in match.__struct_fields__ if name not in stated}
    if all(value is None for value in rest.values()):
        return True
    return bool(msgspec.structs.replace(match, **stated).matches(op=op, **facts))
