# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Requests of the REST protocol: JSON, with tensors in it or behind it (the binary extension), or one raw tensor."""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np

from xpuruntime.serving.messages import InferRequest, InferTensor, RequestedOutput, ServingError, Status
from xpuruntime.serving.protocol.datatypes import (
    DATATYPES,
    Datatype,
    Items,
    array_of_elements,
    array_of_raw,
    check_bools,
    checked_shape,
    datatype_named,
    deadline_of,
    priority_of,
    refuse_duplicates,
    refuse_extensions,
)
from xpuruntime.serving.protocol.rest import array_of_json, reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.serving.messages import Parameter

#: Optional keys and values of parameters may be null, as other servers and clients of the protocol write them.
if TYPE_CHECKING:
    _Text: TypeAlias = str
else:
    _Text = str | None


class _Counted(threading.local):
    """The items of the request that this thread decodes: structures count themselves as they are made."""

    items = Items()


_COUNTED = _Counted()


class _Input(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    shape: msgspec.Raw
    datatype: str
    parameters: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()

    def __post_init__(self) -> None:
        _COUNTED.items.take_tensor()
        if bytes(memoryview(self.data)[:5]) == b"null":
            self.data = msgspec.Raw()


class _Output(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    parameters: msgspec.Raw = msgspec.Raw()

    def __post_init__(self) -> None:
        _COUNTED.items.take_tensor()


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    inputs: list[_Input]
    id: _Text = ""
    parameters: msgspec.Raw = msgspec.Raw()
    outputs: list[_Output] | None = None
    model_name: _Text = ""
    model_version: _Text = ""

    def __post_init__(self) -> None:
        self.id = self.id or ""
        self.model_name, self.model_version = self.model_name or "", self.model_version or ""


_DECODER = msgspec.json.Decoder(_Request)
_SHAPE = msgspec.json.Decoder(list[int])
_PARAMETERS = msgspec.json.Decoder(dict[str, bool | int | float | str | None] | None)
#: Bytes of JSON of a shape, and of the parameters of a request or tensor, at most.
_LONGEST_SHAPE, _LONGEST_PARAMETERS = 4 << 10, 64 << 10


def _decoded(decoder: msgspec.json.Decoder[Any], text: msgspec.Raw, longest: int, where: str) -> Any:
    if len(view := memoryview(text)) > longest:
        raise ServingError(
            Status.INVALID_ARGUMENT, f"{where} have {len(view)} bytes of JSON. Fix: at most {longest} are decoded"
        )
    try:
        return decoder.decode(view)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise _wrong(f"{where}: {reason_of(error)}") from None


def _parameters(text: msgspec.Raw, where: str) -> dict[str, Parameter]:
    if not len(memoryview(text)):
        return {}
    read = _decoded(_PARAMETERS, text, _LONGEST_PARAMETERS, f"the parameters of {where}") or {}
    _COUNTED.items.take(len(read))
    parameters = {name: value for name, value in read.items() if value is not None}
    refuse_extensions(parameters, where)
    return parameters


@dataclass(slots=True)
class RestRequest:
    """A request, and how its outputs are sent."""

    request: InferRequest
    binary: frozenset[str] = frozenset()
    binary_by_default: bool = False
    #: Bytes of JSON that the response may have.
    most: int = sys.maxsize


def header_length(stated: str | None, body: int) -> int | None:
    """Return how long the JSON is that a body of so many bytes begins with; `None` where it is all of it."""
    if stated is None:
        return None
    if not (stated.isascii() and stated.isdecimal() and len(stated) <= 18):
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"the header Inference-Header-Content-Length is {stated[:40]!r}. "
            "Fix: state the length of the JSON in bytes, a whole number",
        )
    length = int(stated)
    if length > body:
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"the header Inference-Header-Content-Length is {length}, and the body has {body} bytes. "
            "Fix: state the length of the JSON alone, not compressed",
        )
    return length


def check_json(stated: str | None, most: int, fix: str) -> None:
    """Raise where the stated length of the JSON that a body begins with is more than it may be."""
    if stated is not None and stated.isascii() and stated.isdecimal() and len(stated) <= 18 and int(stated) > most:
        raise ServingError(Status.TOO_LARGE, f"the JSON of the request is longer than {most} bytes. Fix: {fix}")


