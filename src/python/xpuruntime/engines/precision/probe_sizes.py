# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`probe_sizes`: a size for every dimension that a model names, the same wherever it stands."""

from __future__ import annotations

import ast
import operator
import re
from typing import TYPE_CHECKING

from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from xpuruntime.engines.model import TensorInfo

__all__ = ["inside", "names_in", "probe_size", "probe_sizes", "unnamed_dimensions"]

# What a dimension's name says about a small, sensible size.
_SIZES = (("batch", 1), ("past", 0), ("height", 64), ("width", 64), ("seq", 8), ("len", 8), ("time", 8), ("token", 8))
_ANY = (0, 2**63 - 1)
#: Names in one expression.
_MOST = 64
#: Characters of an expression.
_LONGEST = 256
# Sums and differences have spaces, as PyTorch and exporters of ONNX write them: "key-length" is a name.
_TOKEN = re.compile(r"(?P<name>[A-Za-z_][\w.]*)|\d+| [+-] |//| ?[*] ?|[()]")
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def probe_size(name: str | None, index: int, rank: int) -> int:
    """Return a small size for a dimension by its name and its place among the dimensions of an input."""
    low = "" if name is None or name.rpartition(".")[2].isdigit() else name.lower()  # `x.0` speaks of a tensor alone
    for word, size in _SIZES:
        if word in low and "+" not in low:
            return size
    if low in ("n", "b") or index == 0:
        return 1
    if low in ("h", "w") or (rank >= 4 and index >= rank - 2):
        return 64
    return 8


def inside(size: int, limits: tuple[int, int] | None) -> int:
    """Return the size nearest to `size` that a policy's limits, if any, leave."""
    return size if limits is None else min(max(size, limits[0]), limits[1])


def names_in(dim: str) -> tuple[str, ...]:
    """Return the names of which a dimension is made: itself, or those in ``"past + 2*rows"``."""
    parsed = _parsed(dim)
    return (dim,) if parsed is None else tuple(dict.fromkeys(parsed[1].values()))


def unnamed_dimensions(tensor: TensorInfo) -> dict[int, str]:
    """Return what open dimensions without a name go by, by position: ``"x.0"`` for the first of the input ``x``."""
    return {index: f"{tensor.name}.{index}" for index, dim in enumerate(tensor.shape or ()) if dim is None}


def probe_sizes(inputs: Iterable[TensorInfo], dims: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return a size for every dimension of some inputs that has a name.

    A name has one size in all inputs: that of `dims`, else the largest that suits one of its places and keeps the
    limits of all. What is written as a sum, difference, product or quotient of names, such as ``"past + rows"``, is
    computed from theirs and kept inside its own limits, unless `dims` has it as a whole.
    """
    sizes = dict(dims or {})
    limits: dict[str, tuple[int, int]] = {}
    suits: dict[str, int] = {}
    for dim, (least, most), suitable in _places(inputs):
        low, high = limits.get(dim, (least, most))
        limits[dim] = max(low, least), min(high, most)
        suits[dim] = max(suits.get(dim, 0), suitable)

    computed = {dim: parsed for dim in suits if dim not in sizes and (parsed := _parsed(dim)) is not None}
    for name in suits.keys() - computed.keys():
        sizes.setdefault(name, inside(suits[name], limits[name]))
    for dim, (tree, names) in computed.items():
        for name in names.values():  # that stand in expressions alone
            sizes.setdefault(name, probe_size(name, 1, 2))
        try:
            size = _value(tree, names, sizes)
        except ZeroDivisionError:
            size = -1
        if size < 0:
            given = ", ".join(f"{name}={sizes[name]}" for name in names_in(dim))
            raise InputError(f"{given} leaves no size for the dimension {dim}", fix="state other sizes")
        sizes[dim] = inside(size, limits[dim])
    return sizes


def _places(inputs: Iterable[TensorInfo]) -> Iterator[tuple[str, tuple[int, int], int]]:
    """Yield name, limits and a size that suits, of every named dimension."""
    for tensor in inputs:
        for index, dim in enumerate(tensor.shape or ()):
            if isinstance(dim, str):
                limits = tensor.limits[index] if tensor.limits else None
                yield dim, limits or _ANY, probe_size(dim, index, len(tensor.shape or ()))


def _parsed(dim: str) -> tuple[ast.expr, dict[str, str]] | None:
    """Return what is to be computed and the names that its variables stand for; nothing for a plain name."""
    names: dict[str, str] = {}
    text, end = "", 0
    if len(dim) > _LONGEST:
        return None
    for token in _TOKEN.finditer(dim):
        if token.start() != end:
            return None
        end = token.end()
        if token["name"] is None:
            text += token.group()
        else:
            variable = f"v{len(names)}"
            names[variable] = token["name"]
            text += variable
    if end != len(dim) or not names or len(names) > _MOST:
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        return None
    known = (ast.BinOp, ast.Constant, ast.Name, ast.Load, *_OPERATIONS)
    plain = isinstance(tree, ast.Name) or not all(isinstance(node, known) for node in ast.walk(tree))
    return None if plain else (tree, names)


def _value(node: ast.expr, names: Mapping[str, str], sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, names, sizes), _value(node.right, names, sizes)
        return _OPERATIONS[type(node.op)](left, right)
    if isinstance(node, ast.Name):
        return sizes[names[node.id]]
    assert isinstance(node, ast.Constant)
    return int(node.value)  # type: ignore[arg-type] # a whole number, by the tokens
