# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attribution of ONNX Runtime's executed nodes to the nodes of the source model, keyed on output tensors.

Every source node is accounted for in exactly one unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.engines.observation import UnitIds, check_complete, folded_unit
from xpuruntime.engines.onnxruntime.observing.graph import (
    GraphView,
    NodeView,
    computed_precision,
    is_partition,
    layout_of,
    of_whole_names,
    provider_device,
    view,
)
from xpuruntime.engines.onnxruntime.observing.node_matching import (
    LOST,
    Shares,
    is_carrier,
    match,
    share_out,
    source_facts,
)
from xpuruntime.engines.onnxruntime.observing.unit_facts import RequestedPrecision, boundaries_of, live_of
from xpuruntime.engines.precision.types import meets
from xpuruntime.evidence.records import Boundary, Unit

if TYPE_CHECKING:
    from xpuruntime.engines.onnxruntime.observing.kernels import NodeKey
    from xpuruntime.engines.onnxruntime.observing.profile import NodeEvent
    from xpuruntime.engines.onnxruntime.opening import Assigned
    from xpuruntime.evidence.memory_over_time import LiveBytes

_NOT_RUN = "did not run in the observed runs"


class Attribution(NamedTuple):
    """The units, the boundaries between them, what could not be seen, whether anything is missing, what was live.

    `unit_of` maps an executed node to the unit that it is.
    """

    units: tuple[Unit, ...]
    boundaries: tuple[Boundary, ...]
    notes: tuple[str, ...]
    partial: bool
    live: tuple[LiveBytes, ...] = ()
    unit_of: Mapping[NodeKey, str] = MappingProxyType({})


def attribute_units(
    source: Any,
    optimized: Any,
    events: Iterable[NodeEvent],
    assignment: Sequence[Assigned] | None,
    *,
    device: str = "cpu",
    precision: str = "model",
    allow_cpu_ops: Collection[str] = (),
    engine: str = "onnxruntime",
) -> Attribution:
    """Join the executed nodes of one session to the source model."""
    model = source.named_proto() if hasattr(source, "named_proto") else source
    joiner = _Joiner(model, optimized, tuple(events), tuple(assignment or ()), device, precision, allow_cpu_ops, engine)
    return joiner.run()


