# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`probe_feeds`: inputs to try a model with, the same each time; `probing`: errors of runs on them."""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.limits import shown_dims
from xpuruntime.engines.precision.probe_sizes import inside, names_in, probe_size, probe_sizes, unnamed_dimensions
from xpuruntime.errors import EngineFailed, InputError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from xpuruntime.engines.model import ModelInfo, TensorInfo
    from xpuruntime.errors import XpuRuntimeError

__all__ = ["ProbeRefusedError", "probe_feeds", "probe_refused", "probe_shape", "probing", "shapes_text"]

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
def probing(model: ModelInfo, feeds: Mapping[str, Any], *, made: bool = True) -> Iterator[None]:
    """Run a model on inputs that were generated, of which an error says that they are the likely cause.

    Without `made`, the inputs are somebody's own, and every error is passed on.
    """
    try:
        yield
    except ProbeRefusedError:
        raise
    except (EngineFailed, InputError) as error:
        free = any(not isinstance(size, int) for tensor in model.inputs for size in tensor.shape or (None,))
        if made and (free or not all("float" in tensor.dtype for tensor in model.inputs)):
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

    given = {**(getattr(model.source, "examples", None) or {}), **(overrides or {})}
    names = [tensor.name for tensor in (*model.inputs, *model.overridable_inputs)]
    for name in given:
        if name not in names:
            raise InputError(
                f"the model has no input {name!r}; its inputs are {', '.join(map(repr, names))}", fix="correct the name"
            )
    feeds: dict[str, Any] = {}
    stated = {
        dim: int(size)
        for tensor in model.inputs
        for dim, size in zip(tensor.shape or (), getattr(given.get(tensor.name), "shape", ()), strict=False)
        if isinstance(dim, str)
    }
    stated.update(dims or {})
    for dim, size in _image_sizes(model).items():
        stated.setdefault(dim, size)
    made = [tensor for tensor in model.inputs if tensor.name not in given]
    batch = _batch(model.inputs, given, stated)
    for tensor in made:
        first = unnamed_dimensions(tensor).get(0)
        if first is not None and batch is not None:
            stated.setdefault(first, batch)
    sizes = probe_sizes(made, stated)
    for index, tensor in enumerate(model.inputs):
        if tensor.name in given:
            feeds[tensor.name] = given[tensor.name]
        else:
            # A scalar must be an array too.
            feeds[tensor.name] = np.asarray(_values(tensor, np.random.default_rng((seed, index)), sizes))
    feeds.update((name, value) for name, value in given.items() if name not in feeds)
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


def _batch(inputs: Sequence[TensorInfo], given: Mapping[str, Any], stated: Mapping[str, int]) -> int | None:
    """Return the one size of all first dimensions that are stated, else of those that are fixed and small."""
    told: set[int] = set()
    fixed: set[int] = set()
    for tensor in inputs:
        first = tensor.shape[0] if tensor.shape else None
        if tensor.name in given:
            told.update(tuple(getattr(given[tensor.name], "shape", ()))[:1])
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
    """Return the dtype of a narrow float, where the optional package that defines it is there."""
    if not dtype.startswith(("bfloat", "float8")):
        return None
    try:
        import ml_dtypes
    except ImportError:
        return None
    return getattr(ml_dtypes, dtype.replace("float8e", "float8_e"), None)
