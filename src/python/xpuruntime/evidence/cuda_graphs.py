# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""CUDA graphs in a report: whether a session runs as a graph, and which nodes prevent it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from xpuruntime.evidence.records import BESIDE, Boundary, SourceNode, Unit

#: What can prevent a graph.
BlockerKind = Literal["placement", "copy", "control_flow", "data_dependent", "sync"]


class GraphBlocker(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that work on the device cannot be captured with.

    Attributes
    ----------
    node : str
        The source node; of what the engine inserted, its unit; of what is counted only, where it is.
    op : str
    kind : {"placement", "copy", "control_flow", "data_dependent", "sync"}
        It runs elsewhere; it copies between host and device; it decides what runs; the size of what it makes is known
        only when it has run; it waits for the device.
    reason : str
        One sentence.
    """

    node: str
    op: str
    kind: BlockerKind
    reason: str


class GraphStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a session can run as a captured CUDA graph.

    Attributes
    ----------
    status : {"not_applicable", "captured", "refused", "blocked", "possible", "unknown"}
        It runs on no CUDA device; a binding of the session captured one; the engine refused to; nodes that were
        observed prevent it; nothing that was observed does; too little was observed to tell.
    asked : {"off", "prefer", "require"}
        ``execution.cuda_graph``.
    reason : str
        One or two sentences: why, and what to do.
    blockers : tuple of GraphBlocker
        In the order in which the units ran.
    holds_for : tuple of str
        What a captured graph is tied to, such as sizes that the model leaves open.
    """

    status: Literal["not_applicable", "captured", "refused", "blocked", "possible", "unknown"]
    asked: Literal["off", "prefer", "require"]
    reason: str
    blockers: tuple[GraphBlocker, ...] = ()
    holds_for: tuple[str, ...] = ()


def status_text(status: GraphStatus) -> str:
    """Return the status in words."""
    return {"not_applicable": "does not apply"}.get(status.status, status.status)


def named(blockers: Sequence[GraphBlocker], most: int = 4) -> str:
    """Return the first nodes with their operators, and how many there are beside them."""
    told = ", ".join(f"{blocker.node} ({blocker.op})" for blocker in blockers[:most])
    return told + (f" and {len(blockers) - most} more" if len(blockers) > most else "")


_COPIES = frozenset({"MemcpyToHost", "MemcpyFromHost"})
_CONTROL = frozenset({"If", "Loop", "Scan", "SequenceMap", "cond", "while_loop", "map_impl", "scan"})
#: Operators whose result has a size that depends on values; PyTorch waits for the device to learn it.
_SIZED_BY_VALUES = frozenset(
    {
        "Compress", "NonMaxSuppression", "NonZero", "StringSplit", "Unique", "argwhere", "masked_select", "nonzero",
        "unique", "_unique", "_unique2", "unique_consecutive", "unique_dim", "bincount", "nms",
    }
)  # fmt: skip
#: Operators of PyTorch that hand a value of the device to the host.
_WAITING = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "_assert_async_msg"})
#: What computes sizes: on the host it is no obstacle, as long as it reads nothing that the device made.
_SIZES = frozenset(
    {
        "Add", "Cast", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Floor", "Gather", "Identity",
        "Mod", "Mul", "Range", "ReduceProd", "Reshape", "Shape", "Size", "Slice", "Split", "Squeeze", "Sub",
        "Unsqueeze", "Where",
    }
)  # fmt: skip


