# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Elements of tensors in JSON: flat in row-major order or nested as the shape says, and never converted silently."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.serving.protocol.datatypes import DATATYPES, Datatype, array_of_elements, array_of_pieces
from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from xpuruntime.serving.messages import InferTensor
    from xpuruntime.serving.protocol.items import Items

__all__ = ["NoJsonFormError", "array_of_json", "elements_of", "reason_of"]


class NoJsonFormError(ServingError):
    """A tensor that JSON cannot hold: its datatype, NaN, an infinity, or bytes that are not UTF-8."""


_BLANKS = b" \t\r\n"


def array_of_json(
    datatype: Datatype, shape: tuple[int, ...], text: bytes | memoryview, tensor: str, items: Items | None = None
) -> NDArray[Any]:
    """Return the array of a tensor's ``data``, which is well-formed JSON.

    Raises
    ------
    ServingError
        It is neither flat nor nested as the shape says, has an element of another type or out of range, or the
        datatype has no form in JSON.
    """
    if datatype.only_raw:
        raise NoJsonFormError(
            Status.INVALID_ARGUMENT,
            f"tensor {tensor!r} is {datatype.name}, which JSON has no form for. "
            "Fix: send it with the binary extension (binary_data_size)",
        )
    depth = _depth(text)
    rank = len(shape)
    if depth not in (1, rank):
        nested = f" or {rank}" if rank not in (0, 1) else ""
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"the data of tensor {tensor!r} begin with {depth} brackets, and its shape {list(shape)} takes 1 (flat)"
            f"{nested}. Fix: send a flat array in row-major order, or one nested as the shape",
        )
    if items is not None:
        items.convert(len(text))
    try:
        if datatype.is_bytes:
            return array_of_elements(datatype, shape, _strings(bytes(text), depth, shape, tensor, items), tensor)
        return array_of_pieces(datatype, shape, _numbers(datatype, bytes(text), depth, shape, tensor), tensor)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"the data of tensor {tensor!r} are not {datatype.name}: {reason_of(error).partition(' - at ')[0]}. "
            f"Fix: send {_FORMS[datatype.dtype.kind]}",
        ) from None


def _strings(text: bytes, depth: int, shape: Sequence[int], tensor: str, items: Items | None) -> list[bytes]:
    if items is not None:  # before they are made: half of the quotes that no backslash is before, or more
        strings = (text.count(b'"') - text.count(b'\\"') + 1) // 2
        items.take(max(strings, text.count(b"[") if depth > 1 else 0))
    values: Any = _decoder("O", depth).decode(text)
    flat = [values] if depth == 0 else values
    for dim in shape[1:depth]:
        if any(len(one) != dim for one in flat):
            raise _not_nested(shape, tensor)
        flat = list(itertools.chain.from_iterable(flat))
    return [one.encode() for one in flat]


def _numbers(
    datatype: Datatype, text: bytes, depth: int, shape: Sequence[int], tensor: str
) -> Iterator[list[bool] | list[int] | list[float]]:
    """Return the numbers in JSON that was checked, in pieces: each is decoded while nothing else runs."""
    if depth == 0:
        text = b"[" + text + b"]"
    structure = text.translate(None, _NO_STRUCTURE)
    if depth > 1 and structure != _structure_of(shape, len(structure)):
        raise _not_nested(shape, tensor)
    if depth < 2 and structure.count(b"[") > 1:
        raise _not_nested(shape, tensor)
    flat = text.translate(None, b"[]")
    decoder = _decoder(datatype.dtype.kind, 1)
    at = 0
    while at < len(flat):
        end = flat.find(b",", at + _PIECE)
        end = len(flat) if end < 0 else end
        yield decoder.decode(b"[" + flat[at:end] + b"]")
        at = end + 1


def _structure_of(shape: Sequence[int], length: int) -> bytes:
    """Return the brackets and commas of an array of this shape; nothing where they are not so many."""
    sizes = itertools.accumulate(reversed(shape), lambda inner, dim: 2 + dim * inner + max(dim - 1, 0), initial=0)
    if max(sizes) > length:
        return b""
    made = b""
    for dim in reversed(shape):
        made = b"[" + (made + b",") * max(dim - 1, 0) + made * min(dim, 1) + b"]"
    return made


#: Bytes of JSON that are decoded at a time, and what its structure is without.
_PIECE = 128 << 10
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))
_FORMS = {"b": "true or false", "i": "whole numbers", "u": "whole numbers", "f": "numbers", "O": "strings"}
_TYPES: dict[str, Any] = {"b": bool, "i": int, "u": int, "f": float, "O": str}


@functools.lru_cache(maxsize=128)
def _decoder(kind: str, depth: int) -> msgspec.json.Decoder[Any]:
    form = _TYPES[kind]
    for _ in range(depth):
        form = list.__class_getitem__(form)
    return msgspec.json.Decoder(form)


def _depth(text: bytes | memoryview) -> int:
    """Return with how many opening brackets JSON begins, 33 for more than any shape can have."""
    depth = 0
    for byte in text:
        if byte == 0x5B:
            depth += 1
            if depth > 32:
                break
        elif byte not in _BLANKS:
            break
    return depth


def _not_nested(shape: Sequence[int], tensor: str) -> ServingError:
    return ServingError(
        Status.INVALID_ARGUMENT,
        f"the data of tensor {tensor!r} are not nested as its shape {list(shape)}. "
        "Fix: send a flat array in row-major order, or correct the shape",
    )


def elements_of(tensor: InferTensor) -> list[Any]:
    """Return the elements of an output as JSON has them, flat in row-major order.

    Raises
    ------
    ServingError
        JSON has no form for the datatype or for a value: NaN, an infinity, bytes that are not UTF-8.
    """
    datatype = DATATYPES[tensor.datatype]
    if datatype.only_raw:
        raise _only_binary(tensor, f"is {datatype.name}, which JSON has no form for")
    if datatype.is_bytes:
        try:
            return [bytes(one).decode() for one in tensor.data.ravel()]
        except UnicodeDecodeError:
            raise _only_binary(tensor, "has bytes that are not UTF-8") from None
    array = tensor.data.ravel()
    if datatype.dtype.kind == "f" and not np.isfinite(array).all():
        raise _only_binary(tensor, "has NaN or an infinity, which JSON has no form for")
    found: list[Any] = array.tolist()
    return found


def _only_binary(tensor: InferTensor, reason: str) -> NoJsonFormError:
    return NoJsonFormError(
        Status.INVALID_ARGUMENT,
        f"output {tensor.name!r} {reason}. Fix: ask for it with the parameter binary_data true, or for all with "
        "binary_data_output true",
    )


def reason_of(error: BaseException) -> str:
    """Return why JSON was refused, in one short sentence without a full stop."""
    text = str(error) or type(error).__name__
    return text.rstrip(".")[:200]
