# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ModelInferRequest and ModelInferResponse: decoded without a copy, with bounds, and encoded."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.serving.messages import InferRequest, InferResponse, InferTensor, RequestedOutput, ServingError, Status
from xpuruntime.serving.protocol.datatypes import (
    ITEMS_OF_TENSOR,
    Datatype,
    Items,
    array_of_elements,
    array_of_raw,
    checked_shape,
    datatype_named,
    deadline_of,
    priority_of,
    raw_of,
    refuse_duplicates,
    refuse_extensions,
)
from xpuruntime.serving.protocol.wire import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    fields_of,
    malformed,
    packed_array,
    packed_varints,
    signed,
    text_of,
    varint,
    varint_list,
    varints_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xpuruntime.serving.messages import Parameter

#: Field of ``InferTensorContents`` to its number, and the wire type of elements that are not packed.
CONTENTS = {
    "bool_contents": (1, VARINT),
    "int_contents": (2, VARINT),
    "int64_contents": (3, VARINT),
    "uint_contents": (4, VARINT),
    "uint64_contents": (5, VARINT),
    "fp32_contents": (6, FIXED32),
    "fp64_contents": (7, FIXED64),
    "bytes_contents": (8, LENGTH),
}

#: Fields of a message of which the names alone are read, at most.
_FEW = 4096
_DOUBLE = struct.Struct("<d")


class _Parts:
    """The fields of a request or response, before its tensors are made."""

    __slots__ = ("id", "model", "outputs", "parameters", "raw", "tensors", "version")

    def __init__(self) -> None:
        self.model = self.version = self.id = ""
        self.parameters: dict[str, Parameter] = {}
        self.tensors: list[_TensorParts] = []
        self.outputs: list[RequestedOutput] = []
        self.raw: list[memoryview] = []


class _TensorParts:
    __slots__ = ("contents", "datatype", "name", "parameters", "shape")

    def __init__(self) -> None:
        self.name = self.datatype = ""
        self.shape: list[int] = []
        self.parameters: dict[str, Parameter] = {}
        self.contents: list[memoryview] = []


def read_infer_request(message: bytes | memoryview, now: float | None = None, *, inline: bool = False) -> InferRequest:
    """Return the request in a message. Arrays of raw contents are views of it."""
    items = Items(inline=inline)
    parts = _parts(memoryview(message), items, raw_field=7, outputs_field=6)
    refuse_duplicates((tensor.name for tensor in parts.tensors), "input")
    refuse_duplicates((output_.name for output_ in parts.outputs), "output")
    refuse_extensions(parts.parameters, "the request")
    for tensor in parts.tensors:
        refuse_extensions(tensor.parameters, f"the input {tensor.name!r}")
    for output in parts.outputs:
        refuse_extensions(output.parameters, f"the output {output.name!r}")
    return InferRequest(
        parts.model,
        _tensors(parts, "raw_input_contents", items),
        parts.version,
        parts.id,
        parts.outputs,
        parts.parameters,
        deadline_of(parts.parameters, now),
        priority_of(parts.parameters),
    )


def read_names(message: bytes) -> InferRequest:
    """Return model, version and id of a message that is refused, with no inputs, and none where it is malformed."""
    names = {1: "", 2: "", 3: ""}
    with contextlib.suppress(ServingError):
        for number, wire, value in fields_of(memoryview(message), Items(_FEW)):
            if number in names and wire == LENGTH:
                names[number] = text_of(value)
    return InferRequest(names[1], (), names[2], names[3])


def read_infer_response(message: bytes | memoryview) -> InferResponse:
    """Return the response in a message, as a client reads it. Raises as `read_infer_request`."""
    parts = _parts(memoryview(message), None, raw_field=6, outputs_field=0)
    refuse_duplicates((tensor.name for tensor in parts.tensors), "output")
    outputs = _tensors(parts, "raw_output_contents", None)
    return InferResponse(parts.model, parts.version, outputs, parts.id, parts.parameters)