class _Joiner:
    def __init__(
        self,
        model: Any,
        optimized: Any,
        events: tuple[NodeEvent, ...],
        assigned: tuple[Assigned, ...],
        device: str,
        precision: str,
        allow_cpu_ops: Collection[str],
        engine: str,
    ) -> None:
        self.events, self.assigned, self.engine = events, assigned, engine
        self.device, self.allowed = device, frozenset(allow_cpu_ops)
        self.optimized = view(optimized) if optimized is not None else None
        self.source = self._source(model)
        self.facts = source_facts(self.source)
        self.requested = RequestedPrecision(model, self.source, self.facts.constant, precision)
        self.notes: list[str] = []
        self.partial = False
        self._id = UnitIds()

    def _source(self, model: Any) -> GraphView:
        plain = view(model)
        if self.optimized is None:
            return plain
        kept = {key for n in self.optimized.nodes if n.op == "If" for key in (n.name, *n.outputs)}
        branching = [n for n in plain.nodes if n.op == "If" and n.outputs]
        resolved = {n.outputs[0] for n in branching if kept.isdisjoint((n.name, *n.outputs))}
        return view(model, inline=resolved) if resolved else plain

    def run(self) -> Attribution:
        if self.optimized is None:
            units = self._without_graph()
            bounds: tuple[Boundary, ...] = ()
            live: tuple[LiveBytes, ...] = ()
            unit_of = {(e.name, e.index, e.op): e.name for e in self.events}
        else:
            facts = self.facts
            matches = match(self.source, self.optimized, facts)
            shares = share_out(self.source, self.optimized, facts, matches)
            seen = self._pair(self.optimized)
            units = [self._unit(n, seen.get(n.position), shares, matches) for n in self.optimized.nodes]
            ids = {n.position: u.id for n, u in zip(self.optimized.nodes, units, strict=True)}
            live = live_of(self.optimized, seen, ids)
            unit_of = {(e.name, e.index, e.op): ids[position] for position, e in seen.items()}
            bounds = boundaries_of(
                self.optimized, seen, {n.position for n in self.optimized.nodes} - set(shares.owned), self.device
            )
            taken = {e.order for e in seen.values()}
            spare = [e for e in self.events if e.order not in taken]
            for event in spare:
                units.append(self._stray(event))
                unit_of[event.name, event.index, event.op] = units[-1].id
            if spare:
                self.partial = True
                self.notes.append(
                    f"{len(spare)} executed nodes are not in the optimized graph, such as '{spare[0].name}'"
                )
            units += self._idle(shares)
        check_complete(units, (node.name for node in self.source.nodes))
        return Attribution(tuple(units), bounds, tuple(self.notes), self.partial, live, unit_of)

    def _pair(self, graph: GraphView) -> dict[int, NodeEvent]:
        """Pair nodes of the executed graph with their events: by name, and unnamed ones by operator, in order."""
        by_name: dict[str, list[NodeEvent]] = {}
        for event in of_whole_names(graph, self.events):
            by_name.setdefault(event.name, []).append(event)
        pairs: dict[int, NodeEvent] = {}
        unnamed: list[NodeView] = []
        for node in _by_evidence(graph, by_name):
            plain = node.name.partition("#")[0] if node.name not in by_name else node.name
            if node.name.startswith("("):
                unnamed.append(node)
                continue
            same = [e for e in by_name.get(plain, ()) if e.op == node.op] or by_name.get(plain, [])
            if same:
                pairs[node.position] = same[0]
                by_name[plain].remove(same[0])
        generated: dict[str, list[NodeEvent]] = {}
        for waiting in by_name.values():
            for event in waiting:
                if event.name == f"{event.op}_{event.index}":
                    generated.setdefault(event.op, []).append(event)
        for series in generated.values():
            series.sort(key=lambda e: -e.order)
        for node in unnamed:
            if generated.get(node.op):
                pairs[node.position] = generated[node.op].pop()
        return pairs

    def _unit(self, node: NodeView, event: NodeEvent | None, shares: Shares, matches: dict[str, str]) -> Unit:
        owned = shares.owned.get(node.position, [])
        names = tuple(self.source.nodes[i].name for i in owned)
        provider = event.provider if event else self._assigned_provider(node.name, names)
        opaque = is_partition(node.op, provider or "")
        relation: Any = "opaque" if opaque else "inserted" if not names else "exact" if len(names) == 1 else "fused"
        if relation == "inserted" and node.position not in shares.serves and self._may_be_lost(node, shares):
            relation = "opaque"
        written = (matches.get(k) if names else k if matches.get(k) == k else None for k in node.outputs)
        outputs = tuple(dict.fromkeys(k for k in written if k))
        ran = computed_precision(event, node.numbers) if event else None
        serves = shares.serves.get(node.position, [])
        wanted = self.requested.of_executed(node.op, owned, serves, outputs, ran)
        device = provider_device(provider, self.device) if provider else self.device
        return Unit(
            id=self._id(event.name if event else node.name),
            op=node.op,
            relation=relation,
            source_nodes=names,
            outputs=outputs,
            serves=tuple(self.source.nodes[i].name for i in serves),
            engine=self.engine,
            device=device,
            provider=provider,
            precision_requested=wanted,
            precision_run=ran,
            layout=layout_of(node),
            time=event.time if event else None,
            device_kernels=event.device_kernels if event else (),
            placement_reason=None if event else _NOT_RUN,
            placement_source="none" if event else "rule",
            status=self._status(node.op, owned or serves, device, wanted, ran, event is not None),
        )

    def _may_be_lost(self, node: NodeView, shares: Shares) -> bool:
        """Whether a node that stands for no source node may be one that could not be found, and is no mere carrier."""
        lost = {self.source.nodes[i].scope for i, reason in shares.idle.items() if reason == LOST}
        return node.scope in lost and not is_carrier(node, self.source, self.facts)

    def _status(self, op: str, owned: list[int], device: str, wanted: str | None, ran: str | None, seen: bool) -> Any:
        if not seen:
            return "unobservable"
        if not owned:
            return "honoured"
        ops = {op, *(self.source.nodes[i].op for i in owned)}
        if device != self.device and not (device == "cpu" and ops & self.allowed):
            return "substituted"
        if wanted and ran and not meets(wanted, ran):
            return "substituted"
        return "honoured"

    def _assigned_provider(self, name: str, names: tuple[str, ...]) -> str | None:
        wanted = {name, *names}
        return next((a.provider for a in self.assigned if a.name in wanted), None)

    def _stray(self, event: NodeEvent) -> Unit:
        return Unit(
            id=self._id(event.name),
            op=event.op,
            relation="opaque" if is_partition(event.op, event.provider) else "inserted",
            source_nodes=(),
            outputs=(),
            engine=self.engine,
            device=provider_device(event.provider, self.device),
            provider=event.provider,
            precision_run=computed_precision(event),
            time=event.time,
            device_kernels=event.device_kernels,
        )

    def _idle(self, shares: Shares) -> list[Unit]:
        units = []
        lost = 0
        for position in sorted(shares.idle):
            node, reason = self.source.nodes[position], shares.idle[position]
            lost += reason == LOST
            gone: dict[str, Any] = {"relation": "opaque", "device": self.device, "status": "unobservable"}
            extra = gone if reason == LOST else {}
            units.append(folded_unit(node, self.engine, reason, id=self._id(node.name), **extra))
        if lost:
            self.partial = True
            self.notes.append(f"{lost} source nodes were not found in the optimized graph")
        return units

    def _without_graph(self) -> list[Unit]:
        """Join by name alone: fusions cannot be seen, and what a partition holds is known only if all of it is one."""
        self.partial = True
        self.notes.append("without the optimized graph fusions cannot be seen: nodes are matched by name only")
        names = {n.name: n for n in self.source.nodes}
        units: list[Unit] = []
        left = dict(names)
        partitions: dict[str, list[NodeEvent]] = {}
        for event in self.events:
            if is_partition(event.op, event.provider):
                partitions.setdefault(event.provider, []).append(event)
                continue
            base = event.name if event.name in left else event.name.partition("/")[0]
            node = left.pop(base, None)
            unit = self._stray(event)
            if node is not None:
                wanted = self.requested.of(event.op, [node.position], unit.precision_run)
                unit = msgspec.structs.replace(
                    unit,
                    relation="exact",
                    source_nodes=(node.name,),
                    outputs=tuple(k for k in node.outputs if k),
                    precision_requested=wanted,
                    status=self._status(event.op, [node.position], unit.device, wanted, unit.precision_run, True),
                )
            units.append(unit)
        for provider, series in partitions.items():
            inside = tuple(a.name for a in self.assigned if a.provider == provider and a.name in left)
            if len(series) > 1:
                self.notes.append(
                    f"{provider} compiled {len(series)} partitions: which node is in which cannot be seen"
                )
            for index, event in enumerate(series):
                held = inside if index == 0 else ()
                for name in held:
                    left.pop(name)
                units.append(msgspec.structs.replace(self._stray(event), source_nodes=held))
        if left:
            units.append(
                Unit(
                    id="(not seen by name)",
                    op="?",
                    relation="opaque",
                    source_nodes=tuple(left),
                    outputs=(),
                    engine=self.engine,
                    device=self.device,
                    placement_reason="fused, folded or renamed: the optimized graph is missing",
                    placement_source="rule",
                    status="unobservable",
                )
            )
        return units


def _by_evidence(graph: GraphView, events: Mapping[str, Sequence[NodeEvent]]) -> list[NodeView]:
    """Return the nodes of a graph, those of a name that several share last, and first where other nodes ran."""
    # Optimizers give nodes of both branches of an If the same name, and one branch runs.
    times = Counter(node.name.partition("#")[0] for node in graph.nodes if not node.name.startswith("("))
    ran = Counter(node.scope for node in graph.nodes if times[node.name] == 1 and events.get(node.name))

    def evidence(node: NodeView) -> tuple[bool, int, int]:
        shared = times[node.name.partition("#")[0]] > 1
        return shared, -ran[node.scope] if shared else 0, node.position

    return sorted(graph.nodes, key=evidence)