def graph_status(
    *,
    device: str,
    engine: str,
    stated: Literal["off", "prefer", "require"],
    units: Sequence[Unit],
    boundaries: Sequence[Boundary] = (),
    graph: Sequence[SourceNode] = (),
    open_sizes: Mapping[str, Sequence[str]] | None = None,
    refused: str | None = None,
    bound: str | None = None,
    partial: bool = False,
) -> GraphStatus:
    """Say whether a session runs as a CUDA graph or can, and what prevents it."""
    if not device.startswith("cuda"):
        told = "nothing is captured although execution.cuda_graph asks for it: " if stated != "off" else ""
        return GraphStatus(status="not_applicable", asked=stated, reason=f"{told}does not apply: runs on {device}")
    blockers = graph_blockers(device, units, boundaries, graph)
    holds = tuple(
        f"the sizes it was captured with: {name} leaves {', '.join(sizes)} open, and each size needs its own binding"
        for name, sizes in (open_sizes or {}).items()
        if sizes
    )
    if bound == "captured":
        return GraphStatus(
            status="captured",
            asked=stated,
            reason="a binding of this session replays a captured graph",
            holds_for=holds,
        )
    why = refused if refused is not None else bound if bound not in (None, "off") else None
    if why is not None:
        seen = f". Observed blockers: {named(blockers)}" if blockers else ""
        reason = f"{engine} refused: {' '.join(why.split())[:500]}{seen}"
        return GraphStatus(status="refused", asked=stated, reason=reason, blockers=blockers, holds_for=holds)
    if blockers:
        fix = "Replace them, or keep them out of the model; run() works without a graph"
        return GraphStatus(
            status="blocked",
            asked=stated,
            reason=f"{named(blockers)} cannot be part of a graph. {fix}",
            blockers=blockers,
            holds_for=holds,
        )
    if not units or partial:
        reason = "too little was observed to tell which nodes prevent it: see the notes"
        return GraphStatus(status="unknown", asked=stated, reason=reason, holds_for=holds)
    if stated == "off":
        reason = "nothing that was observed prevents it. For one, state execution.cuda_graph: prefer, and use bind()"
    else:
        reason = "nothing that was observed prevents it: bind() captures it, run() does not"
    return GraphStatus(status="possible", asked=stated, reason=reason, holds_for=holds)


def graph_blockers(
    device: str, units: Sequence[Unit], boundaries: Sequence[Boundary] = (), graph: Sequence[SourceNode] = ()
) -> tuple[GraphBlocker, ...]:
    """Return what cannot be captured, each source node once, in the order of the units."""
    ops = {node.name: node.op for node in graph}
    boundaries = [boundary for boundary in boundaries if not boundary.where.endswith(BESIDE)]
    copied = any(boundary.kind == "copy" for boundary in boundaries) or any(unit.op in _COPIES for unit in units)
    blockers: dict[str, GraphBlocker] = {}
    for unit in units:
        if unit.relation == "folded":
            continue
        for blocker in _of_unit(unit, device, ops, copied=copied):
            blockers.setdefault(blocker.node, blocker)
    if not any(blocker.kind == "copy" for blocker in blockers.values()):
        for border in boundaries:
            if border.kind == "copy":
                reason = f"{border.count} in a run, between host and device"
                blockers[border.where] = _blocker(border.where, border.kind, "copy", reason)
    return tuple(blockers.values())


def _of_unit(unit: Unit, device: str, ops: Mapping[str, str], *, copied: bool) -> list[GraphBlocker]:
    nodes = [(name, ops.get(name, unit.op)) for name in unit.source_nodes] or [(unit.id, unit.op)]
    if unit.op in _COPIES:
        way = "to the host" if unit.op == "MemcpyToHost" else "to the device"
        whom = f" for {unit.serves[0]}" if unit.serves else ""
        return [_blocker(unit.id, unit.op, "copy", f"copies a tensor {way}{whom} in every run")]
    if unit.device != device:
        if not copied and all(_plain(op) in _SIZES for _, op in nodes):
            return []  # sizes alone, which are the same in every replay
        why = f": {unit.placement_reason}" if unit.placement_reason else ""
        reason = f"runs on {unit.device}, and a graph holds work of {device} alone{why}"
        return [_blocker(name, op, "placement", reason) for name, op in nodes]
    blockers = []
    for name, op in nodes:
        plain = _plain(op)
        if plain in _CONTROL:
            blockers.append(_blocker(name, op, "control_flow", "which nodes run is decided on the host, in every run"))
        elif plain in _SIZED_BY_VALUES:
            blockers.append(
                _blocker(name, op, "data_dependent", "the size of its result is known only when it has run")
            )
        elif plain in _WAITING:
            blockers.append(_blocker(name, op, "sync", "hands a value of the device to the host, and waits for it"))
    return blockers


def _blocker(node: str, op: str, kind: BlockerKind, reason: str) -> GraphBlocker:
    return GraphBlocker(node=node, op=op, kind=kind, reason=reason)


def _plain(op: str) -> str:
    """Return an operator without its domain: ``aten.nonzero`` and ``ai.onnx:NonZero`` are named by the last word."""
    return op.replace("::", ".").replace(":", ".").rpartition(".")[2]
