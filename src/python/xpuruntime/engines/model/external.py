# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Weights outside the model file, where they may be, whether they are whole; digests, limits of a model's parts."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.engines.model.file import parse, read, refuse
from xpuruntime.engines.model.graph import graphs, normal_domain, set_node_names, subgraphs, tensors
from xpuruntime.errors import ModelError
from xpuruntime.files.digests import file_digest
from xpuruntime.files.paths import reason_of
from xpuruntime.files.reading import open_regular

if TYPE_CHECKING:
    import onnx

    from xpuruntime.engines.model.info import ModelInfo

#: Fields of a TensorProto that hold values.
_VALUES = (
    "raw_data", "float_data", "int32_data", "int64_data", "uint64_data", "double_data", "string_data",
)  # fmt: skip


def part_digests(info: ModelInfo) -> tuple[str, str]:
    """Return the SHA-256 of the graph and of the initializers, in hex; two empty texts where it is no ONNX model.

    The graph is nodes, shapes, opsets and functions, with names, types and shapes of initializers but not their values;
    metadata and documentation are left out.
    """
    if info.format != "onnx":
        return "", ""
    if info.data is not None:
        return _digests(info.data, info.path)
    return _of_file(info.file, info.sha256)


@functools.lru_cache(maxsize=64)
def _of_file(path: str, sha256: str) -> tuple[str, str]:
    del sha256
    return _digests(read(path)[1], path)


def _digests(data: bytes, where: str) -> tuple[str, str]:
    proto = parse(data, where)
    values = hashlib.sha256()
    for tensor in tensors(proto):
        values.update(f"{tensor.name}\0{tensor.data_type}\0{tuple(tensor.dims)}\0".encode())
        if tensor.HasField("raw_data"):
            values.update(tensor.raw_data)
        else:
            values.update(tensor.SerializeToString(deterministic=True))
        for name in _VALUES:
            tensor.ClearField(name)
    del proto.metadata_props[:]
    for name in ("doc_string", "producer_name", "producer_version"):
        proto.ClearField(name)
    graph = hashlib.sha256(proto.SerializeToString(deterministic=True))
    return graph.hexdigest(), values.hexdigest()


def model_digest(info: ModelInfo) -> str:
    """Return the SHA-256, in hex, of a model file with its external data."""
    if not info.external_files:
        return info.sha256
    digest = hashlib.sha256(info.sha256.encode())
    for location, external_digest in external_digests(info).items():
        digest.update(f"{location}\0{external_digest}\0".encode())
    return digest.hexdigest()


def external_digests(info: ModelInfo) -> dict[str, str]:
    """Return file of external data to its SHA-256, in hex. Raises as `model_digest`."""
    digests = {}
    for file in sorted(info.external_files, key=lambda file_: file_.location):
        path = Path(info.base_dir or ".") / file.location
        try:
            facts = path.stat()
            digests[file.location] = _remembered(str(path), facts.st_size, facts.st_mtime_ns)
        except OSError as error:
            msg = f"cannot use the model {info.path!r}: its data {file.location!r} cannot be read ({reason_of(error)})"
            raise ModelError(f"{msg}. Fix: put the file back beside the model.") from None
    return digests


@functools.lru_cache(maxsize=64)
def _remembered(path: str, size: int, mtime_ns: int) -> str:
    del size, mtime_ns
    return file_digest(path)


#: Dimensions of one tensor.
MAX_DIMS = 1024
#: Elements of one tensor: their bits are counted in 64-bit integers everywhere.
MAX_ELEMENTS = 1 << 55
#: Nodes of a model, with model-local functions written out.
MAX_NODES = 1_000_000

_EXPORT_AGAIN = "export the model again, or correct the program that writes it"


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
                where,
                f"tensor {tensor.name!r} has {len(dims):,} dimensions, and at most {MAX_DIMS:,} are read",
                _EXPORT_AGAIN,
            )
        negative = next((dim for dim in dims if dim < 0), None)
        if negative is not None:
            raise refuse(where, f"tensor {tensor.name!r} has the size {negative} in {shown_dims(dims)}", _EXPORT_AGAIN)
        if element_count(dims) > MAX_ELEMENTS:
            raise refuse(
                where, f"tensor {tensor.name!r} of shape {shown_dims(dims)} has more than 2**55 elements", _EXPORT_AGAIN
            )
    for graph in graphs(model):
        for value in (*graph.input, *graph.output):
            rank = len(value.type.tensor_type.shape.dim)
            if rank > MAX_DIMS:
                raise refuse(
                    where, f"{value.name!r} has {rank:,} dimensions, and at most {MAX_DIMS:,} are read", _EXPORT_AGAIN
                )
    _check_nodes(model, where)


