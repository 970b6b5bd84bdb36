# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Matching of the tensors of an optimized graph to the source tensors whose values they carry.

Tensors that kept their names match by name. ONNX Runtime renames many others: around an inserted cast, copy, reorder
or reshape, in a changed layout, in a duplicated node, in an expanded function. Those are found by what surrounds them:
what carries a value without changing it, which source node computes the same thing from the same inputs, and which
source tensor sits at the same place of the node that reads it.

Then every source node is given to exactly one optimized node, or to none because it does not run. An optimized node
stands for the part of the source graph between what it writes and the nearest tensors of the optimized graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from xpuruntime.engines.model.facts import RANDOM
from xpuruntime.engines.onnxruntime.observing.graph import GraphView, NodeView, settled_order

#: What ONNX Runtime inserts to move a value between devices.
COPIES = frozenset({"MemcpyFromHost", "MemcpyToHost"})
#: What it inserts, and what leaves the value as it is, but for dtype, layout, shape or place.
_CARRIERS = COPIES | {
    "Cast",
    "ReorderInput",
    "ReorderOutput",
    "Transpose",
    "Reshape",
    "Identity",
    "Squeeze",
    "Unsqueeze",
}
#: Source nodes whose first output equals their first input in inference.
NO_EFFECT = frozenset({"Identity", "Dropout"})
#: Operators of optimized graphs that keep the first inputs of the source operator at the same places.
_SAME_INPUTS = {
    "Gemm": ("Gemm", "MatMul"),
    "FusedGemm": ("Gemm", "MatMul"),
    "FusedMatMul": ("MatMul",),
    "TransposeMatMul": ("MatMul",),
    "FusedConv": ("Conv",),
    "NhwcConv": ("Conv",),
    "NhwcFusedConv": ("Conv",),
    "NhwcMaxPool": ("MaxPool",),
    "FusedConvTranspose": ("ConvTranspose",),
    "BiasGelu": ("Gelu", "Add"),
    "FastGelu": ("Gelu",),
    "SkipLayerNormalization": ("Add", "LayerNormalization"),
}
_COMMUTATIVE = frozenset({"Add", "Mul", "Max", "Min", "And", "Or"})
_GENERATED = re.compile(r"(_nchwc|_nhwc|_fp16|_bf16|_token_\d+)$")
_LAST_PART = re.compile(r"/[^/]*/?$")
#: Tensors inside the expansion of a function: ``_inlfunc_<function>_<tensor>``.
_EXPANDED = re.compile(r"_inlfunc_([^_]+)_")
#: ONNX Runtime calls the fp32 copy of a tensor so.
_CAST = "InsertedPrecisionFreeCast_"
_NORMALIZED = re.compile(r"(.+)_bn_nchwc")
_SEARCH = 256


@dataclass(slots=True)
class SourceFacts:
    """What is known of the source graph alone: equal values (`number`), constants, and who computes what from what."""

    number: dict[str, int] = field(default_factory=dict)
    constant: set[str] = field(default_factory=set)
    equal: dict[int, list[str]] = field(default_factory=dict)
    by_inputs: dict[tuple[str, str, tuple[int, ...]], list[NodeView]] = field(default_factory=dict)
    by_name: dict[str, NodeView] = field(default_factory=dict)


def source_facts(source: GraphView) -> SourceFacts:
    """Give numbers to the values of the source graph, equal ones to equal values."""
    facts = SourceFacts()
    interned: dict[object, int] = {}

    def enter(key: str, identity: object) -> None:
        number = interned.setdefault(identity, len(interned))
        facts.number[key] = number
        facts.equal.setdefault(number, []).append(key)

    for key in source.inputs:
        enter(key, ("input", key))
    for key, digest in source.initializers.items():
        enter(key, ("initializer", digest))
        facts.constant.add(key)
    for node in source.nodes:
        facts.by_name[node.name] = node
        if node.position in source.removed:
            continue
        numbers = tuple(-1 if not k else facts.number.get(k, -2) for k in node.inputs)
        unique = node.op in RANDOM or node.has_subgraph or -2 in numbers
        facts.by_inputs.setdefault((node.op, node.domain, numbers), []).append(node)
        fixed = not unique and all(not k or k in facts.constant for k in node.inputs)
        for index, key in enumerate(node.outputs):
            if not key:
                continue
            if node.op in NO_EFFECT and index == 0 and numbers and numbers[0] >= 0:
                facts.number[key] = numbers[0]
                facts.equal[numbers[0]].append(key)
            else:
                enter(key, key if unique else (node.op, node.domain, node.attributes, numbers, index))
            if fixed:
                facts.constant.add(key)
    return facts


