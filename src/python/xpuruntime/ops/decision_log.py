# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Log of the dispatcher's decisions: which kernel serves an operation, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime import _core
from xpuruntime.evidence.kernels.decisions import DecisionSource, KernelCandidate

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Decision", "Decisions", "KernelCandidate", "clear_decisions", "decisions", "recorded"]


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Why one operation, on tensors of given types, shapes and strides, runs by the kernel it does.

    Attributes
    ----------
    op : str
        ``"matmul"``, ``"attention_backward"`` and so on.
    description : str
        One line: operation, shapes, dtype, device.
    shapes : dict
        Operand to shape.
    dtype, device, phase : str
    node, module : str
        Names of the place that called, where it has one.
    asked : tuple of str
        Kernels that were asked for, in order; ``("auto",)`` where the choice was free.
    asked_by : str
        Who asked: ``"kernels.matmul"``, ``"kernels.rules[0]"``, ``"kernel="`` or ``"default"``.
    candidates : tuple of KernelCandidate
        Every kernel that is registered for the operation.
    chosen, config : str
        What runs. ``chosen@config`` as a kernel replays exactly that.
    source : {"pinned", "rule", "tuned", "first", "fallback"}
        By the policy's short form or the call itself; by a rule; by measured times; the first that can serve; in
        place of what was asked for and cannot serve.
    notes : tuple of str
        What one should know besides: a replacement and its reason, a measurement that was not possible.
    count : int
        Calls served so far.
    text : str
        All of it for people, in several lines; also ``str(decision)``.
    """

    op: str
    description: str
    shapes: dict[str, tuple[int, ...]]
    dtype: str
    device: str
    phase: str
    node: str
    module: str
    asked: tuple[str, ...]
    asked_by: str
    candidates: tuple[KernelCandidate, ...]
    chosen: str
    config: str
    source: DecisionSource
    notes: tuple[str, ...]
    count: int
    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def kernel(self) -> str:
        """The kernel with its configuration, as a policy or ``kernel=`` takes it to replay exactly this."""
        return f"{self.chosen}@{self.config}" if self.config else self.chosen

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


class Decisions(tuple[Decision, ...]):
    """Decisions, oldest first. ``print`` shows what served and what became of the other kernels; each has all of it.

    Attributes
    ----------
    dropped : int
        Decisions that are not among them, since the log was full.
    """

    dropped = 0

    def __str__(self) -> str:
        from xpuruntime.evidence.render_text.tables import plain

        return plain(self.__rich__()).lstrip("\n")

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import rich_fragment

        return rich_fragment(self.__rich__())

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from xpuruntime.evidence.render_text.decision_tables import decision_tables
        from xpuruntime.ops.recording import as_record

        if not self:
            return Text("no decision: no xpuruntime kernel was called since the start, or since clear_decisions()")
        records = [as_record(one, (one.node,) if one.node else ()) for one in self]
        title = f"xpuruntime kernels: {len(self)} kinds of calls"
        if self.dropped:
            title += f"; {self.dropped} more came when the log was full and are not listed"
        return Group(*decision_tables(records, title))


def decisions() -> Decisions:
    """Return the distinct decisions of this process, oldest first; a tuple that ``print`` shows as tables.

    At most 10,000 are kept; ``_core`` serves later ones without recording them, and `Decisions.dropped` counts them.
    What is decided in an instrumented pass, that of `InferenceSession.explain`, is in its report and not among them.

    Examples
    --------
    >>> import numpy as np
    >>> import xpuruntime as xrt
    >>> xrt.ops.clear_decisions()
    >>> out = xrt.ops.matmul(np.ones((2, 3)), np.ones((3, 4)), kernel="cpu.reference")
    >>> xrt.decisions()[-1].chosen
    'cpu.reference'
    """
    return recorded(_core.Dispatcher.instance())


def recorded(log: _core.DecisionLog | _core.Dispatcher | _core.CallSite) -> Decisions:
    """Return the decisions of a log, oldest first."""
    found = Decisions(msgspec.convert(one, Decision) for one in log.decisions())
    if isinstance(log, _core.DecisionLog):
        found.dropped = log.dropped
    elif isinstance(log, _core.Dispatcher):
        found.dropped = log.dropped_decisions
    return found


def clear_decisions() -> None:
    """Forget the decisions recorded so far. Choices that were made still hold; they are recorded when made anew."""
    _core.Dispatcher.instance().clear_decisions()
