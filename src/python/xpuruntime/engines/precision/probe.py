# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`probe_feeds`: inputs to try a model with, the same each time; `probing`: errors of runs on them."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.external import shown_dims
from xpuruntime.errors import EngineFailed, InputError, OutOfMemoryError, XpuRuntimeError

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo, TensorInfo

_FIX = "give an array for it"
#: Bytes that are drawn for one input, in float64.
MAX_DRAWN = 4 << 30
#: Dimensions of an array that every version of NumPy has.
MAX_RANK = 32
#: Largest fixed first dimension that is taken for a batch.
MAX_BATCH = 64
#: Inputs that a note names.
_NAMED = 4
#: Largest side of an image that is taken from the metadata of a model.
_LARGEST_SIDE = 8192


class ProbeRefusedError(InputError):
    """No input can be generated for a model, or the model itself refuses the one that was."""


@contextmanager
def probing(model: ModelInfo, feeds: Mapping[str, Any], *, generated: bool = True) -> Iterator[None]:
    """Run a model on inputs that were generated, of which an error says that they are the likely cause.

    Without `generated`, the inputs are somebody's own, and every error is passed on.
    """
    try:
        yield
    except ProbeRefusedError:
        raise
    except (EngineFailed, InputError) as error:
        free = any(not isinstance(size, int) for tensor in model.inputs for size in tensor.shape or (None,))
        ran = isinstance(error, EngineFailed) or error.engine  # else it is of an argument, and not of a run
        if generated and ran and (free or not all("float" in tensor.dtype for tensor in model.inputs)):
            raise probe_refused(model, feeds, error) from error
        raise


def probe_refused(model: ModelInfo, feeds: Mapping[str, Any], error: XpuRuntimeError) -> ProbeRefusedError:
    """Return the error of a run on generated inputs, with how to give others."""
    msg = f"{model.path} refuses the generated input {shapes_text(feeds)}, which is the likely cause: {error.reason}"
    fix = "give inputs that it takes, --input NAME=@file.npy (in Python: inputs)"
    names: dict[str, None] = {}
    for tensor in model.inputs:
        for dim in (*(tensor.shape or ()), *unnamed_dimensions(tensor).values()):
            names.update(dict.fromkeys(names_in(dim) if isinstance(dim, str) else ()))
    if names:
        stated = " ".join(f"--dim {name}=N" for name in names)
        fix = f"state sizes that it takes, {stated} (xrt lock: --shapes; in a policy: execution.shapes), or {fix}"
    return ProbeRefusedError(msg, fix=fix, engine=error.engine, device=error.device, status=error.status)


def probe_shape(tensor: TensorInfo, dims: Mapping[str, int] | None = None) -> tuple[int, ...]:
    """Return a concrete shape: fixed dimensions as they are, `dims` by name (``"x.0"`` if it has none), else small.

    The first dimension becomes 1; the last two of a rank-4 or rank-5 input 64 (images); any other 8. A dimension whose
    name speaks of a batch, sequence, or image side takes the size that suits it. Limits of the policy are kept.
    """
    if tensor.shape is None:
        raise InputError(f"no probe can be made for input {tensor.name!r}: its rank is not known", fix=_FIX)
    sizes = probe_sizes([tensor], dims)
    unnamed = unnamed_dimensions(tensor)
    limits = tensor.limits or (None,) * len(tensor.shape)
    shape: list[int] = []
    for index, dim in enumerate(tensor.shape):
        if dim is None:
            size = sizes.get(unnamed[index], probe_size(None, index, len(tensor.shape)))
            shape.append(inside(size, limits[index]))
        else:
            shape.append(dim if isinstance(dim, int) else sizes[dim])
    return tuple(shape)


def shapes_text(feeds: Mapping[str, Any]) -> str:
    """Return the shapes of the first inputs, for notes: ``"x [1, 8], mask [1, 8] and 3 more"``."""
    shapes = [f"{name} {list(array.shape)}" for name, array in feeds.items()]
    return ", ".join(shapes[:_NAMED]) + (f" and {len(shapes) - _NAMED} more" if len(shapes) > _NAMED else "")


