# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Weights kept outside the model file: where they may be, whether they are whole, and reading them."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from xpuruntime.engines.model.digests import element_count
from xpuruntime.engines.model.file import refuse
from xpuruntime.files.paths import reason_of
from xpuruntime.files.reading import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx

__all__ = ["ExternalFile", "check", "is_external", "load", "nbytes", "real_files", "resolve_links"]

# Bits of one element, by TensorProto.DataType; strings have no fixed size.
_BITS = {
    1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128, 16: 16,
    17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2,
}  # fmt: skip

# Digits of an offset or a length: those of the largest file there can be.
_DIGITS = 19

_FIX = "save the model again with its data in the same folder: onnx.save_model(model, path, save_as_external_data=True)"


class ExternalFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file with weights beside the model. `size` in bytes, `tensors` kept in it, `location` relative to the model."""

    location: str
    size: int
    tensors: int


class _Place(NamedTuple):
    location: str
    offset: int
    length: int | None


def is_external(tensor: onnx.TensorProto) -> bool:
    """Return whether the tensor's data lies in another file."""
    return bool(tensor.data_location == 1)


def nbytes(tensor: onnx.TensorProto) -> int | None:
    """Return the bytes that the tensor's type and dims need; None where the type has no fixed size."""
    bits = _BITS.get(tensor.data_type)
    if bits is None:
        return None
    return (element_count(tensor.dims) * bits + 7) // 8


def check(tensors: Iterable[onnx.TensorProto], folder: str | None, where: str) -> tuple[ExternalFile, ...]:
    """Check every tensor whose data is external."""
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for tensor in tensors:
        if not is_external(tensor):
            continue
        if folder is None:
            raise refuse(
                where,
                f"the data of tensor {tensor.name!r} is in another file, and bytes have no folder",
                "give the path of the file, or read its data too: onnx.load(path)",
            )
        place = _place(tensor, where)
        if place.location not in sizes:
            sizes[place.location] = _size(place.location, tensor.name, folder, where)
        counts[place.location] = counts.get(place.location, 0) + 1
        _check_span(tensor, place, sizes[place.location], where)
    return tuple(ExternalFile(location=n, size=sizes[n], tensors=counts[n]) for n in sorted(sizes))


def load(tensors: Iterable[onnx.TensorProto], folder: str | None, where: str, *, at_most: int | None = None) -> None:
    """Read external data into `raw_data`, in place; `at_most` bytes a tensor, the others stay outside."""
    wanted = [t for t in tensors if is_external(t) and (at_most is None or (nbytes(t) or 0) <= at_most)]
    check(wanted, folder, where)
    for tensor in wanted:
        place = _place(tensor, where)
        length = place.length if place.length is not None else nbytes(tensor)
        try:
            with open_regular(Path(folder or ".") / place.location) as file:
                file.seek(place.offset)
                tensor.raw_data = file.read(-1 if length is None else length)
        except OSError as error:
            what = f"the data of tensor {tensor.name!r} in {place.location!r} cannot be read ({reason_of(error)})"
            raise refuse(where, what, "check the file") from None
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")


def resolve_links(tensors: Iterable[onnx.TensorProto], folder: str) -> str:
    """Let tensors name the real files of their data where these are links, in place; return the folder they are in.

    A download cache keeps files under other names and links them into the folder of a model. Engines that are given a
    model as bytes refuse such links, and so do some that are given the file.
    """
    entries = [
        entry for tensor in tensors if is_external(tensor) for entry in tensor.external_data if entry.key == "location"
    ]
    real = real_files([entry.value for entry in entries], folder)
    if not real:
        return folder
    common = os.path.commonpath([os.path.dirname(path) for path in real.values()])  # noqa: PTH120 - as text
    for entry in entries:
        entry.value = Path(os.path.relpath(real[entry.value], common)).as_posix()
    return common


def real_files(locations: Iterable[str], folder: str) -> dict[str, str]:
    """Return the real path of each file of data by its location; nothing where none of them is a link."""
    home = os.path.realpath(folder)
    plain = {name: os.path.normpath(os.path.join(home, name)) for name in locations}  # noqa: PTH118 - as text
    real = {name: os.path.realpath(path) for name, path in plain.items()}
    return {} if real == plain else real


def _place(tensor: onnx.TensorProto, where: str) -> _Place:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if not location:
        raise refuse(where, f"the external data of tensor {tensor.name!r} names no file", _FIX)
    numbers: dict[str, int | None] = {"offset": None, "length": None}
    for key in numbers:
        text = entries.get(key)
        if text is None:
            continue
        if not text.isascii() or not text.isdigit() or len(text) > _DIGITS:
            what = f"the external data of tensor {tensor.name!r} has {key} {text[:40]!r}"
            raise refuse(where, f"{what}, not a number of at most {_DIGITS} digits", _FIX)
        numbers[key] = int(text)
    return _Place(location, numbers["offset"] or 0, numbers["length"])


def _size(location: str, tensor: str, folder: str, where: str) -> int:
    """Return the size of the file at `location`, after the checks on where it is."""
    what = f"the data of tensor {tensor!r} is kept in {location!r}"
    parts = PureWindowsPath(location)
    if Path(location).is_absolute() or parts.drive or parts.root:
        raise refuse(where, f"{what}, an absolute path; data must be in the model's own folder", _FIX)
    if ".." in parts.parts or "\0" in location:
        raise refuse(where, f"{what}, which leads outside the model's own folder", _FIX)
    path = Path(folder) / location
    real = Path(os.path.realpath(path))
    # A model that is itself a link (as in a download cache) may have its data beside the link's target.
    homes = {Path(os.path.realpath(folder))}
    if Path(where).is_symlink():
        homes.add(Path(os.path.realpath(where)).parent)
    if not any(real.is_relative_to(home) for home in homes):
        raise refuse(
            where, f"{what}, a symbolic link to {str(real)!r} outside the model's own folder", "copy the file there"
        )
    try:
        facts = path.stat()
    except OSError as error:
        reason = "which does not exist" if isinstance(error, FileNotFoundError) else f"not readable ({error.strerror})"
        raise refuse(where, f"{what}, {reason}", f"put the file back into {folder!r}") from None
    if stat.S_ISDIR(facts.st_mode):
        raise refuse(where, f"{what}, which is a directory", _FIX)
    if not stat.S_ISREG(facts.st_mode):
        raise refuse(where, f"{what}, which is not a regular file", _FIX)
    if not os.access(path, os.R_OK):
        raise refuse(where, f"{what}, which may not be read", "check its permissions")
    return facts.st_size


def _check_span(tensor: onnx.TensorProto, place: _Place, size: int, where: str) -> None:
    needed = nbytes(tensor)
    what = f"tensor {tensor.name!r} in {place.location!r}"
    if tensor.data_type in (0, 8):
        raise refuse(where, f"{what} has a type that cannot be kept outside the model", _FIX)
    if needed is None:  # a type newer than this table: its own length is all there is to go by
        needed = place.length or 0
    if place.length is not None and place.length != needed:
        raise refuse(where, f"{what} is said to have {place.length} bytes, and its shape needs {needed}", _FIX)
    if place.offset + needed > size:
        raise refuse(
            where,
            f"{what} ends at byte {place.offset + needed}, and the file at {size}: the file is truncated",
            "copy or download the data file again",
        )
