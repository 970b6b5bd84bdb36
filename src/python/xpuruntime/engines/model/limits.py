# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Limits on what a model file may state, checked before anything is computed from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.model.file import refuse
from xpuruntime.engines.model.graph import graphs, normal_domain, subgraphs, tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import onnx

__all__ = ["MAX_DIMS", "MAX_ELEMENTS", "MAX_NODES", "check_limits", "element_count", "inline_functions", "shown_dims"]

#: Dimensions of one tensor.
MAX_DIMS = 1024
#: Elements of one tensor: their bits are counted in 64-bit integers everywhere.
MAX_ELEMENTS = 1 << 55
#: Nodes of a model, with model-local functions written out.
MAX_NODES = 1_000_000

_FIX = "export the model again, or correct the program that writes it"


def element_count(dims: Sequence[int]) -> int:
    """Return the product of some sizes, and ``MAX_ELEMENTS + 1`` for a larger one: the work is bounded."""
    if any(dim == 0 for dim in dims):
        return 0
    count = 1
    for dim in dims:
        count *= dim
        if count > MAX_ELEMENTS or count < 0:
            return MAX_ELEMENTS + 1
    return count


def shown_dims(dims: Sequence[int]) -> str:
    """Return sizes for a message: the first eight."""
    return f"[{', '.join(map(str, dims[:8]))}{', ...' if len(dims) > 8 else ''}]"


def check_limits(model: onnx.ModelProto, where: str) -> None:
    """Refuse a model that states more than can be meant, in time linear in its size."""
    for tensor in tensors(model):
        dims = tensor.dims
        if len(dims) > MAX_DIMS:
            raise refuse(
                where, f"tensor {tensor.name!r} has {len(dims):,} dimensions, and at most {MAX_DIMS:,} are read", _FIX
            )
        negative = next((dim for dim in dims if dim < 0), None)
        if negative is not None:
            raise refuse(where, f"tensor {tensor.name!r} has the size {negative} in {shown_dims(dims)}", _FIX)
        if element_count(dims) > MAX_ELEMENTS:
            raise refuse(
                where, f"tensor {tensor.name!r} of shape {shown_dims(dims)} has more than 2**55 elements", _FIX
            )
    for graph in graphs(model):
        for value in (*graph.input, *graph.output):
            rank = len(value.type.tensor_type.shape.dim)
            if rank > MAX_DIMS:
                raise refuse(where, f"{value.name!r} has {rank:,} dimensions, and at most {MAX_DIMS:,} are read", _FIX)
    _check_nodes(model, where)


def inline_functions(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """Return the model with its model-local functions written out."""
    import onnx
    from onnx.inliner import inline_local_functions

    try:
        return inline_local_functions(model)
    except (onnx.checker.ValidationError, RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise refuse(where, f"its model-local functions cannot be written out: {reason}", _FIX) from None


def _check_nodes(model: onnx.ModelProto, where: str) -> None:
    nodes = [node for graph in graphs(model) for node in graph.node]
    if len(nodes) > MAX_NODES:
        raise refuse(where, f"it has {len(nodes):,} nodes, and at most {MAX_NODES:,} are read", "split the model")
    if not model.functions:
        return
    bodies = {(normal_domain(f.domain), f.name): list(_all_nodes(f.node)) for f in model.functions}
    sizes = _expanded(bodies, where)
    total = sum(sizes.get((normal_domain(node.domain), node.op_type), 1) for node in nodes)
    if total > MAX_NODES:
        raise refuse(
            where,
            f"its model-local functions stand for {_amount(total)} nodes, and at most {MAX_NODES:,} are read",
            "export it with smaller functions",
        )


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(inner for _, graph in subgraphs(node) for inner in graph.node)


def _expanded(bodies: Mapping[tuple[str, str], Sequence[onnx.NodeProto]], where: str) -> dict[tuple[str, str], int]:
    """Return the nodes that each function stands for, at most ``MAX_NODES + 1``."""
    calls = {
        name: [key for node in body if (key := (normal_domain(node.domain), node.op_type)) in bodies]
        for name, body in bodies.items()
    }
    sizes: dict[tuple[str, str], int] = {}
    entered: set[tuple[str, str]] = set()
    for root in bodies:
        waiting = [root]
        while waiting:
            name = waiting[-1]
            if name in sizes:
                waiting.pop()
            elif name not in entered:
                entered.add(name)
                for called in set(calls[name]):
                    if called in entered and called not in sizes:
                        raise refuse(where, f"its model-local function {called[1]!r} calls itself", _FIX)
                    waiting.append(called)
            else:
                plain = len(bodies[name]) - len(calls[name])
                sizes[name] = min(plain + sum(sizes[called] for called in calls[name]), MAX_NODES + 1)
                waiting.pop()
    return sizes


def _amount(total: int) -> str:
    return f"{total:,}" if total <= 1000 * MAX_NODES else "far too many"
