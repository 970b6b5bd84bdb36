# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Datatypes of the protocol, their arrays and raw form, and the checks of every request, whatever its transport."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.serving.messages import ServingError, Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xpuruntime.serving.messages import InferTensor, Parameter

#: Items of one request at most, each of about a microsecond; and how many of them a tensor is.
MOST_ITEMS, ITEMS_OF_TENSOR = 1 << 17, 64
#: Items, and bytes of numbers that are converted, of a request that may be decoded in an event loop.
_INLINE_ITEMS, INLINE_BYTES = 4096, 64 << 10


class NotInline(Exception):  # noqa: N818 - a state, and no error
    """The request takes too long to decode in an event loop, and is to be decoded again in a thread."""


class Items:
    """How many more items one request may have: fields of messages, strings, parameters and tensors."""

    __slots__ = ("inline", "left", "most")

    def __init__(self, most: int = MOST_ITEMS, *, inline: bool = False) -> None:
        self.most, self.inline = most, inline
        self.left = _INLINE_ITEMS if inline else most

    def take(self, count: int) -> None:
        """Count so many items. Raises `ServingError` where they are too many, and `NotInline`."""
        self.left -= count
        if self.left >= 0:
            return
        if self.inline:
            raise NotInline
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"the request has more than {self.most} fields, strings, parameters and tensors together, where a tensor "
            f"counts as {ITEMS_OF_TENSOR}. Fix: send it in parts, and numbers as raw bytes",
        )

    def take_tensor(self) -> None:
        """Count a tensor that the request has or names."""
        self.take(ITEMS_OF_TENSOR)

    def convert(self, size: int) -> None:
        """Raise `NotInline` where so many bytes are too many to be converted in an event loop."""
        if self.inline and size > INLINE_BYTES:
            raise NotInline


_MOST_DIMENSIONS = 32
_LARGEST = 2**63 - 1
#: Bytes of an array whose copy takes less time than a view of it.
_COPIED = 4096
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Datatype:
    """A datatype of the protocol."""

    name: str
    dtype: np.dtype[Any]
    size: int
    contents: str

    @property
    def is_bytes(self) -> bool:
        """Whether elements are strings of bytes."""
        return self.size == 0

    @property
    def only_raw(self) -> bool:
        """Whether JSON and typed contents have no form for it."""
        return not self.contents


#: Name to datatype. Arrays are little-endian whatever the machine is, as the wire is.
DATATYPES = {
    name: Datatype(name, np.dtype(dtype), 0 if name == "BYTES" else np.dtype(dtype).itemsize, contents)
    for name, dtype, contents in (
        ("BOOL", "?", "bool_contents"),
        ("UINT8", "u1", "uint_contents"),
        ("UINT16", "<u2", "uint_contents"),
        ("UINT32", "<u4", "uint_contents"),
        ("UINT64", "<u8", "uint64_contents"),
        ("INT8", "i1", "int_contents"),
        ("INT16", "<i2", "int_contents"),
        ("INT32", "<i4", "int_contents"),
        ("INT64", "<i8", "int64_contents"),
        ("FP16", "<f2", ""),
        ("BF16", "<u2", ""),
        ("FP32", "<f4", "fp32_contents"),
        ("FP64", "<f8", "fp64_contents"),
        ("BYTES", "O", "bytes_contents"),
    )
}


def datatype_named(name: str, tensor: str) -> Datatype:
    """Return a datatype by its name; `tensor` is named in the error."""
    named = DATATYPES.get(name)
    if named is None:
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"tensor {tensor!r} has the datatype {name[:40]!r}, which the protocol does not have. "
            f"Fix: state one of {', '.join(DATATYPES)}",
        )
    return named


def checked_shape(shape: Iterable[int], tensor: str) -> tuple[int, ...]:
    """Return a shape without negative dimensions, of at most 32, whose count of elements fits into 63 bits."""
    dims = tuple(shape)
    if len(dims) > _MOST_DIMENSIONS:
        raise ServingError(
            Status.INVALID_ARGUMENT, f"tensor {tensor!r} has {len(dims)} dimensions. Fix: at most {_MOST_DIMENSIONS}"
        )
    for dim in dims:
        if not 0 <= dim <= _LARGEST:
            raise ServingError(
                Status.INVALID_ARGUMENT,
                f"tensor {tensor!r} has the shape {list(dims)}. Fix: state the size of each dimension, 0 or more",
            )
    if math.prod(dim for dim in dims if dim) > _LARGEST // 8:
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"tensor {tensor!r} has the shape {list(dims)}, which no memory can hold. Fix: correct the shape",
        )
    return dims