def read_request(
    body: bytes | memoryview,
    model: str,
    version: str = "",
    length: int | None = None,
    now: float | None = None,
    *,
    inline: bool = False,
) -> RestRequest:
    """Return the request in a body."""
    view = memoryview(body)
    key = None
    if length is not None and length <= _LONGEST_HEAD:
        key = (bytes(view[:length]), model, version)
        form = _FORMS.get(key)
        if form is not None and len(body) - length == form.size:
            return form.request(body, length, now)
    items = _COUNTED.items = Items(inline=inline)
    items.convert(len(body) if length is None else length)
    try:
        read = _DECODER.decode(body if length is None else view[:length])
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise _wrong(reason_of(error)) from None
    _check_model(read, model, version)
    refuse_duplicates((input_.name for input_ in read.inputs), "input")
    named = read.outputs or []
    refuse_duplicates((output.name for output in named), "output")
    parameters = _parameters(read.parameters, "the request")
    binary_only = all(len(memoryview(input_.data)) == 0 for input_ in read.inputs)
    inputs = _inputs(read.inputs, view[len(body) if length is None else length :], items)
    by_default = _flag(parameters.pop("binary_data_output", False), "binary_data_output", "the request")
    outputs, binary = _outputs(named, by_default)
    request = RestRequest(
        InferRequest(
            model,
            inputs,
            version or read.model_version,
            read.id,
            outputs,
            parameters,
            deadline_of(parameters, now),
            priority_of(parameters),
        ),
        binary,
        by_default and not outputs,
    )
    if key is not None and binary_only:
        if len(_FORMS) >= _MOST_FORMS:
            _FORMS.clear()
        _FORMS[key] = _Form(request, len(body) - len(key[0]))
    return request


class _Form:
    """A request whose tensors are all binary, to be read again with other values."""

    __slots__ = ("_asked", "_tensors", "size")

    def __init__(self, rest_request: RestRequest, size: int) -> None:
        #: Without its tensors, which are views of the body of a request that is answered some time.
        self._asked, self.size = replace(rest_request, request=replace(rest_request.request, inputs=())), size
        #: Each tensor with its datatype, number of elements and place behind the JSON.
        self._tensors: list[tuple[InferTensor, Datatype, int, int]] = []
        at = 0
        for input_ in rest_request.request.inputs:
            datatype = DATATYPES[input_.datatype]
            if datatype.is_bytes:  # its size says nothing of its shape, and is not known
                self.size = -1
                return
            count = math.prod(input_.shape)
            tensor = InferTensor(input_.name, input_.datatype, input_.shape, None, input_.parameters)
            self._tensors.append((tensor, datatype, count, at))
            at += count * datatype.size

    def request(self, body: bytes | memoryview, begin: int, now: float | None) -> RestRequest:
        rest_request = self._asked
        old = rest_request.request
        inputs = []
        for tensor, datatype, count, at in self._tensors:
            if datatype.name == "BOOL":
                check_bools(memoryview(body)[begin + at : begin + at + count], tensor.name)
            array = np.frombuffer(body, datatype.dtype, count, begin + at).reshape(tensor.shape)
            inputs.append(InferTensor(tensor.name, tensor.datatype, tensor.shape, array, tensor.parameters))
        deadline = deadline_of(old.parameters, now) if old.parameters else None
        request = InferRequest(
            old.model, inputs, old.version, old.id, old.outputs, old.parameters, deadline, old.priority
        )
        return RestRequest(request, rest_request.binary, rest_request.binary_by_default)


#: Forms by JSON, model and version, for all threads; the longest JSON that has one, and how many there are.
_FORMS: dict[tuple[bytes, str, str], _Form] = {}
_LONGEST_HEAD, _MOST_FORMS = 2048, 256


def _check_model(read: _Request, model: str, version: str) -> None:
    for name, stated, path in (("model_name", read.model_name, model), ("model_version", read.model_version, version)):
        if stated and path and stated != path:
            raise ServingError(
                Status.INVALID_ARGUMENT,
                f"the body has {name} {stated!r}, and the path {path!r}. Fix: leave it out of the body",
            )


