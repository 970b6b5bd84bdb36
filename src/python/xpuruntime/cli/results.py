# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The outputs of a run: a summary, and files."""

from __future__ import annotations

import math
import zipfile
from typing import IO, TYPE_CHECKING, Any

import msgspec

from xpuruntime.cli.reports import check_target
from xpuruntime.errors import InputError
from xpuruntime.files.paths import user_path
from xpuruntime.files.writing import replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

__all__ = ["ArraySummary", "check_output_path", "output_table", "save_outputs", "summarise"]

#: Arrays up to this many elements are printed whole in JSON.
_WHOLE = 1024
#: Values shown in a table.
_FIRST = 5


class ArraySummary(msgspec.Struct, frozen=True, kw_only=True):
    """One output: dtype, shape, range and mean of finite elements, how many are not, the first values, all if few."""

    dtype: str
    shape: tuple[int, ...]
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    not_finite: int = 0
    first: tuple[Any, ...] = ()
    values: Any = None


def summarise(outputs: Mapping[str, Any]) -> dict[str, ArraySummary]:
    """Describe arrays by name; values of arrays of at most 1024 elements are included."""
    return {name: _summary(value) for name, value in outputs.items()}


def output_table(outputs: Mapping[str, ArraySummary]) -> RenderableType:
    """Return a table of what came out."""
    from rich.text import Text

    from xpuruntime.evidence.render_text.tables import table

    made = table("outputs", ("output", "dtype", "shape", ">min", ">max", ">mean", "first values"))
    for name, one in outputs.items():
        numbers = ("-" if value is None else f"{value:.6g}" for value in (one.min, one.max, one.mean))
        shape = str(list(one.shape)) + (f" ({one.not_finite} not finite)" if one.not_finite else "")
        made.add_row(Text(name), one.dtype, Text(shape), *numbers, Text(_first(one)))
    return made


def check_output_path(path: str | None, names: int) -> None:
    """Refuse a path that outputs could not be written to, before anything runs."""
    if path is None:
        return
    target = user_path(path, "--output")
    if target.suffix not in {".npz", ".npy"}:
        raise InputError(f"--output {path}: the name must end in .npz, or .npy for a model with one output")
    if target.suffix == ".npy" and names != 1:
        raise InputError(f"--output {path}: the model has {names} outputs and .npy holds one: use .npz")
    check_target("--output", path)


def save_outputs(outputs: Mapping[str, Any], path: str) -> None:
    """Write arrays to ``.npz`` or ``.npy``. The file is replaced as a whole or not at all."""
    import numpy as np

    arrays = {name: _plain(name, value) for name, value in outputs.items()}

    def write(file: IO[bytes]) -> None:
        if not path.endswith(".npz"):
            np.save(file, next(iter(arrays.values())), allow_pickle=False)
            return
        with zipfile.ZipFile(file, "w") as archive:  # as np.savez, which takes no array called "file"
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    replace_file(path, write, private=False)


def _plain(name: str, value: Any) -> Any:
    """Return an output as an array that a file can hold; text as NumPy's own."""
    import numpy as np

    try:
        array = np.asarray(value)
        if array.dtype == object:
            if not all(isinstance(one, str) for one in array.flat):
                raise ValueError("it holds Python objects")
            array = array.astype(np.str_)
    except ValueError as error:
        raise InputError(f"the output {name!r} cannot be written as an array: {error}; leave --output out") from None
    return array


def _summary(value: Any) -> ArraySummary:
    import numpy as np

    array = np.asarray(value)
    shape = tuple(int(size) for size in array.shape)
    values = array.tolist() if array.size <= _WHOLE else None
    first = tuple(array.flat[:_FIRST].tolist())
    if array.dtype.kind not in "biuf" or array.size == 0:
        return ArraySummary(dtype=str(array.dtype), shape=shape, first=first, values=values)
    wide = array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    return ArraySummary(
        dtype=str(array.dtype),
        shape=shape,
        min=float(finite.min()) if finite.size else None,
        max=float(finite.max()) if finite.size else None,
        mean=float(finite.mean()) if finite.size else None,
        not_finite=int(wide.size - finite.size),
        first=first,
        values=values,
    )


def _first(one: ArraySummary) -> str:
    shown = [f"{value:.5g}" if isinstance(value, float) else str(value) for value in one.first]
    return ", ".join(shown) + (", ..." if math.prod(one.shape) > len(shown) else "")
