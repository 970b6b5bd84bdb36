# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The client's side of the REST protocol: requests as bytes, and responses as they are read back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.serving.messages import InferResponse, InferTensor
from xpuruntime.serving.protocol.datatypes import array_of_raw, checked_shape, datatype_named, raw_of
from xpuruntime.serving.protocol.json_data import array_of_json, elements_of, reason_of
from xpuruntime.serving.protocol.parameters import refuse_duplicates
from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from xpuruntime.serving.messages import InferRequest

__all__ = ["read_response", "write_request"]


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
    """Return the body of a request, and the length of its JSON where tensors follow it.

    Parameters
    ----------
    request : InferRequest
    binary : bool
        Send inputs in binary, and ask for outputs so.
    nested : bool
        Nest the data in JSON as the shape says, instead of flat.
    """
    inputs: list[dict[str, Any]] = []
    raws: list[bytes | memoryview] = []
    for tensor in request.inputs:
        one: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype}
        parameters = dict(tensor.parameters)
        if binary:
            raws.append(raw_of(tensor))
            parameters["binary_data_size"] = len(raws[-1])
        elif nested:
            one["data"] = _nested(elements_of(tensor), tensor.shape)
        else:
            one["data"] = elements_of(tensor)
        if parameters:
            one["parameters"] = parameters
        inputs.append(one)
    written: dict[str, Any] = {"inputs": inputs}
    if request.id:
        written["id"] = request.id
    outputs = [{"name": one.name, "parameters": {**one.parameters, "binary_data": binary}} for one in request.outputs]
    if outputs:
        written["outputs"] = outputs if binary else [{"name": one["name"]} for one in outputs]
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
    """Return the response in a body, whose JSON has this length where tensors follow it.

    Raises
    ------
    ServingError
        It is none of the protocol.
    """
    view = memoryview(body)
    if length is not None and not 0 <= length <= len(body):
        raise _wrong(f"Inference-Header-Content-Length is {length}, and the body has {len(body)} bytes")
    try:
        read = _DECODER.decode(body if length is None else view[:length])
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise _wrong(reason_of(error)) from None
    refuse_duplicates((one.name for one in read.outputs), "output")
    at = len(body) if length is None else length
    outputs = []
    for one in read.outputs:
        datatype = datatype_named(one.datatype, one.name)
        shape = checked_shape(one.shape, one.name)
        parameters = one.parameters or {}
        size = parameters.pop("binary_data_size", None)
        if size is None:
            array = array_of_json(datatype, shape, memoryview(one.data), one.name)
        else:
            if type(size) is not int or not 0 <= size <= len(body) - at:
                raise _wrong(f"output {one.name!r} has the binary_data_size {size!r}, and {len(body) - at} are left")
            array = array_of_raw(datatype, shape, view[at : at + size], one.name)
            at += size
        outputs.append(InferTensor(one.name, datatype.name, shape, array, parameters))
    if at != len(body):
        raise _wrong(f"{len(body) - at} bytes follow its outputs")
    return InferResponse(read.model_name, read.model_version or "", outputs, read.id or "", read.parameters or {})


def _wrong(reason: str) -> ServingError:
    return ServingError(
        Status.INVALID_ARGUMENT, f"the response is none of the protocol: {reason}. Fix: ask the server's developers"
    )