def probe_feeds(
    model: ModelInfo,
    *,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Make inputs for a model.

    Floats are drawn from N(0, 1). Integers are 0 or 1, since they are often indices; masks are all 1, and 8-bit
    integers span their positive range, since they are often pixels. The same seed gives the same inputs. Where the
    first dimensions that are stated or fixed agree, those without a name have the same size: they are batches too.
    Images have the size that the metadata of the model states, as Ultralytics writes it (``imgsz``).
    """
    import numpy as np

    stated_feeds = {**(getattr(model.source, "examples", None) or {}), **(overrides or {})}
    names = [tensor.name for tensor in (*model.inputs, *model.overridable_inputs)]
    for name in stated_feeds:
        if name not in names:
            raise InputError(
                f"the model has no input {name!r}; its inputs are {', '.join(map(repr, names))}", fix="correct the name"
            )
    feeds: dict[str, Any] = {}
    stated = {
        dim: int(size)
        for tensor in model.inputs
        for dim, size in zip(tensor.shape or (), getattr(stated_feeds.get(tensor.name), "shape", ()), strict=False)
        if isinstance(dim, str)
    }
    stated.update(dims or {})
    for dim, size in _image_sizes(model).items():
        stated.setdefault(dim, size)
    unstated = [tensor for tensor in model.inputs if tensor.name not in stated_feeds]
    batch = _batch(model.inputs, stated_feeds, stated)
    for tensor in unstated:
        first = unnamed_dimensions(tensor).get(0)
        if first is not None and batch is not None:
            stated.setdefault(first, batch)
    sizes = probe_sizes(unstated, stated)
    for index, tensor in enumerate(model.inputs):
        if tensor.name in stated_feeds:
            feeds[tensor.name] = stated_feeds[tensor.name]
        else:
            # A scalar must be an array too.
            feeds[tensor.name] = np.asarray(_values(tensor, np.random.default_rng((seed, index)), sizes))
    feeds.update((name, value) for name, value in stated_feeds.items() if name not in feeds)
    return feeds


def _image_sizes(model: ModelInfo) -> dict[str, int]:
    """Return the open height and width of images where the model's metadata states them, by dimension."""
    sides = [int(side) for side in re.findall(r"[0-9]{1,6}", model.metadata.get("imgsz", ""))]
    sides = sides * 2 if len(sides) == 1 else sides
    sizes: dict[str, int] = {}
    if len(sides) != 2 or not all(0 < side <= _LARGEST_SIDE for side in sides):
        return sizes
    for tensor in model.inputs:
        if tensor.shape is None or len(tensor.shape) != 4:
            continue
        names, limits = {**dict(enumerate(tensor.shape)), **unnamed_dimensions(tensor)}, tensor.limits or (None,) * 4
        first = 1 if names[3] in (1, 3, 4) else 2  # of NHWC and of NCHW
        for axis, side in zip((first, first + 1), sides, strict=True):
            if isinstance(name := names[axis], str):
                sizes.setdefault(name, inside(side, limits[axis]))
    return sizes


def _batch(inputs: Sequence[TensorInfo], feeds: Mapping[str, Any], stated: Mapping[str, int]) -> int | None:
    """Return the one size of all first dimensions that are stated, else of those that are fixed and small."""
    told: set[int] = set()
    fixed: set[int] = set()
    for tensor in inputs:
        first = tensor.shape[0] if tensor.shape else None
        if tensor.name in feeds:
            told.update(tuple(getattr(feeds[tensor.name], "shape", ()))[:1])
        elif isinstance(first, int):
            fixed.update({first} if len(tensor.shape or ()) > 1 and first <= MAX_BATCH else ())
        elif tensor.shape:
            name = first if isinstance(first, str) else unnamed_dimensions(tensor)[0]
            told.update({stated[name]} if name in stated else ())
    sizes = told or fixed
    return int(next(iter(sizes))) if len(sizes) == 1 else None


def _values(tensor: TensorInfo, random: Any, sizes: Mapping[str, int]) -> Any:

    if tensor.kind != "tensor":
        kind = f"an {tensor.kind}" if tensor.kind[0] in "ou" else f"a {tensor.kind}"
        raise InputError(f"no probe can be made for input {tensor.name!r}: it is {kind}", fix="give a value for it")
    shape = probe_shape(tensor, sizes)
    drawn = 8 * math.prod(shape)  # in float64
    if drawn > MAX_DRAWN:
        raise _no_room(tensor, shape, f"it would take {drawn / 2**30:,.0f} GiB" if drawn < 2**80 else "it is too large")
    try:
        return _drawn(tensor, shape, random)
    except InputError:
        raise
    except (MemoryError, ValueError) as error:  # of sizes that NumPy cannot hold, ValueError
        raise _no_room(tensor, shape, str(error)) from None


def _no_room(tensor: TensorInfo, shape: tuple[int, ...], reason: str) -> OutOfMemoryError:
    msg = f"no probe can be made for input {tensor.name!r} of shape {shown_dims(shape)}: {reason}"
    return OutOfMemoryError(msg, fix=_FIX, device="cpu")


def _drawn(tensor: TensorInfo, shape: tuple[int, ...], random: Any) -> Any:
    import numpy as np

    if len(shape) > MAX_RANK:
        msg = f"no probe can be made for input {tensor.name!r}: NumPy has no arrays of {len(shape)} dimensions"
        raise InputError(msg, fix="export the model again")
    if tensor.dtype in ("float32", "float64", "float16"):
        return random.standard_normal(shape).astype(tensor.dtype)
    if tensor.dtype == "bool":
        return np.ones(shape, np.bool_) if "mask" in tensor.name.lower() else random.random(shape) < 0.5
    if tensor.dtype in ("uint8", "int8"):
        return random.integers(0, 128, shape).astype(tensor.dtype)
    if tensor.dtype in ("int16", "int32", "int64", "uint16", "uint32", "uint64"):
        low = 1 if "mask" in tensor.name.lower() else 0
        return random.integers(low, 2, shape).astype(tensor.dtype)
    if tensor.dtype in ("complex64", "complex128"):
        return (random.standard_normal(shape) + 1j * random.standard_normal(shape)).astype(tensor.dtype)
    narrow = _narrow(tensor.dtype)
    if narrow is None:
        raise InputError(f"no probe can be made for input {tensor.name!r} of type {tensor.dtype}", fix=_FIX)
    return random.standard_normal(shape).astype(narrow)


def _narrow(dtype: str) -> Any:
    if not dtype.startswith(("bfloat", "float8")):
        return None
    try:
        import ml_dtypes
    except ImportError:
        return None
    return getattr(ml_dtypes, dtype.replace("float8e", "float8_e"), None)


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
            assignment = ", ".join(f"{name}={sizes[name]}" for name in names_in(dim))
            raise InputError(f"{assignment} leaves no size for the dimension {dim}", fix="state other sizes")
        sizes[dim] = inside(size, limits[dim])
    return sizes


def _places(inputs: Iterable[TensorInfo]) -> Iterator[tuple[str, tuple[int, int], int]]:
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
