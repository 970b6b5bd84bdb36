# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`KernelDecision`: xpuruntime kernels considered for a call of an instrumented pass, and the one that served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DecisionSource", "KernelCandidate", "KernelDecision", "merged"]

DecisionSource = Literal["pinned", "rule", "tuned", "first", "fallback"]


class KernelCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel that could have run, and what became of it.

    Attributes
    ----------
    id : str
        ``backend.name``; or a word of the policy that names no kernel here.
    config : str
        What is settled inside of the kernel, such as a library's algorithm; empty: its default choice.
    accepted : bool
        Whether it can serve. One that was not looked at, because another was found first, is not accepted.
    reason : str
        One sentence; empty only for what was chosen.
    measured_us : float or None
        Microseconds of one call, where it was measured.
    """

    id: str
    config: str
    accepted: bool
    reason: str
    measured_us: float | None

    @property
    def kernel(self) -> str:
        """The kernel with its configuration, as a policy takes it."""
        return f"{self.id}@{self.config}" if self.config else self.id


class KernelDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Why calls of one kind, on operands of given types and shapes, ran by the kernel that they did.

    Attributes
    ----------
    op : str
        As policies name it: ``"matmul"``, ``"layer_norm"`` and so on.
    description : str
        One line: operation, operands, device.
    nodes : tuple of str
        The source nodes that called, as units name them; empty where no node is known.
    module : str
        The module that called, where one is known.
    shapes : dict
        Operand to shape; empty where the engine's own kernel serves.
    dtype, device, phase : str
        Empty where they are not known.
    asked : tuple of str
        Kernels that were asked for, in order; ``("auto",)`` where the choice was free.
    asked_by : str
        The policy key: ``"kernels.matmul"``, ``"kernels.rules[0]"``; ``"kernels.auto_strategy"`` where an xpuruntime
        kernel was measured against the engine's; ``"default"`` where none was requested.
    source : {"pinned", "rule", "tuned", "first", "fallback"}
        The kernel that the policy's short form asks for; that of a rule; by times measured now or in the tuning
        cache; the first that can serve; in place of what was asked for and cannot serve.
    chosen : str or None
        What ran: ``backend.name``; of PyTorch's own the word that a policy has for it, ``torch.flash``. ``None`` where
        another kernel of the engine's did.
    config : str
    candidates : tuple of KernelCandidate
    notes : tuple of str
        A replacement and its reason, a measurement that was not possible.
    count : int or None
        Calls in the instrumented pass, all nodes together; ``None`` where they are not counted, since ONNX Runtime's
        own kernel serves.
    """

    op: str
    description: str
    nodes: tuple[str, ...]
    module: str
    shapes: dict[str, tuple[int, ...]]
    dtype: str
    device: str
    phase: str
    asked: tuple[str, ...]
    asked_by: str
    source: DecisionSource
    chosen: str | None
    config: str
    candidates: tuple[KernelCandidate, ...]
    notes: tuple[str, ...]
    count: int | None

    @property
    def kernel(self) -> str | None:
        """The kernel with its configuration, as a policy takes it; ``None`` where the engine's own ran."""
        return f"{self.chosen}@{self.config}" if self.chosen and self.config else self.chosen


def merged(decisions: Iterable[KernelDecision]) -> tuple[KernelDecision, ...]:
    """Return decisions that differ in nothing but their nodes as one, with the calls of all of them."""
    found: dict[bytes, KernelDecision] = {}
    for one in decisions:
        key = msgspec.json.encode(msgspec.structs.replace(one, nodes=(), count=None if one.count is None else 0))
        known = found.get(key)
        if known is None:
            found[key] = one
            continue
        nodes = tuple(dict.fromkeys((*known.nodes, *one.nodes)))
        count = None if known.count is None or one.count is None else known.count + one.count
        found[key] = msgspec.structs.replace(known, nodes=nodes, count=count)
    return tuple(found.values())