def array_of_raw(
    datatype: Datatype, shape: tuple[int, ...], raw: memoryview, tensor: str, items: Items | None = None
) -> NDArray[Any]:
    """Return an array of raw elements: a read-only view where that is possible, not necessarily aligned."""
    if datatype.is_bytes:
        return _object_array(_split(raw, math.prod(shape), tensor, items), shape)
    expected = math.prod(shape) * datatype.size
    if len(raw) != expected:
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"tensor {tensor!r} has {len(raw)} bytes, and {datatype.name} of shape {list(shape)} takes {expected}. "
            "Fix: send the elements of that shape, or correct it",
        )
    if datatype.name == "BOOL":
        check_bools(raw, tensor)
    return np.frombuffer(raw, datatype.dtype).reshape(shape)


def array_of_elements(
    datatype: Datatype, shape: tuple[int, ...], elements: Sequence[Any] | NDArray[Any], tensor: str
) -> NDArray[Any]:
    """Return an array of a flat sequence of Python values or an array, which must fit the datatype exactly."""
    if datatype.is_bytes:
        _check_count(len(elements), shape, tensor)
        return _object_array(elements, shape)
    return array_of_pieces(datatype, shape, (elements,), tensor)


def array_of_pieces(
    datatype: Datatype, shape: tuple[int, ...], pieces: Iterable[Sequence[Any] | NDArray[Any]], tensor: str
) -> NDArray[Any]:
    """Return an array of numbers that come in pieces; see `array_of_elements`."""
    try:
        arrays = [_exact(datatype, piece) for piece in pieces]
    except OverflowError:
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"tensor {tensor!r} has an element that {datatype.name} cannot hold. Fix: send values of its range",
        ) from None
    array = arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, datatype.dtype), *arrays])
    _check_count(array.size, shape, tensor)
    return array.reshape(shape)


def _check_count(count: int, shape: tuple[int, ...], tensor: str) -> None:
    if count != math.prod(shape):
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"tensor {tensor!r} has {count} elements, and the shape {list(shape)} has {math.prod(shape)}. "
            "Fix: send the elements of that shape, or correct it",
        )