def match(source: GraphView, optimized: GraphView, facts: SourceFacts) -> dict[str, str]:
    """Return, for every tensor of the optimized graph that could be found, the key of its source tensor."""
    matcher = _Matcher(source, optimized, facts)
    matcher.run()
    return matcher.matched


def is_carrier(node: NodeView, source: GraphView, facts: SourceFacts) -> bool:
    """Whether an optimized node only carries a value and stands for no source node itself."""
    if node.op not in _CARRIERS:
        return False
    if node.op in ("ReorderInput", "ReorderOutput"):
        # With channels_last they stand in for a Transpose of the source graph.
        producer = source.producers.get(node.outputs[0])
        return producer is None or producer.op != "Transpose"
    named = facts.by_name.get(node.name) or facts.by_name.get(_base(node.name, facts))
    if named is not None and named.op == node.op and node.name.startswith(named.name):
        return False
    producer = source.producers.get(node.outputs[0])
    return producer is None or producer.op != node.op


def _base(name: str, facts: SourceFacts) -> str:
    """Return the source node or tensor in a generated name, without what was put behind it."""
    # Names of models have ``/`` too, so that the longest that is known counts.
    name = name.removeprefix(_CAST)
    shorter = name
    while shorter:
        plain = shorter.removesuffix("_new_reshape")
        if plain in facts.by_name or plain in facts.number:
            return plain
        before, shorter = shorter, _GENERATED.sub("", shorter)
        if shorter == before:
            shorter = _LAST_PART.sub("", shorter)
        if shorter == before:
            break
    return shorter.removesuffix("_new_reshape")