def inline_functions(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """Return the model with its model-local functions written out, and each node named."""
    import onnx
    from onnx.inliner import inline_local_functions

    try:
        inlined = inline_local_functions(model)
    except (onnx.checker.ValidationError, RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise refuse(where, f"its model-local functions cannot be written out: {reason}", _EXPORT_AGAIN) from None
    set_node_names(inlined)
    return inlined


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
                        raise refuse(where, f"its model-local function {called[1]!r} calls itself", _EXPORT_AGAIN)
                    waiting.append(called)
            else:
                plain = len(bodies[name]) - len(calls[name])
                sizes[name] = min(plain + sum(sizes[called] for called in calls[name]), MAX_NODES + 1)
                waiting.pop()
    return sizes


def _amount(total: int) -> str:
    return f"{total:,}" if total <= 1000 * MAX_NODES else "far too many"


# Bits of one element, by TensorProto.DataType; strings have no fixed size.
_BITS = {
    1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128, 16: 16,
    17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2,
}  # fmt: skip

# Digits of an offset or a length: those of the largest file there can be.
_DIGITS = 19

_SAVE_AGAIN = (
    "save the model again with its data in the same folder: onnx.save_model(model, path, save_as_external_data=True)"
)


class ExternalFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file with weights beside the model. `size` in bytes, `tensors` kept in it, `location` relative to the model."""

    location: str
    size: int
    tensors: int


class _Place(msgspec.Struct, frozen=True):
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
        raise refuse(where, f"the external data of tensor {tensor.name!r} names no file", _SAVE_AGAIN)
    numbers: dict[str, int | None] = {"offset": None, "length": None}
    for key in numbers:
        text = entries.get(key)
        if text is None:
            continue
        if not text.isascii() or not text.isdigit() or len(text) > _DIGITS:
            what = f"the external data of tensor {tensor.name!r} has {key} {text[:40]!r}"
            raise refuse(where, f"{what}, not a number of at most {_DIGITS} digits", _SAVE_AGAIN)
        numbers[key] = int(text)
    return _Place(location, numbers["offset"] or 0, numbers["length"])


def _size(location: str, tensor: str, folder: str, where: str) -> int:
    what = f"the data of tensor {tensor!r} is kept in {location!r}"
    parts = PureWindowsPath(location)
    if Path(location).is_absolute() or parts.drive or parts.root:
        raise refuse(where, f"{what}, an absolute path; data must be in the model's own folder", _SAVE_AGAIN)
    if ".." in parts.parts or "\0" in location:
        raise refuse(where, f"{what}, which leads outside the model's own folder", _SAVE_AGAIN)
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
        raise refuse(where, f"{what}, which is a directory", _SAVE_AGAIN)
    if not stat.S_ISREG(facts.st_mode):
        raise refuse(where, f"{what}, which is not a regular file", _SAVE_AGAIN)
    if not os.access(path, os.R_OK):
        raise refuse(where, f"{what}, which may not be read", "check its permissions")
    return facts.st_size


def _check_span(tensor: onnx.TensorProto, place: _Place, size: int, where: str) -> None:
    needed = nbytes(tensor)
    what = f"tensor {tensor.name!r} in {place.location!r}"
    if tensor.data_type in (0, 8):
        raise refuse(where, f"{what} has a type that cannot be kept outside the model", _SAVE_AGAIN)
    if needed is None:  # a type newer than this table: its own length is all there is to go by
        needed = place.length or 0
    if place.length is not None and place.length != needed:
        raise refuse(where, f"{what} is said to have {place.length} bytes, and its shape needs {needed}", _SAVE_AGAIN)
    if place.offset + needed > size:
        raise refuse(
            where,
            f"{what} ends at byte {place.offset + needed}, and the file at {size}: the file is truncated",
            "copy or download the data file again",
        )
