# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What the code of a class of modules names, without running it."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType

import torch

#: What each module has, and a class of norms does not define.
_OF_MODULES = frozenset(dir(torch.nn.Module))
#: Names of the projections of the gate, of what it multiplies, and of the product; or of both of the former, and that.
_PROJECTIONS = (
    ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("proj_up_gate", "proj_up", "proj_down"),
    ("gate_up_proj", "down_proj"), ("input_linear", "output_linear"),
)  # fmt: skip
#: Names of functions that give some numbers another formula, and of those that read what the code does not name.
_LIMITS = frozenset(
    f"{name}{end}" for name in ("clamp", "clip", "nan_to_num", "max", "min", "maximum", "minimum") for end in ("", "_")
) | {"where", "masked_fill", "getattr", "hasattr", "vars", "isnan", "isinf"}
ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation", "glu_act")


@lru_cache(maxsize=4096)
def code_names(kind: type, forward: FunctionType | None = None, *, helpers: bool = False) -> frozenset[str]:
    """Return what the code of the forward of a class names, and of the methods of the class that it names.

    With `helpers`, that of functions of the same package, too. `forward` is that of a class that this one extends.
    """
    return frozenset(name for _, names in _functions(kind, forward, helpers=helpers) for name in names)


@lru_cache(maxsize=4096)
def code_constants(kind: type, forward: FunctionType) -> tuple[float, ...]:
    """Return the floats that this code states."""
    consts = (
        const for function, _ in _functions(kind, forward, helpers=False) for const in function.__code__.co_consts
    )
    return tuple(dict.fromkeys(const for const in consts if isinstance(const, float)))


def depends_on(kind: type, forward: FunctionType, known: set[str]) -> bool:
    """Say whether this code may read more than what it names of `known`: other names, numbers, variables around it."""
    return bool(code_constants(kind, forward)) or any(
        function.__code__.co_freevars or not known.issuperset(names)
        for function, names in _functions(kind, forward, helpers=False)
    )


def hidden_inputs(kind: type, forward: FunctionType) -> frozenset[str]:
    """Return what this code names that decides what it computes for some numbers or some instances alone.

    Those are limits, attributes by text, and numbers and words around it, which may change later.
    """
    found: set[str] = set()
    for function, names in _functions(kind, forward, helpers=False):
        scope = inspect.getclosurevars(function)
        around = {**scope.globals, **scope.nonlocals}
        found |= {name for name, value in around.items() if isinstance(value, int | float | str)}
        found |= _LIMITS.intersection(names)
    return frozenset(found)


def _functions(kind: type, forward: FunctionType | None, *, helpers: bool) -> Iterator[tuple[FunctionType, list[str]]]:
    """Yield the functions that `code_names` looks at, each with what it names and is not followed."""
    package = kind.__module__.partition(".")[0]
    left, done = [forward or inspect.getattr_static(kind, "forward", None)], set()
    while left:
        method = inspect.unwrap(left.pop() or len)
        function = getattr(method, "__func__", method)
        if not isinstance(function, FunctionType) or function in done:
            continue
        done.add(function)
        names: list[str] = []
        for name in _in_code(function.__code__):
            helper = function.__globals__.get(name) if helpers else None
            if isinstance(helper, FunctionType) and helper.__module__.partition(".")[0] == package:
                left.append(helper)
                continue
            names.append(name)
            if not name.startswith("__") and hasattr(kind, name) and (name == "forward" or name not in _OF_MODULES):
                left.append(inspect.getattr_static(kind, name, None))
        yield function, names


@lru_cache(maxsize=4096)
def _in_code(code: CodeType) -> frozenset[str]:
    names = set(code.co_names)
    for step in dis.get_instructions(code):
        if step.opname.startswith("BINARY") and step.argrepr in ("@", "-"):
            names.add(step.argrepr)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= _in_code(const)
    return frozenset(names)


@lru_cache(maxsize=4096)
def multiplies_activation(forward: FunctionType) -> bool:
    """Say whether this code multiplies by an activation; without its source, it does not."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError, TypeError):
        return False
    products = (node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult))
    return any(_is_activated(product.left) or _is_activated(product.right) for product in products)


def _is_activated(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", "")) in (*ACTIVATIONS, "silu", "gelu")


def projections_of(names: frozenset[str]) -> tuple[str, ...]:
    """Return the projections of a gated unit among the names in the code of a class; empty: it is none."""
    return next((some for some in _PROJECTIONS if names.issuperset(some)), ())
