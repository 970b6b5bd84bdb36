# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`find_divergence`: the first node of a model whose output is out of tolerance on an engine.

The nodes that lead to a wrong output are taken in the order of the graph. After each of them there is a cut: the
tensors made before it that are still read after it. A fault that reaches the output goes through every cut behind it,
so the first cut that is out of tolerance is found by bisection, and the node before it is the one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.model.graph import reads
from xpuruntime.error_text import error_line
from xpuruntime.errors import XpuRuntimeError
from xpuruntime.evidence.tolerances import compare_within
from xpuruntime.inference.reference_taps import Inside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.evidence.tolerances import OutputFigures, ProbeResult, Tolerance

    Answer = Callable[[ModelInfo], Mapping[str, Any]]

__all__ = ["Divergence", "find_divergence"]


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine leaves the reference."""

    nodes: tuple[str, ...]
    op: str
    output: str
    figures: OutputFigures
    steps: int
    note: str = ""

    def __str__(self) -> str:
        """Return it as one sentence."""
        figures = f"output {self.output!r}: {self.figures.reason}"
        if len(self.nodes) == 1:
            return f"first divergence at node {self.nodes[0]!r} ({self.op}), {figures}"
        named = f"{self.nodes[0]!r} to {self.nodes[-1]!r} ({self.op})"
        return f"first divergence in the {len(self.nodes)} nodes {named}, {figures}. {self.note}"


def find_divergence(
    info: ModelInfo, feeds: Mapping[str, Any], failing: ProbeResult, limits: Tolerance, answer: Answer
) -> Divergence | None:
    """Find the first node whose output is out of tolerance."""
    search = _Search(info, feeds, failing, limits, answer)
    return search.run() if search.order else None


class _Search:
    def __init__(
        self, info: ModelInfo, feeds: Mapping[str, Any], failing: ProbeResult, limits: Tolerance, answer: Answer
    ) -> None:
        self.limits, self.answer = limits, answer
        self.wrong = {f.name: f for f in failing.outputs if not f.passed}
        self.inside = Inside(info, feeds)
        self.nodes, self.outputs = self.inside.nodes, self.inside.outputs
        self.order = self._ancestors()
        self.found: dict[int, OutputFigures] = {}
        self.steps = 0
        self.blocked: dict[int, str] = {}

    def _ancestors(self) -> list[int]:
        """Return the nodes that lead to the first wrong output of the graph, in its order."""
        makers = {name: i for i, node in enumerate(self.nodes) for name in node.output if name}
        targets = [name for name in self.wrong if name in self.outputs and name in makers]
        self.targets = set(targets)
        seen: set[int] = set()
        waiting = [makers[name] for name in targets]
        while waiting:
            index = waiting.pop()
            if index not in seen:
                seen.add(index)
                waiting.extend(makers[name] for name in reads(self.nodes[index]) if name in makers)
        return sorted(seen)

    def run(self) -> Divergence | None:
        low, high = -1, len(self.order) - 1
        while high - low > 1:
            verdict, at = self._nearest(low, high)
            if verdict is None:
                break
            low, high = (low, at) if verdict else (at, high)
        span = [self.nodes[self.order[i]] for i in range(low + 1, high + 1)]
        figures = self.found.get(high) or next((self.wrong[name] for name in self.wrong if name in self.targets), None)
        if figures is None:
            return None
        note = ""
        if len(span) > 1:
            reasons = list(dict.fromkeys(self.blocked[i] for i in range(low + 1, high) if i in self.blocked))
            note = "They cannot be distinguished: " + "; ".join(reasons[:2])
        return Divergence(
            nodes=tuple(node.name for node in span),
            op=span[-1].op_type,
            output=figures.name,
            figures=figures,
            steps=self.steps,
            note=note,
        )

    def _nearest(self, low: int, high: int) -> tuple[bool | None, int]:
        """Judge the middle of a range, or what is nearest to it of what can be judged."""
        middle = (low + high) // 2
        for index in sorted(range(low + 1, high), key=lambda i: abs(i - middle)):
            verdict = None if index in self.blocked else self._diverged(index)
            if verdict is not None:
                return verdict, index
        return None, middle

    def _cut(self, index: int) -> list[str]:
        """Return the tensors made by the first nodes, up to `index`, that are read later or are wrong outputs."""
        made = {name for i in self.order[: index + 1] for name in self.nodes[i].output if name}
        later = {name for i in self.order[index + 1 :] for name in reads(self.nodes[i])}
        return sorted(made & (later | self.targets))

    def _diverged(self, index: int) -> bool | None:
        """Whether the cut after a node is out of tolerance; ``None`` where that cannot be seen."""
        cut = self._cut(index)
        try:
            want = self._reference(cut)
            model = self.inside.with_outputs(want)
            got = self.answer(model)
        except XpuRuntimeError as error:
            self.blocked[index] = f"the model was refused with more outputs: {error_line(error)}"
            return None
        finally:
            self.steps += 1
        if len(want) < len(cut):
            hidden = ", ".join(repr(name) for name in cut if name not in want)
            missing = f"no plain array can be had of {hidden}"
        else:
            missing = ""
        if not all(name in got for name in want):
            self.blocked[index] = "the engine gave no array for a tensor that was asked for"
            return None
        seen = compare_within(want, {name: got[name] for name in want}, self.limits, model.random_outputs)
        bad = [figures for figures in seen.outputs if not figures.passed]
        if bad:
            own = set(self.nodes[self.order[index]].output)
            self.found[index] = next((figures for figures in bad if figures.name in own), bad[0])
            return True
        if missing:
            self.blocked[index] = missing
            return None
        if not self._still_wrong(got):
            self.blocked[index] = "with more outputs the engine computes the right results, so it fused these nodes"
            return None
        return False

    def _still_wrong(self, got: Mapping[str, Any]) -> bool:
        names = [name for name in self.targets if name in got]
        want = {name: array for name, array in self._plain.items() if name in names}
        return not compare_within(want, {n: got[n] for n in want}, self.limits).passed

    def _reference(self, names: Sequence[str]) -> dict[str, Any]:
        """Return those of the tensors that are plain arrays, and keep the outputs that are wrong on the engine."""
        found = self.inside.reference((*names, *self.targets))
        self._plain = {name: found[name] for name in self.targets if name in found}
        return {name: found[name] for name in names if name in found}
