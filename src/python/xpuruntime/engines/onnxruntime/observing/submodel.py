# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Give every source node to exactly one optimized node, or to none because it does not run.

An optimized node stands for the part of the source graph between what it writes and the nearest tensors that exist in
the optimized graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xpuruntime.engines.onnxruntime.observing.graph import settled_order
from xpuruntime.engines.onnxruntime.observing.node_matching import NO_EFFECT, is_carrier

if TYPE_CHECKING:
    from xpuruntime.engines.onnxruntime.observing.graph import GraphView, NodeView
    from xpuruntime.engines.onnxruntime.observing.node_matching import SourceFacts

COMPUTED = "computed at load time: it depends on constants only"
ABSORBED = "computed at load time: its result is a constant of the optimized graph"
EQUAL = "removed: its output equals its input"
UNUSED = "removed: nothing uses its result"
LOST = "not found in the optimized graph"


@dataclass(slots=True)
class Shares:
    """Who stands for what."""

    owned: dict[int, list[int]] = field(default_factory=dict)
    serves: dict[int, list[int]] = field(default_factory=dict)
    idle: dict[int, str] = field(default_factory=dict)


def share_out(source: GraphView, optimized: GraphView, facts: SourceFacts, matches: dict[str, str]) -> Shares:
    """Give every source node to exactly one optimized node or to `Shares.idle`."""
    sharing = _Sharing(source, optimized, facts, matches)
    sharing.run()
    return sharing.shares


