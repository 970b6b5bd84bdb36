# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CaptureReport`: the parts of a step that run as a graph, and the reason for each that does not."""

from __future__ import annotations

from dataclasses import dataclass

from xpuruntime.printable import printable

__all__ = ["CaptureReport", "GraphInfo"]


@dataclass(frozen=True)
class GraphInfo:
    """One graph of a step.

    Attributes
    ----------
    key : str
        What it was captured for: the inputs, and what differs from the usual.
    bytes : int
        By how much the shared pool grew for it, and its input buffers. A graph that finds room in the pool needs
        less than its work does.
    hits : int
        Calls that it has served.
    """

    key: str
    bytes: int
    hits: int


@dataclass(frozen=True)
class CaptureReport:
    """What of a step runs as a graph, what does not, and why.

    Attributes
    ----------
    device : str
    captured : bool
        Whether calls are served by graphs, as far as is known now.
    optimizer, scaler : str
        ``"in the graph"``, ``"after each replay"``, ``"in fn"``, ``"eager"`` or ``"none"``.
    reasons : tuple of str
        Why something runs eagerly, each once.
    notes : tuple of str
        What is worth knowing besides.
    graphs : tuple of GraphInfo
        Least recently used first.
    captures, replays, eager_calls : int
        How many there were.
    """

    device: str
    captured: bool
    optimizer: str
    scaler: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    graphs: tuple[GraphInfo, ...]
    captures: int
    replays: int
    eager_calls: int

    @property
    def whole_step(self) -> bool:
        """Whether nothing of the step runs outside of its graph."""
        return self.captured and "after each replay" not in (self.optimizer, self.scaler)

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += [f"  graph {graph.key}: {graph.bytes / 2**20:.1f} MiB, {graph.hits} calls" for graph in self.graphs]
        return printable("\n".join([*lines, *(f"  {line}" for line in self._remarks())]))

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import fragment, fragment_lines, fragment_table

        rows = [(graph.key, f"{graph.bytes / 2**20:.1f} MiB", str(graph.hits)) for graph in self.graphs]
        parts = [fragment_lines([self._headline()])]
        if rows:
            parts.append(fragment_table("graphs", ("captured for", ">size", ">calls"), rows))
        return fragment([*parts, fragment_lines(self._remarks())])

    def _headline(self) -> str:
        return (
            f"step on {self.device}: {'captured' if self.captured else 'eager'}; "
            f"optimizer {self.optimizer}, scaler {self.scaler}; "
            f"{self.captures} captured, {self.replays} replayed, {self.eager_calls} eager"
        )

    def _remarks(self) -> list[str]:
        return [*(f"because {reason}" for reason in self.reasons), *(f"note: {note}" for note in self.notes)]