class _Matcher:
    def __init__(self, source: GraphView, optimized: GraphView, facts: SourceFacts) -> None:
        self.source, self.optimized, self.facts = source, optimized, facts
        self.matched: dict[str, str] = {}
        self._reached: set[str] = set()
        self._carriers = {n.position for n in optimized.nodes if is_carrier(n, source, facts)}
        self._nodes = settled_order(optimized)

    def run(self) -> None:
        for key in (*self.optimized.inputs, *self.optimized.initializers, *self.optimized.producers):
            same = self.source.canonical(key.removeprefix(_CAST))
            if same in self.facts.number:
                self._set(key, same)
        self._settle()
        while self._carry_forward() or self._take_hints():
            self._settle()

    def _set(self, key: str, source_key: str) -> bool:
        if not key or key in self.matched or not source_key:
            return False
        self.matched[key] = source_key
        self._reached.add(source_key)
        return True

    def _settle(self) -> None:
        changed = True
        while changed:
            changed = False
            for node in self._nodes:
                changed |= self._same_computation(node)
            for node in reversed(self._nodes):
                changed |= self._carry_back(node)
                changed |= self._expanded(node)
                changed |= self._same_place(node)

    def _open(self, node: NodeView) -> bool:
        return any(k and k not in self.matched for k in node.outputs)

    def _same_computation(self, node: NodeView) -> bool:
        if not self._open(node) or node.position in self._carriers:
            return False
        twin = self._twin(node)
        if twin is None:
            return False
        changed = False
        for key, source_key in zip(node.outputs, twin.outputs, strict=False):
            changed |= self._set(key, source_key)
        return changed

    def _twin(self, node: NodeView) -> NodeView | None:
        numbers = []
        for key in node.inputs:
            number = self.facts.number.get(self.matched.get(key, ""), -2) if key else -1
            if number == -2:
                return None
            numbers.append(number)
        candidates = self.facts.by_inputs.get((node.op, node.domain, tuple(numbers)), [])
        alike = [c for c in candidates if c.attributes == node.attributes]
        if alike:
            return next((c for c in alike if not self._reached.issuperset(c.outputs)), alike[0])
        return candidates[0] if len(candidates) == 1 else None

    def _carry_back(self, node: NodeView) -> bool:
        if node.position not in self._carriers or not node.inputs or not node.outputs:
            return False
        written = self.matched.get(node.outputs[0])
        producer = self.optimized.producers.get(node.inputs[0])
        return written is not None and producer is not None and self._set(node.inputs[0], written)

    def _carry_forward(self) -> bool:
        changed = False
        for node in self._nodes:
            if node.op in _CARRIERS and node.inputs and node.outputs and self._open(node):
                changed |= self._set(node.outputs[0], self.matched.get(node.inputs[0], ""))
        return changed

    def _same_place(self, node: NodeView) -> bool:
        """Match what a node reads: the corresponding source node reads it at the same place."""
        if node.position in self._carriers or any(_EXPANDED.search(k) for k in (*node.inputs, *node.outputs)):
            return False
        unknown = [
            i for i, k in enumerate(node.inputs) if k and k not in self.matched and k in self.optimized.producers
        ]
        if not unknown:
            return False
        twin = self._main(node)
        if twin is None:
            return False
        changed = False
        for index in unknown:
            if index >= twin.explicit:
                continue
            source_key = twin.inputs[index]
            if node.op in _COMMUTATIVE and len(node.inputs) == 2 and len(twin.inputs) == 2:
                other = self.matched.get(node.inputs[1 - index])
                if other is not None and other == source_key:
                    source_key = twin.inputs[1 - index]
            source_key = self._quantized(node, source_key)
            if source_key and source_key not in self.facts.constant:
                changed |= self._set(node.inputs[index], source_key)
        return changed

    def _quantized(self, node: NodeView, key: str) -> str:
        """Of a node that writes quantized numbers, the inputs are quantized too: skip the DequantizeLinear."""
        written = self.source.producers.get(self.matched.get(node.outputs[0], "")) if node.outputs else None
        read = self.source.producers.get(key)
        if written is not None and written.op == "QuantizeLinear" and node.op != "QuantizeLinear":
            return read.inputs[0] if read is not None and read.op == "DequantizeLinear" else key
        return key

    def _expanded(self, node: NodeView) -> bool:
        """Match what enters the steps of an expanded source node: it is what that source node reads."""
        unknown = [k for k in node.inputs if k and k not in self.matched and k in self.optimized.producers]
        functions = {m.group(1) for k in (*node.inputs, *node.outputs) for m in [_EXPANDED.search(k)] if m}
        entering = [k for k in unknown if not _EXPANDED.search(k)]
        if len(entering) != 1 or len(functions) != 1:
            return False
        function = functions.pop()
        queue = list(node.outputs)
        for key in queue:
            producer = self.source.producers.get(self.matched.get(key, ""))
            if producer is not None:
                varying = [k for k in producer.inputs if k and k not in self.facts.constant]
                return producer.op == function and len(varying) == 1 and self._set(entering[0], varying[0])
            if len(queue) < _SEARCH:
                queue.extend(k for n in self.optimized.consumers.get(key, ()) for k in n.outputs if k not in queue)
        return False

    def _main(self, node: NodeView) -> NodeView | None:
        """Return the source node at the heart of an optimized one: same operator, nearest above what its name says."""
        # Where the name says nothing, nearest above what it writes.
        wanted = _SAME_INPUTS.get(node.op, (node.op,))
        normalized = _NORMALIZED.fullmatch(node.name.removeprefix(_CAST))
        if normalized is not None:  # a BatchNormalization run as a Conv in the blocked layout
            return self._nearest([_base(normalized.group(1), self.facts)], ("BatchNormalization",), "")
        for start in (self._hinted(node), [self.matched[k] for k in node.outputs if k in self.matched]):
            above = self._nearest(start, wanted, node.domain)
            if above is not None:
                return above
        return None

    def _nearest(self, start: list[str], wanted: tuple[str, ...], domain: str) -> NodeView | None:
        """Search upwards from `start`, not past tensors that the optimized graph has."""
        seen, queue = set(start), list(start)
        for key in queue:
            producer = self.source.producers.get(key)
            if producer is None or len(seen) > _SEARCH:
                continue
            if producer.op in wanted and producer.domain in ("", domain):
                return producer
            for above in producer.inputs:
                if above and above not in seen and above not in self._reached and above not in self.facts.constant:
                    seen.add(above)
                    queue.append(above)
        return None

    def _hinted(self, node: NodeView) -> list[str]:
        """Return the source tensor in a generated name: that of the written tensor, then that of the node."""
        for name in (*(k.removeprefix(_CAST) for k in node.outputs[:1]), _base(node.name, self.facts)):
            if name in self.source.producers:
                return [name]
            named = self.facts.by_name.get(name)
            if named is not None and not node.op.startswith("QLinear"):
                return [k for k in named.outputs if k][:1]
        return []

    def _take_hints(self) -> bool:
        changed = False
        for node in reversed(self._nodes):
            if self._open(node) and node.position not in self._carriers and node.op not in _CARRIERS:
                hint = self._hinted(node)
                if hint and hint[0] not in self._reached:
                    changed |= self._set(node.outputs[0], hint[0])
        return changed


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
        """Record why each unclaimed source node does not run; later nodes first, as earlier ones may share it."""
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