class _Sharing:
    def __init__(self, source: GraphView, optimized: GraphView, facts: SourceFacts, matches: dict[str, str]) -> None:
        self.source, self.optimized, self.facts, self.matched = source, optimized, facts, matches
        self.shares = Shares(idle=dict(source.removed))
        self._owner: dict[int, int] = {}
        self._writers: dict[str, int] = {}
        self._known: set[str] = {
            matches[k] for k in (*optimized.inputs, *optimized.initializers, *optimized.producers) if k in matches
        }
        self._known_numbers: dict[int, str] = {}
        for key in sorted(self._known):
            self._known_numbers.setdefault(facts.number[key], key)
        self._nodes = settled_order(optimized)
        self._rank = {node.position: rank for rank, node in enumerate(self._nodes)}
        self._running = {n.outputs[0] for n in optimized.nodes if n.op in NO_EFFECT and n.outputs}

    def run(self) -> None:
        duplicates: list[tuple[NodeView, str]] = []
        # What kept its name comes first: of a duplicated node, the copy under the source's own name owns it.
        for node in sorted(self._nodes, key=self._renamed):
            written = [self.matched[k] for k in node.outputs if k in self.matched]
            carried = bool(node.inputs) and self.matched.get(node.inputs[0]) in written
            if carried and node.inputs[0] and is_carrier(node, self.source, self.facts):
                continue
            for key in written:
                self._writers.setdefault(key, node.position)
            claimed = self._walk(node, written, duplicates)
            if claimed:
                self.shares.owned[node.position] = sorted(claimed)
        for twin, key in duplicates:
            self._join(twin, key)
        self._leftovers()
        self._helpers()

    def _renamed(self, node: NodeView) -> bool:
        return not any(k and self.source.canonical(k) == self.matched.get(k) for k in node.outputs)

    def _claimed(self, node: NodeView) -> bool:
        return node.position in self._owner or node.position in self.shares.idle

    def _walk(self, node: NodeView, written: list[str], duplicates: list[tuple[NodeView, str]]) -> list[int]:
        reads = {self.matched.get(k, k) for k in node.inputs if k}
        own_numbers = {self.facts.number[k] for k in written}
        claimed: list[int] = []
        queue, seen = list(written), set(written)
        for key in queue:
            producer = self.source.producers.get(key)
            if producer is None or producer.position in self._owner:
                continue
            if producer.position in self.shares.idle and self.shares.idle[producer.position] != EQUAL:
                continue
            if self.facts.number[key] not in own_numbers:
                twin_key = self._known_numbers.get(self.facts.number[key])
                if twin_key is not None and producer.op not in NO_EFFECT:
                    duplicates.append((producer, twin_key))
                    continue
            if producer.op in NO_EFFECT and producer.outputs[0] not in self._running:
                self.shares.idle[producer.position] = EQUAL
            elif self._is_folded(producer, reads):
                self.shares.idle[producer.position] = COMPUTED
            else:
                self._owner[producer.position] = node.position
                claimed.append(producer.position)
            for above in producer.inputs:
                if above and above not in seen and above not in self._known:
                    seen.add(above)
                    queue.append(above)
        return claimed

    def _is_folded(self, producer: NodeView, reads: set[str]) -> bool:
        """Whether a node was computed at load: it is constant, and the reader does not read what it is made from."""
        if not all(k in self.facts.constant for k in producer.outputs if k):
            return False
        if producer.outputs and any(k in self.optimized.producers for k in producer.outputs):
            return False
        return not any(k in reads for k in producer.inputs if k)

    def _join(self, twin: NodeView, key: str) -> None:
        if self._claimed(twin):
            return
        original = self.source.producers.get(key)
        owner = self._writers.get(key)
        if owner is None and original is not None:
            owner = self._owner.get(original.position)
        if owner is None:
            self.shares.idle[twin.position] = ABSORBED if key in self.facts.constant else EQUAL
            return
        self._owner[twin.position] = owner
        self.shares.owned[owner] = sorted([*self.shares.owned.get(owner, []), twin.position])

    def _leftovers(self) -> None:
        """Say of every unclaimed source node why it does not run. Later nodes first: a reason is handed up."""
        useful = {*self.source.outputs, *self.source.results}
        for node in reversed(self.source.nodes):
            if node.position in self.source.removed:
                continue
            if node.has_subgraph or any(k in useful for k in node.outputs):
                useful.update(k for k in node.inputs if k)
        fixed: set[str] = {k for k in (self.matched.get(i) for i in self.optimized.initializers) if k}
        for node in reversed(self.source.nodes):
            if self._claimed(node):
                if self.shares.idle.get(node.position) in (ABSORBED, COMPUTED):
                    fixed.update(k for k in node.inputs if k)
                continue
            twin = self._twin(node)
            if twin is not None and node.op not in NO_EFFECT:
                self._join(node, twin)
                continue
            if node.op not in NO_EFFECT and self._join_equal(node):
                continue
            if node.op in NO_EFFECT:
                reason = EQUAL
            elif any(k in fixed for k in node.outputs if k):
                reason = ABSORBED
            elif node.outputs and all(k in self.facts.constant for k in node.outputs if k):
                reason = COMPUTED
            elif not any(k in useful for k in node.outputs if k):
                reason = UNUSED
            else:
                reason = LOST
            if reason in (ABSORBED, COMPUTED):
                fixed.update(k for k in node.inputs if k)
            self.shares.idle[node.position] = reason

    def _twin(self, node: NodeView) -> str | None:
        for key in node.outputs:
            known = self._known_numbers.get(self.facts.number.get(key, -1))
            if key and known is not None and known != key and known in self._writers:
                return known
        return None

    def _join_equal(self, node: NodeView) -> bool:
        for key in node.outputs:
            for other in self.facts.equal.get(self.facts.number.get(key, -1), ()):
                producer = self.source.producers.get(other)
                if producer is not None and producer.position in self._owner and producer.op == node.op:
                    self._join(node, other)
                    return self._claimed(node)
        return False

    def _helpers(self) -> None:
        for node in reversed(self._nodes):
            if node.position in self.shares.owned:
                continue
            written = [self.matched[k] for k in node.outputs if k in self.matched]
            helped = self._original(written) if written else self._reader(node)
            if helped and not (written and is_carrier(node, self.source, self.facts)):
                self.shares.serves[node.position] = sorted(set(helped))

    def _original(self, written: Iterable[str]) -> list[int]:
        producers = (self.source.producers.get(k) for k in written)
        return [p.position for p in producers if p is not None]

    def _reader(self, node: NodeView) -> list[int]:
        """Follow what a node of an expansion writes to the first node that owns or serves something."""
        queue, seen = list(node.outputs), set(node.outputs)
        for key in queue:
            for reader in sorted(self.optimized.consumers.get(key, ()), key=lambda twin: self._rank[twin.position]):
                helped = self.shares.owned.get(reader.position) or self.shares.serves.get(reader.position)
                if helped:
                    return helped
                for out in reader.outputs:
                    if out and out not in seen:
                        seen.add(out)
                        queue.append(out)
        return []
