# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Modules and autograd functions that compute an operation without calling a function that a policy reaches.

Most norms of Hugging Face's, and its eager attention, are elementwise operators and products, so that a policy has
nothing to decide. They are known by what the code of their forward names, and attention of transformers by the word in
its configuration.
"""

from __future__ import annotations

import dis
import inspect
from functools import lru_cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["ByOperators", "computed_by_operators", "names_operation"]

#: Functions of PyTorch that a policy reaches, by the operation.
_REACHED = {
    "rms_norm": frozenset(("rms_norm", "fused_rmsnorm", "_fused_rms_norm")),
    "layer_norm": frozenset(("layer_norm", "native_layer_norm", "fused_layernorm")),
    "attention": frozenset((
        "scaled_dot_product_attention", "flex_attention", "varlen_attn", "fused_attention",
        "multi_head_attention_forward",
    )),
    "matmul": frozenset((
        "matmul", "mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "einsum", "linear", "tensordot",
        "inner", "@",
    )),
}  # fmt: skip
_PRODUCTS = frozenset(("matmul", "bmm", "baddbmm", "einsum", "@"))
#: Words of transformers for attention that call one of these functions.
_SERVED_WORDS = frozenset(("sdpa", "flex_attention", "sdpa_paged", "paged|sdpa"))
_NORM = "calls no {op} of PyTorch: it computes the norm by elementwise operators"
_EAGER = "multiplies and takes a softmax: it calls no function for attention"
_USE_NORM = "use torch.nn.{module}, or leave {op} out of the policy"
_USE_SDPA = "call scaled_dot_product_attention, or leave attention out of the policy"
_SDPA_WORD = "load the model with attn_implementation='sdpa', or leave attention out of the policy"


class ByOperators(NamedTuple):
    """How a module computes an operation without calling it."""

    op: str
    reason: str
    fix: str


def computed_by_operators(module: torch.nn.Module) -> ByOperators | None:
    """Return what a module computes without a function that a policy reaches; ``None`` where it is not known to."""
    kind = type(module)
    if kind.__module__.partition(".")[0] == "torch":
        return None
    word = getattr(getattr(module, "config", None), "_attn_implementation", None)
    names = _names(kind)  # type: ignore[arg-type]
    title = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(word, str) and "eager_attention_forward" in names:
        if word in _SERVED_WORDS:
            return None
        return ByOperators("attention", f"{title} has attn_implementation={word!r}, which {_by(word)}", _SDPA_WORD)
    op = _operation(names)
    if op is None or (op != "attention" and next(module.children(), None) is not None):
        return None
    if op == "attention":
        return ByOperators(op, f"{title} {_EAGER}", _USE_SDPA)
    fix = _USE_NORM.format(op=op, module="RMSNorm" if op == "rms_norm" else "LayerNorm")
    return ByOperators(op, f"{title} {_NORM.format(op=op)}", fix)


def _by(word: str) -> str:
    return "multiplies and takes a softmax" if "eager" in word else "calls kernels of another package"


def _operation(names: frozenset[str]) -> str | None:
    op = None
    if "softmax" in names and names & _PRODUCTS:
        op = "attention"
    elif "mean" in names and names & {"rsqrt", "sqrt"}:
        op = "layer_norm" if names & {"var", "std", "-"} else "rms_norm"
    return None if op is None or names & _REACHED[op] else op


def names_operation(function: type[torch.autograd.Function], op: str) -> bool:
    """Say whether the code of an autograd function, or of functions of its package that it calls, calls an operation.

    A policy reaches the call then, and decides it.
    """
    return bool(_names(function, helpers=True) & _REACHED[op])  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _names(kind: type, *, helpers: bool = False) -> frozenset[str]:
    """Return what the code of the forward of a class names, and of the methods of the class that it names.

    With `helpers`, that of functions of the same package, too.
    """
    package = kind.__module__.partition(".")[0]
    found: set[str] = set()
    left, done = [inspect.getattr_static(kind, "forward", None)], set()
    while left:
        method = inspect.unwrap(left.pop() or len)
        function = getattr(method, "__func__", method)
        if not isinstance(function, FunctionType) or function in done:
            continue
        done.add(function)
        used = _in_code(function.__code__)
        for name in used:
            helper = function.__globals__.get(name) if helpers else None
            if isinstance(helper, FunctionType) and helper.__module__.partition(".")[0] == package:
                left.append(helper)
                continue
            found.add(name)
            if not name.startswith("__") and hasattr(kind, name):
                left.append(inspect.getattr_static(kind, name, None))
    return frozenset(found)


def _in_code(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for step in dis.get_instructions(code):
        if step.opname.startswith("BINARY") and step.argrepr in ("@", "-"):
            found.add(step.argrepr)
    for one in code.co_consts:
        if isinstance(one, CodeType):
            found |= _in_code(one)
    return found
