# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Encoding of ModelInferRequest and ModelInferResponse."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from xpuruntime.serving.protocol.datatypes import datatype_named, raw_of
from xpuruntime.serving.protocol.wire import FIXED32, FIXED64, LENGTH, VARINT, varint, varints_of
from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.serving.messages import InferRequest, InferResponse, InferTensor, Parameter

__all__ = ["CONTENTS", "write_infer_request", "write_infer_response", "write_stream_response"]

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

_DOUBLE = struct.Struct("<d")


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
    _put(parts, 2, b"".join((response, *last)))
    return b"".join(parts)


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
