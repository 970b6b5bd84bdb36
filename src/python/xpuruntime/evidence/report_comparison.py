# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ReportComparison`: what differs between two reports, as one value that can be shown and written as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from xpuruntime.evidence.difference import Difference
from xpuruntime.evidence.documents import Page
from xpuruntime.evidence.records import Status, Time

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "COMPARISON_SCHEMA",
    "BoundaryChange",
    "DecisionChange",
    "GroupChange",
    "KeyChange",
    "MemoryChange",
    "ReportComparison",
    "ReportSide",
    "TimeChange",
    "TimeVerdict",
    "UnitSide",
    "What",
]

COMPARISON_SCHEMA = "xpuruntime.report_comparison/2"

#: What can be otherwise about a source node, or about what an engine inserted.
What = Literal["placement", "kernel", "precision", "layout", "grouping", "folding", "inserted"]


TimeVerdict = Literal["slower", "faster", "same", "undecided"]


class _Change(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen, keyword-only value."""


class ReportSide(_Change, frozen=True, kw_only=True):
    """Which of the two reports is meant: its name, when and how it was made, and its own headline."""

    name: str
    created: str
    command: str
    model: str
    engine: str
    device: str
    precision: str
    headline: str
    partial: bool


class TimeChange(_Change, frozen=True, kw_only=True):
    """Two times of one unit and kind.

    Attributes
    ----------
    before, after : float
    unit : str
    kind : {"wall", "device", "cycles", "simulated"}
    change : float or None
        ``after / before - 1``; ``None`` where `before` is zero.
    verdict : {"slower", "faster", "same", "undecided"}
        ``"same"`` where the difference is within the noise that was stated for the comparison, ``"undecided"`` where it
        is within the spread of the runs of the reports, or a report has a single run. Neither claims anything.
    """

    before: float
    after: float
    unit: str
    kind: Literal["wall", "device", "cycles", "simulated"]
    change: float | None
    verdict: TimeVerdict


class UnitSide(_Change, frozen=True, kw_only=True):
    """One unit of one of the reports, in a group; the fields are those of `Unit`."""

    id: str
    op: str
    relation: str
    source_nodes: tuple[str, ...]
    engine: str
    device: str
    provider: str | None
    kernel: str | None
    precision: str | None
    layout: str | None
    time: Time | None


class GroupChange(_Change, frozen=True, kw_only=True):
    """Source nodes that whole units of both reports stand for, and what is otherwise about them.

    Attributes
    ----------
    nodes : tuple of str
        Empty for what the engines inserted on behalf of no node.
    what : dict of str to tuple of str
        ``placement``, ``kernel``, ``precision``, ``layout``, ``grouping``, ``folding`` to the nodes that differ in it;
        ``inserted`` to the operators whose number differs. Empty where only the time differs.
    before, after : tuple of UnitSide
    time : TimeChange or None
        Of all units of the group; ``None`` where the times are missing or of different kinds.
    """

    nodes: tuple[str, ...]
    what: dict[What, tuple[str, ...]]
    before: tuple[UnitSide, ...]
    after: tuple[UnitSide, ...]
    time: TimeChange | None


class KeyChange(_Change, frozen=True, kw_only=True):
    """A policy key whose request or status differs. A fact that a report leaves out is ``None``."""

    key: str
    requested_before: str | None
    requested_after: str | None
    observed_before: str | None
    observed_after: str | None
    status_before: Status | None
    status_after: Status | None
    reason: str

    @property
    def deviates(self) -> bool:
        """Whether the status differs, or only one report states the key and deviates from it."""
        if self.status_before is not None and self.status_after is not None:
            return self.status_before != self.status_after
        return (self.status_before or self.status_after) in ("substituted", "unsupported", "inconclusive")


class BoundaryChange(_Change, frozen=True, kw_only=True):
    """Work at a border that came, went, or was done more or less often; a count of 0 means none."""

    kind: str
    where: str
    count_before: int
    count_after: int
    bytes_before: int | None
    bytes_after: int | None
    time: TimeChange | None


class DecisionChange(_Change, frozen=True, kw_only=True):
    """Calls that another kernel serves: the same nodes, on operands of the same shapes and types.

    Attributes
    ----------
    nodes : tuple of str
        Empty where no node is known.
    op, description : str
        As in `KernelDecision`; `description` is empty where the engine's own kernels serve all calls of the nodes.
    kernel_before, kernel_after : str
        With the configuration; or ``"the engine's own"``.
    asked_before, asked_after : str
        Kernels that were asked for.
    asked_by_before, asked_by_after : str
        The policy keys that asked.
    source_before, source_after : str
        How it was chosen, as in `KernelDecision`.
    reason : str
        Why the kernel of the first report does not run in the second, where that is said.
    """

    nodes: tuple[str, ...]
    op: str
    description: str
    kernel_before: str
    kernel_after: str
    asked_before: str
    asked_after: str
    asked_by_before: str
    asked_by_after: str
    source_before: str
    source_after: str
    reason: str


class MemoryChange(_Change, frozen=True, kw_only=True):
    """Bytes of one owner; ``None`` where a report does not name the owner."""

    owner: str
    before: int | None
    after: int | None


class ReportComparison(Page, frozen=True, kw_only=True):
    """What differs between two reports; `compare_reports` makes it.

    Attributes
    ----------
    before, after : ReportSide
    noise, noise_us : float
        Times that differ by less than this share of the first, or by less than these microseconds, count as the same.
    groups : tuple of GroupChange
        Only those in which something differs; an engine that inserted other work is the last, without nodes.
    unchanged : int
        Source nodes about which nothing differs.
    only_before, only_after : tuple of str
        Source nodes that only one of the reports accounts for.
    keys : tuple of KeyChange
    boundaries : tuple of BoundaryChange
    latency : TimeChange or None
        Of whole runs without instruments.
    totals : tuple of TimeChange
        Of all units together, one for each kind of time.
    memory : tuple of MemoryChange
    surroundings : tuple of Difference
        Packages, libraries, driver, variables and settings.
    notes : tuple of str
        What was not compared, and why.
    decisions : tuple of DecisionChange
        Calls that another xpuruntime kernel serves; where only one report has decisions, a note says so.
    peaks : tuple of MemoryChange
        The most that owners held during the pass, where it differs by more than `noise`, and the most that tensors
        between units need, where that differs at all.
    cuda_graph : tuple of Difference
        The status of CUDA graphs, and what prevents one in only one of the reports: ``"node (Op)"``.
    shapes : tuple of Difference
        Inputs of which other shapes are ``"allowed"``, or were ``"observed"``.
    """

    WIDTH: ClassVar = 80
    NOUN: ClassVar = "the comparison"
    STATED: ClassVar = ("headline", "same")

    schema: str = COMPARISON_SCHEMA
    before: ReportSide
    after: ReportSide
    noise: float
    noise_us: float
    groups: tuple[GroupChange, ...]
    unchanged: int
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    keys: tuple[KeyChange, ...]
    boundaries: tuple[BoundaryChange, ...]
    latency: TimeChange | None
    totals: tuple[TimeChange, ...]
    memory: tuple[MemoryChange, ...]
    surroundings: tuple[Difference, ...]
    notes: tuple[str, ...]
    decisions: tuple[DecisionChange, ...] = ()
    peaks: tuple[MemoryChange, ...] = ()
    cuda_graph: tuple[Difference, ...] = ()
    shapes: tuple[Difference, ...] = ()

    def nodes_that(self, what: What) -> tuple[str, ...]:
        """Return the source nodes that differ in one of placement, kernel, precision, layout, grouping, folding."""
        return tuple(node for group in self.groups for node in group.what.get(what, ()))

    @property
    def same(self) -> bool:
        """Whether the same ran.

        No node differs in placement, kernel, precision, layout, grouping or folding, the engines inserted the same, no
        policy key changed status, no boundary came or went, no call is served by another xpuruntime kernel, and both
        reports account for the same nodes. Times, memory, CUDA graphs, shapes and surroundings do not count.
        """
        moved = any(group.what for group in self.groups)
        borders = any(boundary.count_before != boundary.count_after for boundary in self.boundaries)
        status = any(key.deviates for key in self.keys)
        return not (moved or borders or status or self.decisions or self.only_before or self.only_after)

    @property
    def headline(self) -> str:
        """One sentence, such as ``"nothing moved"`` or ``"3 nodes moved, 1 changed precision, 12 % slower"``."""
        from xpuruntime.evidence.render_text.changes import headline

        return headline(self)

    def to_html(self) -> str:
        """Return one page for a browser, which loads nothing from elsewhere: style, script and data are in it."""
        from xpuruntime.evidence.page import render_changes

        return render_changes(self)

    def __rich__(self) -> RenderableType:
        from xpuruntime.evidence.render_text.changes import render

        return render(self)