def read_stream_response(message: bytes | memoryview) -> tuple[str, InferResponse | None]:
    """Return the error of a ``ModelStreamInferResponse``, empty where there is none, and its response."""
    error = ""
    response = None
    for number, wire, value in fields_of(memoryview(message)):
        if number == 1 and wire == LENGTH:
            error = text_of(value)
        elif number == 2 and wire == LENGTH:
            response = read_infer_response(value)
    return error, response


def _parts(message: memoryview, items: Items | None, *, raw_field: int, outputs_field: int) -> _Parts:
    parts = _Parts()
    # Nearly every field of a request is a tensor, by its name or raw.
    for number, wire, value in fields_of(message, items, weight=ITEMS_OF_TENSOR):
        if not 0 < number <= 7:
            continue
        if wire != LENGTH:
            raise malformed(f"field {number} has the wire type {wire}")
        if number == raw_field:
            parts.raw.append(value)
        elif number == 1:
            parts.model = text_of(value)
        elif number == 2:
            parts.version = text_of(value)
        elif number == 3:
            parts.id = text_of(value)
        elif number == 4:
            _put_parameter(parts.parameters, value, items)
        elif number == 5:
            parts.tensors.append(_tensor_parts(value, items))
        elif number == outputs_field:
            parts.outputs.append(_requested(value, items))
    return parts


def _tensor_parts(message: memoryview, items: Items | None) -> _TensorParts:
    parts = _TensorParts()
    for number, wire, value in fields_of(message, items):
        if number == 3:
            if wire == VARINT:
                parts.shape.append(signed(value))
            elif wire == LENGTH:
                if items is not None:
                    items.take(len(value))
                parts.shape += [signed(size) for size in varint_list(value)]
            else:
                raise malformed(f"a shape has the wire type {wire}")
        elif number > 5:
            continue
        elif wire != LENGTH:
            raise malformed(f"field {number} of a tensor has the wire type {wire}")
        elif number == 1:
            parts.name = text_of(value)
        elif number == 2:
            parts.datatype = text_of(value)
        elif number == 4:
            _put_parameter(parts.parameters, value, items)
        elif len(value):  # some servers and clients send contents without any beside raw ones
            parts.contents.append(value)
    return parts


def _requested(message: memoryview, items: Items | None) -> RequestedOutput:
    name = ""
    parameters: dict[str, Parameter] = {}
    for number, wire, value in fields_of(message, items):
        if number > 2:
            continue
        if wire != LENGTH:
            raise malformed(f"field {number} of a requested output has the wire type {wire}")
        if number == 1:
            name = text_of(value)
        else:
            _put_parameter(parameters, value, items)
    return RequestedOutput(name, parameters)


def _put_parameter(parameters: dict[str, Parameter], entry: memoryview, items: Items | None) -> None:
    key = ""
    stated: Parameter | None = None
    for number, wire, value in fields_of(entry, items):
        if number > 2:
            continue
        if wire != LENGTH:
            raise malformed(f"a parameter has the wire type {wire}")
        if number == 1:
            key = text_of(value)
        else:
            stated = _parameter(value, items, stated)
    if stated is None:
        raise ServingError(
            Status.INVALID_ARGUMENT, f"the parameter {key!r} has no value. Fix: set one field of InferParameter"
        )
    parameters[key] = stated


#: Fields of ``InferParameter``, and their wire types.
_PARAMETER_WIRES = {1: VARINT, 2: VARINT, 3: LENGTH, 4: FIXED64, 5: VARINT}


def _parameter(message: memoryview, items: Items | None, stated: Parameter | None) -> Parameter | None:
    for number, wire, value in fields_of(message, items):
        if number not in _PARAMETER_WIRES:
            continue
        if wire != _PARAMETER_WIRES[number]:
            raise malformed(f"field {number} of a parameter has the wire type {wire}")
        if number == 1:
            stated = value != 0
        elif number == 2:
            stated = signed(value)
        elif number == 3:
            stated = text_of(value)
        elif number == 4:
            (stated,) = _DOUBLE.unpack(value.to_bytes(8, "little"))
        else:
            stated = value
    return stated


