# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Masks of attention that compiled code makes of nothing but sizes: left out where ``is_causal`` says the same.

Models of transformers make such a mask whenever they are compiled, even without padding, and repeat keys and values
for it. Kernels without masks could serve none of their calls, and others would compute the hidden half.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch.context import in_clean_thread

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph, Node

#: Numbers of a mask from which on it is not computed while code is compiled.
_MOST = 1 << 28
_HALVES = (torch.float16, torch.bfloat16)
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def simplify_masks(graph: Graph) -> int:
    """Rewrite calls of ``scaled_dot_product_attention`` whose mask is a constant, all true or causal; return how many.

    Of half precision, heads of keys and values that were repeated for the call are shared instead.
    """
    known: dict[Node, str] = {}
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch.nn.functional.scaled_dot_product_attention:
            continue
        stated = {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}
        mask = stated.get("attn_mask")
        if not isinstance(mask, torch.fx.Node) or stated.get("is_causal"):
            continue
        if mask not in known:
            known[mask] = _kind_of(graph, mask)
        lengths = tuple(_shape(stated[name])[-2] for name in ("query", "key"))
        if known[mask] == "full" or (known[mask] and _shape(mask)[-2:] == lengths):
            _without_mask(node, stated, causal=known[mask] == "causal")
            count += 1
    if count:
        graph.eliminate_dead_code()
        graph.owning_module.recompile()
    return count


def _without_mask(node: Node, stated: dict[str, Any], *, causal: bool) -> None:
    named: dict[str, Any] = {**stated, "attn_mask": None, "is_causal": causal}
    shared = [_shared(named[name]) for name in ("key", "value")]
    half = node.meta["example_value"].dtype in _HALVES  # of others, PyTorch's fused kernels share no heads
    if half and not named.get("enable_gqa") and all(x is not None for x in shared):
        named |= {"key": shared[0], "value": shared[1], "enable_gqa": True}
    node.args = tuple(named.pop(name) for name in _ARGUMENTS[:3])
    node.kwargs = named


def _shared(node: Any) -> Node | None:
    """Return ``[batch, heads, length, columns]`` of which each head is repeated, one after the other, in a result."""
    expanded = _made_by(node, "reshape")
    indexed = _made_by(expanded, "expand")
    if indexed is None or indexed.target is not operator.getitem:
        return None
    source, index = indexed.args
    every = slice(None, None, None)
    if index != (every, every, None, every, every):
        return None
    batch, heads, *rest = _shape(source)
    repeated = _shape(node)
    fits = _shape(expanded) == (batch, heads, repeated[1] // heads, *rest) and repeated == (
        batch, heads * (repeated[1] // heads), *rest,
    )  # fmt: skip
    return source if fits else None


def _made_by(node: Any, method: str) -> Node | None:
    made = isinstance(node, torch.fx.Node) and node.op == "call_method" and node.target == method
    return node.args[0] if made else None


def _shape(node: Node) -> tuple[Any, ...]:
    return tuple(node.meta["example_value"].shape)


def _kind_of(graph: Graph, mask: Node) -> str:
    """Return ``"causal"`` or ``"full"`` for a boolean mask that depends on no input of the graph, else ``""``."""
    example = mask.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.dtype != torch.bool or example.dim() < 2:
        return ""
    sizes = example.shape
    if not all(isinstance(size, int) for size in sizes) or example.numel() > _MOST:
        return ""
    made_of = _ancestors(mask)
    if not all(node.op in ("call_function", "call_method") for node in made_of) or _is_written(graph, made_of):
        return ""
    try:
        return in_clean_thread(_compare, [node for node in graph.nodes if node in made_of], mask)
    except Exception:  # whatever a computation raises that would raise when the code runs
        return ""


def _ancestors(node: Node) -> set[Node]:
    found, left = {node}, [node]
    while left:
        for source in left.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                left.append(source)
    return found


def _is_written(graph: Graph, made_of: set[Node]) -> bool:
    memory = {_memory(node) for node in made_of} - {None}
    others = (node for node in graph.nodes if node not in made_of and _writes(node))
    return any(_memory(source) in memory for node in others for source in node.all_input_nodes)


def _memory(node: Node) -> Any:
    example = node.meta.get("example_value")
    return StorageWeakRef(example.untyped_storage()) if isinstance(example, torch.Tensor) else None


def _writes(node: Node) -> bool:
    """Say whether a node may write an argument; whatever PyTorch does not state counts as such."""
    target = node.target
    packet = getattr(target, "overloads", None)
    overloads = [getattr(target, name) for name in packet()] if packet is not None else [target]
    if all(isinstance(overload, _private_api.operator_class) for overload in overloads):
        return any(_private_api.operator_schema(overload).is_mutable for overload in overloads)
    name = target if isinstance(target, str) else getattr(target, "__name__", "_")
    package = getattr(target, "__module__", None) or "torch"
    if package == "_operator":
        return name in ("setitem", "delitem") or (name.startswith("i") and name not in ("inv", "invert"))
    stated = node.op != "call_module" and package.startswith("torch") and package != "torch.ops.higher_order"
    return not stated or name.endswith("_") or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


class _Repeatable(_private_api.dispatch_mode_base):  # type: ignore[misc]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"{func} draws random numbers")
        return func(*args, **(kwargs or {}))


def _compare(nodes: Iterable[Node], mask: Node) -> str:
    values: dict[Node, Any] = {}
    with _Repeatable():
        for node in nodes:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "call_function":
                values[node] = node.target(*args, **kwargs)
            else:
                values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
    result: Tensor = values[mask]
    if bool(result.all()):
        return "full"
    lower = torch.ones(result.shape[-2:], dtype=torch.bool, device=result.device).tril()
    return "causal" if bool((result == lower).all()) else ""