def _exact(datatype: Datatype, elements: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
    """Return numbers as a flat array. Raises OverflowError where the datatype cannot hold one."""
    kind = datatype.dtype.kind
    if kind in "iu" and datatype.name != "UINT64":
        wide = np.asarray(elements, np.int64)
        limits = np.iinfo(datatype.dtype)
        if wide.size and (int(wide.min()) < limits.min or int(wide.max()) > limits.max):
            raise OverflowError
        return wide.astype(datatype.dtype)
    if kind == "u":
        if not isinstance(elements, np.ndarray) and any(element < 0 for element in elements):
            raise OverflowError
        return np.asarray(elements, datatype.dtype)
    if kind == "f":
        with np.errstate(over="ignore"):
            exact = np.asarray(elements, datatype.dtype)
        if not isinstance(elements, np.ndarray) and np.isinf(exact).any():  # JSON has no infinity
            raise OverflowError
        return exact
    return np.asarray(elements, datatype.dtype)


def raw_of(tensor: InferTensor) -> bytes | memoryview:
    """Return the raw elements of a tensor: a view of its array unless it is small, or they are BYTES."""
    datatype = DATATYPES[tensor.datatype]
    if datatype.is_bytes:
        parts: list[bytes] = []
        for element in tensor.data.ravel():
            parts += (_LENGTH.pack(len(element)), element)
        return b"".join(parts)
    if tensor.data.nbytes <= _COPIED and tensor.data.dtype == datatype.dtype:
        small: bytes = tensor.data.tobytes()
        return small
    array = np.ascontiguousarray(tensor.data, datatype.dtype)
    octets: Any = array.reshape(-1).view(np.uint8)
    return memoryview(octets) if array.size else b""


def _object_array(elements: Sequence[Any] | NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


def _split(raw: memoryview, count: int, tensor: str, items: Items | None) -> list[bytes]:
    """Return the elements of BYTES: each is a little-endian length of four bytes, and that many."""
    end = len(raw)
    if count * 4 > end:
        raise _wrong_bytes(tensor, f"{count} elements take at least {count * 4} bytes, and there are {end}")
    if items is not None:
        items.take(count)
        items.convert(end)
    elements = []
    at = 0
    for index in range(count):
        if at + 4 > end:
            raise _wrong_bytes(tensor, f"the length of element {index} is missing")
        (length,) = _LENGTH.unpack_from(raw, at)
        at += 4
        if at + length > end:
            raise _wrong_bytes(tensor, f"element {index} states {length} bytes, and {end - at} are left")
        elements.append(bytes(raw[at : at + length]))
        at += length
    if at != end:
        raise _wrong_bytes(tensor, f"{end - at} bytes follow its {count} elements")
    return elements


def _wrong_bytes(tensor: str, reason: str) -> ServingError:
    return ServingError(
        Status.INVALID_ARGUMENT,
        f"tensor {tensor!r} of BYTES: {reason}. Fix: write each element as its length, 4 bytes little-endian, and it",
    )


def check_bools(raw: memoryview, tensor: str) -> None:
    """Raise where a byte of raw BOOL is neither 0 nor 1."""
    bits = np.frombuffer(raw, np.uint8)
    if bits.size and int(bits.max()) > 1:
        raise ServingError(
            Status.INVALID_ARGUMENT, f"tensor {tensor!r} of BOOL has a byte that is neither 0 nor 1. Fix: send 0 or 1"
        )


#: Parameters of extensions that are not served. Ignoring one would answer another question than was asked.
_EXTENSIONS = {
    "sequence_id": "sequences",
    "sequence_start": "sequences",
    "sequence_end": "sequences",
    "shared_memory_region": "shared memory",
    "shared_memory_offset": "shared memory",
    "shared_memory_byte_size": "shared memory",
    "classification": "classification",
}


def deadline_of(parameters: Mapping[str, Parameter], now: float | None) -> float | None:
    """Return the deadline that the parameter ``timeout`` (microseconds) states, on the clock of `time.monotonic`."""
    stated = parameters.get("timeout")
    if stated is None:
        return None
    microseconds = _whole_number("timeout", stated)
    if microseconds == 0:  # as in Triton: none
        return None
    return (time.monotonic() if now is None else now) + microseconds / 1e6


def priority_of(parameters: Mapping[str, Parameter]) -> int:
    """Return the parameter ``priority``, 0 for the model's default."""
    stated = parameters.get("priority")
    return 0 if stated is None else _whole_number("priority", stated)


def _whole_number(name: str, stated: Parameter) -> int:
    if isinstance(stated, str) and stated.isascii() and stated.isdecimal() and len(stated) < 20:
        stated = int(stated)  # tritonclient sends `timeout` of a stream as text
    if isinstance(stated, bool) or not isinstance(stated, int) or not 0 <= stated < 2**64:
        raise ServingError(
            Status.INVALID_ARGUMENT, f"the parameter {name} is {stated!r}. Fix: state a whole number, 0 or more"
        )
    return stated


def refuse_extensions(parameters: Mapping[str, Parameter], where: str) -> None:
    """Raise where a parameter belongs to an extension that is not served, unless it says no (0 or false).

    So does one with the server's own prefix that it does not have, or whose value would be passed over. Others are the
    client's own.
    """
    for name in parameters:
        if name.startswith("xrt_") and not (
            name == "xrt_evidence" and where == "the request" and isinstance(parameters[name], bool)
        ):
            raise ServingError(
                Status.INVALID_ARGUMENT,
                f"{where} has the parameter {name[:64]} {parameters[name]!r:.80}. Fix: of those that begin with xrt_ "
                "a request may have xrt_evidence, true or false",
            )
        extension = _EXTENSIONS.get(name)
        if extension is not None and (parameters[name] or extension == "shared memory"):
            raise ServingError(
                Status.UNIMPLEMENTED,
                f"{where} has the parameter {name}, of the extension for {extension}, which is not served. "
                f"Fix: leave it out, and see the extensions in the server's metadata",
            )


def refuse_duplicates(names: Iterable[str], what: str) -> None:
    """Raise where a name comes twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ServingError(Status.INVALID_ARGUMENT, f"the {what} {name!r} is given twice. Fix: name each once")
        seen.add(name)
