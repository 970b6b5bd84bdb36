# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""REST bodies beside requests: elements of tensors in JSON, responses, errors, and the side of the client."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.serving.messages import InferResponse, InferTensor, ServingError, Status
from xpuruntime.serving.protocol.datatypes import (
    DATATYPES,
    Datatype,
    array_of_elements,
    array_of_pieces,
    array_of_raw,
    checked_shape,
    datatype_named,
    raw_of,
    refuse_duplicates,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xpuruntime.serving.messages import InferRequest
    from xpuruntime.serving.protocol.datatypes import Items
    from xpuruntime.serving.protocol.rest_request import RestRequest


class NoJsonFormError(ServingError):
    """A tensor that JSON cannot hold: its datatype, NaN, an infinity, or bytes that are not UTF-8."""


_BLANKS = b" \t\r\n"


def array_of_json(
    datatype: Datatype, shape: tuple[int, ...], text: bytes | memoryview, tensor: str, items: Items | None = None
) -> NDArray[Any]:
    """Return the array of a tensor's ``data``, which is well-formed JSON."""
    if datatype.only_raw:
        raise NoJsonFormError(
            Status.INVALID_ARGUMENT,
            f"tensor {tensor!r} is {datatype.name}, which JSON has no form for. "
            "Fix: send it with the binary extension (binary_data_size)",
        )
    depth = _depth(text)
    rank = shape.index(0) + 1 if 0 in shape else len(shape)  # nothing is nested in what is empty
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
        if any(len(element) != dim for element in flat):
            raise _not_nested(shape, tensor)
        flat = list(itertools.chain.from_iterable(flat))
    return [element.encode() for element in flat]


def _numbers(
    datatype: Datatype, text: bytes, depth: int, shape: Sequence[int], tensor: str
) -> Iterator[list[bool] | list[int] | list[float]]:
    """Return the numbers in JSON that was checked, in pieces: nothing else runs while one is read."""
    if depth == 0:
        text = b"[" + text + b"]"
    if depth > 1:
        pieces = (text[at : at + _PIECE_BYTES] for at in range(0, len(text), _PIECE_BYTES))
        structure = b"".join([piece.translate(None, _NO_STRUCTURE) for piece in pieces])
        empty = shape[depth - 1] == 0
        if structure != _structure_of(shape[:depth], len(structure)) or (empty and text.translate(None, _NOTHING)):
            raise _not_nested(shape, tensor)
        if empty:
            return
    elif text.find(b"[", 1) > 0:
        raise _not_nested(shape, tensor)
    decoder = _decoder(datatype.dtype.kind, 1)
    at = 0
    while at < len(text):
        end = text.find(b",", at + _PIECE_BYTES)
        end = len(text) if end < 0 else end
        yield decoder.decode(b"[" + text[at:end].translate(None, b"[]") + b"]")
        at = end + 1


def _structure_of(shape: Sequence[int], length: int) -> bytes:
    sizes = itertools.accumulate(reversed(shape), lambda inner, dim: 2 + dim * inner + max(dim - 1, 0), initial=0)
    if max(sizes) > length:
        return b""
    structure = b""
    for dim in reversed(shape):
        structure = b"[" + (structure + b",") * max(dim - 1, 0) + structure * min(dim, 1) + b"]"
    return structure


#: Bytes of JSON that are looked through or decoded at a time, and what its structure is without.
_PIECE_BYTES = 32 << 10
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))
_NOTHING = b"[]," + _BLANKS
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
    """Return the elements of an output as JSON has them, flat in row-major order."""
    datatype = DATATYPES[tensor.datatype]
    if datatype.only_raw:
        raise _only_binary(tensor, f"is {datatype.name}, which JSON has no form for")
    if datatype.is_bytes:
        try:
            return [bytes(element).decode() for element in tensor.data.ravel()]
        except UnicodeDecodeError:
            raise _only_binary(tensor, "has bytes that are not UTF-8") from None
    array = tensor.data.ravel()
    if datatype.dtype.kind == "f" and not np.isfinite(array).all():
        raise _only_binary(tensor, "has NaN or an infinity, which JSON has no form for")
    elements: list[Any] = array.tolist()
    return elements


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


_ENCODER = msgspec.json.Encoder()
#: Elements of an output that are encoded at a time: between them, other threads run.
_PIECE_ELEMENTS = 4 << 10


@dataclass(slots=True)
class RestResponse:
    """A response as bytes."""

    chunks: Sequence[bytes | memoryview]
    json_length: int | None = None

    @property
    def length(self) -> int:
        """Length of the whole body in bytes."""
        return sum(map(len, self.chunks))


def write_response(response: InferResponse, rest_request: RestRequest) -> RestResponse:
    """Return a response as bytes, with the outputs in binary that were asked for so."""
    outputs: list[dict[str, Any]] = []
    raws: list[bytes | memoryview] = []
    long: list[InferTensor] = []
    for tensor in response.outputs:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if rest_request.binary_by_default or tensor.name in rest_request.binary:
            raw = raw_of(tensor)
            raws.append(raw)
            entry["parameters"] = {**tensor.parameters, "binary_data_size": len(raw)}
        else:
            if tensor.parameters:
                entry["parameters"] = tensor.parameters
            if len(list(itertools.islice(_pieces_of(tensor), 2))) > 1:
                long.append(tensor)
                entry["data"] = _LONG
            else:
                entry["data"] = elements_of(tensor)
        outputs.append(entry)
    written: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        written["id"] = response.id
    if response.parameters:
        written["parameters"] = response.parameters
    written["outputs"] = outputs
    head = _ENCODER.encode(written)
    chunks = _with_data(head, long, rest_request.most) if long else [head]
    return RestResponse([*chunks, *raws], sum(map(len, chunks)) if raws else None)


