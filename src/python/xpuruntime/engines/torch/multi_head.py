# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Decomposed attention, products and a softmax as in ``nn.MultiheadAttention``: detection in programs and calls."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["MULTI_HEAD", "SOFTMAX", "head_width", "width_by_products"]

#: The function that computes it.
MULTI_HEAD = "multi_head_attention_forward"
_FUNCTIONS = (MULTI_HEAD, "scaled_dot_product_attention")
_LAYER = "torch.nn.modules.activation.MultiheadAttention"
SOFTMAX = frozenset(("softmax", "_softmax", "_safe_softmax"))
_PRODUCTS = frozenset(("bmm", "baddbmm", "matmul"))
#: Operators between the product of queries and keys and the softmax: a mask is added, shapes are changed.
_NEAR = 6


def width_by_products(node: Any) -> int | None:
    """Return the width of a head where a node of an exported program is the softmax of such attention, or ``None``.

    Exported programs keep of each operator the function that called it, or at least its module. With
    ``need_weights=False``, and in `scaled_dot_product_attention`, there is no softmax but one operator of attention,
    unless the program was decomposed since. The width is 0 where it is not known.
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    if getattr(packet, "__name__", "") not in SOFTMAX or not _in_attention(node.meta):
        return None
    near = [node]
    for one in near:
        packet = getattr(one.target, "overloadpacket", one.target)
        if getattr(packet, "__name__", "") in _PRODUCTS:
            width = one.args[-2].meta["val"].shape[-1]
            return width if isinstance(width, int) else 0
        near += one.all_input_nodes if len(near) < _NEAR else []
    return 0


def _in_attention(meta: Mapping[str, Any]) -> bool:
    if function := meta.get("torch_fn"):
        return str(function[1]).rpartition(".")[2] in _FUNCTIONS
    stack = meta.get("nn_module_stack") or {}
    kind = next(reversed(stack.values()))[1] if stack else ""
    return str(kind) == _LAYER


def head_width(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the width of a head where a call of a function is such attention, or ``None``."""
    if getattr(function, "__name__", "") != MULTI_HEAD:
        return None
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    stated = given.arguments
    return int(stated["embed_dim_to_check"]) // int(stated["num_heads"]) if stated["need_weights"] else None