def _inputs(read: list[_Input], binary: memoryview, items: Items) -> list[InferTensor]:
    tensors = []
    at = 0
    for raw_input in read:
        datatype = datatype_named(raw_input.datatype, raw_input.name)
        shape = checked_shape(
            _decoded(_SHAPE, raw_input.shape, _LONGEST_SHAPE, f"the dimensions of {raw_input.name!r}"), raw_input.name
        )
        parameters = _parameters(raw_input.parameters, f"the input {raw_input.name!r}")
        size = parameters.pop("binary_data_size", None)
        data = memoryview(raw_input.data)
        if size is None:
            if not data:
                raise ServingError(
                    Status.INVALID_ARGUMENT,
                    f"the input {raw_input.name!r} has no data. Fix: give data, or binary_data_size and the bytes",
                )
            array = array_of_json(datatype, shape, data, raw_input.name, items)
        else:
            if data:
                raise ServingError(
                    Status.INVALID_ARGUMENT,
                    f"the input {raw_input.name!r} has both data and binary_data_size. Fix: give one of them",
                )
            length = _size(size, raw_input.name, len(binary) - at)
            array = array_of_raw(datatype, shape, binary[at : at + length], raw_input.name, items)
            at += length
        tensors.append(InferTensor(raw_input.name, datatype.name, shape, array, parameters))
    if at != len(binary):
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"{len(binary) - at} bytes follow the JSON and the tensors whose binary_data_size it states. "
            "Fix: state the size of each binary input, and Inference-Header-Content-Length",
        )
    return tensors


def _size(stated: Any, name: str, left: int) -> int:
    if isinstance(stated, bool) or not isinstance(stated, int) or stated < 0:
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"the input {name!r} has the binary_data_size {stated!r}. Fix: state its length in bytes",
        )
    if stated > left:
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"the input {name!r} has the binary_data_size {stated}, and {left} bytes are left behind the JSON. "
            "Fix: send all of its bytes, and state Inference-Header-Content-Length",
        )
    return stated


def _outputs(read: list[_Output], by_default: bool) -> tuple[list[RequestedOutput], frozenset[str]]:
    outputs, binary = [], []
    for raw_output in read:
        where = f"the output {raw_output.name!r}"
        parameters = _parameters(raw_output.parameters, where)
        if _flag(parameters.pop("binary_data", by_default), "binary_data", where):
            binary.append(raw_output.name)
        outputs.append(RequestedOutput(raw_output.name, parameters))
    return outputs, frozenset(binary)


def _wrong(reason: str) -> ServingError:
    return ServingError(
        Status.INVALID_ARGUMENT,
        f"the body is not a request of the protocol: {reason}. "
        'Fix: send {"inputs": [{"name": ..., "shape": [...], "datatype": ..., "data": [...]}]}',
    )


def _flag(stated: Any, name: str, where: str) -> bool:
    if not isinstance(stated, bool):
        raise ServingError(Status.INVALID_ARGUMENT, f"{where} has the parameter {name} {stated!r}. Fix: true or false")
    return stated


def read_raw_request(
    body: bytes, metadata: Mapping[str, Any], model: str, version: str = "", *, batched: bool
) -> RestRequest:
    """Return the request of a body that is the one input of a model: ``Inference-Header-Content-Length: 0``."""
    inputs = metadata["inputs"]
    if len(inputs) != 1:
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"a raw request is for models with one input, and {model!r} has {len(inputs)}. "
            "Fix: send JSON with binary_data_size, and its length as Inference-Header-Content-Length",
        )
    (input_,) = inputs
    datatype = DATATYPES[input_["datatype"]]
    shape = list(input_["shape"])
    if batched:
        shape[0] = 1
    free = [at for at, dim in enumerate(shape) if dim < 0]
    if len(free) > 1:
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"a raw request leaves one dimension free, and {input_['name']!r} of {model!r} has the shape "
            f"{list(input_['shape'])}. Fix: send JSON with the shape and binary_data_size",
        )
    if free:
        row = math.prod([dim for dim in shape if dim >= 0]) * datatype.size
        shape[free[0]] = 1 if datatype.is_bytes else len(body) // row if row else 0
    checked = checked_shape(shape, input_["name"])
    if datatype.is_bytes:  # the body is the one element, as it is
        array = array_of_elements(datatype, checked, [bytes(body)], input_["name"])
    else:
        array = array_of_raw(datatype, checked, memoryview(body), input_["name"])
    tensor = InferTensor(input_["name"], datatype.name, checked, array)
    return RestRequest(InferRequest(model, [tensor], version), binary_by_default=True)