def _tensors(parts: _Parts, raw_field: str, items: Items | None) -> list[InferTensor]:
    typed = [tensor.name for tensor in parts.tensors if tensor.contents]
    if parts.raw and typed:
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"tensor {typed[0]!r} has contents, and the message has {raw_field}. Fix: give one of them, for all",
        )
    if parts.raw and len(parts.raw) != len(parts.tensors):
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"{raw_field} has {len(parts.raw)} elements for {len(parts.tensors)} tensors. Fix: give one for each",
        )
    tensors = []
    for at, part in enumerate(parts.tensors):
        datatype = datatype_named(part.datatype, part.name)
        shape = checked_shape(part.shape, part.name)
        if parts.raw:
            array = array_of_raw(datatype, shape, parts.raw[at], part.name, items)
        else:
            array = _typed_array(datatype, shape, part, items)
        tensors.append(InferTensor(part.name, datatype.name, shape, array, part.parameters))
    return tensors


_NAMES = {number: name for name, (number, _) in CONTENTS.items()}


def _typed_array(datatype: Datatype, shape: tuple[int, ...], tensor: _TensorParts, items: Items | None) -> NDArray[Any]:
    if datatype.only_raw:
        if not tensor.contents and math.prod(shape) == 0:
            return np.empty(shape, datatype.dtype)
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"tensor {tensor.name!r} is {datatype.name}, which typed contents have no field for. "
            "Fix: send raw_input_contents",
        )
    if items is not None:
        items.convert(sum(map(len, tensor.contents)))
    field, own = CONTENTS[datatype.contents]
    pieces: list[Any] = []
    weight = 1 if datatype.is_bytes else ITEMS_OF_TENSOR  # numbers are packed: one field has them all
    for contents in tensor.contents:
        for number, wire, value in fields_of(contents, items, weight=weight):
            if number not in _NAMES:
                continue
            if number != field:
                raise ServingError(
                    Status.INVALID_ARGUMENT,
                    f"tensor {tensor.name!r} is {datatype.name} and has {_NAMES[number]}. "
                    f"Fix: send {datatype.contents}",
                )
            if wire not in (own, LENGTH):
                raise malformed(f"{datatype.contents} have the wire type {wire}")
            pieces.append(bytes(value) if datatype.is_bytes else _piece(field, wire, value))
    if datatype.is_bytes:
        return array_of_elements(datatype, shape, pieces, tensor.name)
    elements = np.concatenate(pieces) if pieces else np.empty(0, datatype.dtype)
    return array_of_elements(datatype, shape, elements, tensor.name)


def _piece(field: int, wire: int, value: Any) -> NDArray[Any]:
    """Return the elements in one field of contents: packed, or a single one."""
    if field in (6, 7):
        form = "<f4" if field == 6 else "<f8"
        if wire == LENGTH:
            return packed_array(value, form)
        return np.array([value], "<u4" if field == 6 else "<u8").view(form)
    values = packed_varints(value) if wire == LENGTH else np.array([value], np.uint64)
    if field == 1:
        return values.astype(np.bool_)
    if field == 2:
        return values.astype(np.uint32).view(np.int32)
    if field == 3:
        return values.view(np.int64)
    return values.astype(np.uint32) if field == 4 else values


def write_infer_response(response: InferResponse) -> bytes:
    """Return the message of a response, with raw contents."""
    parts: list[bytes | memoryview] = []
    _put_head(parts, response.model, response.version, response.id, response.parameters)
    for tensor in response.outputs:
        _put(parts, 5, _tensor_message(tensor))
    for tensor in response.outputs:
        _put(parts, 6, raw_of(tensor))
    return b"".join(parts)