#: Stands for the data of a long output; JSON has no such byte.
_LONG = msgspec.Raw(b"\0")


def _with_data(head: bytes, tensors: Sequence[InferTensor], most: int) -> list[bytes]:
    """Return the JSON of a response with the data of its long outputs, which are encoded in pieces and never joined."""
    begin, *parts = head.split(b"\0")
    chunks, length = [begin], len(head)
    for tensor, rest in zip(tensors, parts, strict=True):
        for at, data in enumerate(_pieces_of(tensor)):
            piece = _ENCODER.encode(elements_of(replace(tensor, data=data)))
            chunks.append((b"," if at else b"[") + piece[1:-1])
            length += len(chunks[-1])
            if length > most:
                raise _only_binary(tensor, f"makes the JSON of the response longer than {most} bytes")
        chunks.append(b"]" + rest)
    return chunks


def _pieces_of(tensor: InferTensor) -> Iterator[NDArray[Any]]:
    """Return the elements of an output, as many at a time as are encoded without a break."""
    flat = tensor.data.ravel()
    if tensor.datatype != "BYTES":
        yield from (flat[at : at + _PIECE_ELEMENTS] for at in range(0, flat.size, _PIECE_ELEMENTS))
        return
    begin = size = 0
    for at, element in enumerate(flat, 1):
        size += len(element)
        if size > _PIECE_BYTES or at - begin == _PIECE_ELEMENTS:
            yield flat[begin:at]
            begin, size = at, 0
    if begin < flat.size:
        yield flat[begin:]


def error_body(message: str) -> bytes:
    """Return the body of an error."""
    return _ENCODER.encode({"error": message})


# Optional keys may be null, as KServe writes those that have no value; the protocol leaves them out.
class _Output(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: msgspec.Raw = msgspec.Raw()


class _Response(msgspec.Struct):
    model_name: str
    outputs: list[_Output]
    model_version: str | None = None
    id: str | None = None
    parameters: dict[str, Any] | None = None


_DECODER = msgspec.json.Decoder(_Response)


def write_request(request: InferRequest, *, binary: bool = False, nested: bool = False) -> tuple[bytes, int | None]:
    """Return the body of a request, and the length of its JSON where tensors follow it."""
    inputs: list[dict[str, Any]] = []
    raws: list[bytes | memoryview] = []
    for tensor in request.inputs:
        entry: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype}
        parameters = dict(tensor.parameters)
        if binary:
            raws.append(raw_of(tensor))
            parameters["binary_data_size"] = len(raws[-1])
        elif nested:
            entry["data"] = _nested(elements_of(tensor), tensor.shape)
        else:
            entry["data"] = elements_of(tensor)
        if parameters:
            entry["parameters"] = parameters
        inputs.append(entry)
    written: dict[str, Any] = {"inputs": inputs}
    if request.id:
        written["id"] = request.id
    outputs = [
        {"name": output.name, "parameters": {**output.parameters, "binary_data": binary}} for output in request.outputs
    ]
    if outputs:
        written["outputs"] = outputs if binary else [{"name": output["name"]} for output in outputs]
    parameters = dict(request.parameters)
    if binary and not outputs:
        parameters["binary_data_output"] = True
    if parameters:
        written["parameters"] = parameters
    head = msgspec.json.encode(written)
    return b"".join([head, *raws]), len(head) if binary else None


def _nested(flat: list[Any], shape: tuple[int, ...]) -> Any:
    if len(shape) < 2:
        return flat
    step = len(flat) // shape[0] if shape[0] else 0
    return [_nested(flat[at * step : (at + 1) * step], shape[1:]) for at in range(shape[0])]


def read_response(body: bytes, length: int | None = None) -> InferResponse:
    """Return the response in a body, whose JSON has this length where tensors follow it."""
    view = memoryview(body)
    if length is not None and not 0 <= length <= len(body):
        raise _wrong(f"Inference-Header-Content-Length is {length}, and the body has {len(body)} bytes")
    try:
        read = _DECODER.decode(body if length is None else view[:length])
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise _wrong(reason_of(error)) from None
    refuse_duplicates((output.name for output in read.outputs), "output")
    at = len(body) if length is None else length
    outputs = []
    for output in read.outputs:
        datatype = datatype_named(output.datatype, output.name)
        shape = checked_shape(output.shape, output.name)
        parameters = output.parameters or {}
        size = parameters.pop("binary_data_size", None)
        if size is None:
            array = array_of_json(datatype, shape, memoryview(output.data), output.name)
        else:
            if type(size) is not int or not 0 <= size <= len(body) - at:
                raise _wrong(f"output {output.name!r} has the binary_data_size {size!r}, and {len(body) - at} are left")
            array = array_of_raw(datatype, shape, view[at : at + size], output.name)
            at += size
        outputs.append(InferTensor(output.name, datatype.name, shape, array, parameters))
    if at != len(body):
        raise _wrong(f"{len(body) - at} bytes follow its outputs")
    return InferResponse(read.model_name, read.model_version or "", outputs, read.id or "", read.parameters or {})


def _wrong(reason: str) -> ServingError:
    return ServingError(
        Status.INVALID_ARGUMENT, f"the response is none of the protocol: {reason}. Fix: ask the server's developers"
    )