def write_infer_request(request: InferRequest, *, raw: bool = True) -> bytes:
    """Return the message of a request, as a client sends it, with raw or typed contents."""
    parts: list[bytes | memoryview] = []
    _put_head(parts, request.model, request.version, request.id, request.parameters)
    for tensor in request.inputs:
        _put(parts, 5, _tensor_message(tensor, contents=not raw))
    for output in request.outputs:
        inner: list[bytes | memoryview] = []
        _put_text(inner, 1, output.name)
        _put_parameters(inner, 2, output.parameters)
        _put(parts, 6, b"".join(inner))
    if raw:
        for tensor in request.inputs:
            _put(parts, 7, raw_of(tensor))
    return b"".join(parts)


def write_stream_response(response: bytes = b"", error: str = "", id: str = "") -> bytes:
    """Return a ``ModelStreamInferResponse`` of the message of a response, or of an error and the id of its request.

    Each is the last one of its request, and says so as Triton does.
    """
    parts: list[bytes | memoryview] = []
    if error:
        _put_text(parts, 1, error)
        inner: list[bytes | memoryview] = []
        _put_text(inner, 3, id)
        response = b"".join(inner)
    last: list[bytes | memoryview] = []
    _put_parameters(last, 4, {"triton_final_response": True})
    length = len(response) + sum(map(len, last))
    return b"".join((*parts, bytes((2 << 3 | LENGTH,)), varint(length), response, *last))


def _put(parts: list[bytes | memoryview], number: int, data: bytes | memoryview) -> None:
    parts += (bytes((number << 3 | LENGTH,)), varint(len(data)), data)


def _put_text(parts: list[bytes | memoryview], number: int, text: str) -> None:
    if text:
        _put(parts, number, text.encode())


def _put_head(
    parts: list[bytes | memoryview], model: str, version: str, id: str, parameters: Mapping[str, Parameter]
) -> None:
    _put_text(parts, 1, model)
    _put_text(parts, 2, version)
    _put_text(parts, 3, id)
    _put_parameters(parts, 4, parameters)


def _put_parameters(parts: list[bytes | memoryview], number: int, parameters: Mapping[str, Parameter]) -> None:
    for name, value in parameters.items():
        entry: list[bytes | memoryview] = []
        _put_text(entry, 1, name)
        _put(entry, 2, _parameter_message(value))
        _put(parts, number, b"".join(entry))


def _parameter_message(value: Parameter) -> bytes:
    if isinstance(value, bool):
        return bytes((1 << 3 | VARINT, value))
    if isinstance(value, int):
        number = 2 if value < 2**63 else 5
        return bytes((number << 3 | VARINT,)) + varint(value)
    if isinstance(value, str):
        text = value.encode()
        return bytes((3 << 3 | LENGTH,)) + varint(len(text)) + text
    return bytes((4 << 3 | FIXED64,)) + _DOUBLE.pack(value)


def _tensor_message(tensor: InferTensor, *, contents: bool = False) -> bytes:
    parts: list[bytes | memoryview] = []
    _put_text(parts, 1, tensor.name)
    _put_text(parts, 2, tensor.datatype)
    if tensor.shape:
        _put(parts, 3, _packed_shape(tensor.shape))
    _put_parameters(parts, 4, tensor.parameters)
    if contents:
        _put(parts, 5, _contents_message(tensor))
    return b"".join(parts)


def _packed_shape(shape: Sequence[int]) -> bytes:
    return b"".join(map(varint, shape))


def _contents_message(tensor: InferTensor) -> bytes:
    datatype = datatype_named(tensor.datatype, tensor.name)
    if datatype.only_raw:
        raise ServingError(
            Status.INVALID_ARGUMENT, f"tensor {tensor.name!r} is {datatype.name}, which is sent raw. Fix: raw=True"
        )
    field, _ = CONTENTS[datatype.contents]
    parts: list[bytes | memoryview] = []
    if datatype.is_bytes:
        for element in tensor.data.ravel():
            _put(parts, field, element)
    elif tensor.data.size:
        array = np.asarray(tensor.data, datatype.dtype)
        _put(parts, field, raw_of(tensor) if field in (6, 7) else varints_of(array))
    return b"".join(parts)
