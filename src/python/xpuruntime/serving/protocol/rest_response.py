# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Responses of the REST protocol: JSON, and behind it the outputs that were asked for in binary; errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.serving.protocol.datatypes import raw_of
from xpuruntime.serving.protocol.forms import Forms
from xpuruntime.serving.protocol.json_data import elements_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.serving.messages import InferResponse, InferTensor
    from xpuruntime.serving.protocol.rest_request import RestRequest

__all__ = ["RestResponse", "error_body", "write_response"]

_ENCODER = msgspec.json.Encoder()
_PIECE = 16 << 10
#: JSON of responses whose outputs are all binary.
_HEADS: Forms[bytes] = Forms()


@dataclass(slots=True)
class RestResponse:
    """A response as bytes.

    Parameters
    ----------
    chunks : sequence of bytes or memoryview
        JSON, then the binary outputs in order, which are views of the response's arrays.
    json_length : int, optional
        The header ``Inference-Header-Content-Length``, where outputs follow the JSON.
    """

    chunks: Sequence[bytes | memoryview]
    json_length: int | None = None

    @property
    def length(self) -> int:
        """Length of the whole body in bytes."""
        return sum(map(len, self.chunks))


def write_response(response: InferResponse, asked: RestRequest) -> RestResponse:
    """Return a response as bytes, with the outputs in binary that were asked for so.

    Raises
    ------
    ServingError
        An output has no form in JSON and was not asked for in binary.
    """
    key = None
    if asked.binary_by_default and not (response.id or response.parameters):
        raws = [raw_of(one) for one in response.outputs]
        sizes = tuple(
            [(one.name, one.datatype, one.shape, len(raw)) for one, raw in zip(response.outputs, raws, strict=True)]
        )
        key = (response.model, response.version, sizes)
        head = _HEADS.get(key)
        if head is not None:
            return RestResponse([head, *raws], len(head) if raws else None)
    outputs: list[dict[str, Any]] = []
    chunks: list[bytes | memoryview] = [b""]
    for tensor in response.outputs:
        one: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if asked.binary_by_default or tensor.name in asked.binary:
            raw = raw_of(tensor)
            chunks.append(raw)
            one["parameters"] = {**tensor.parameters, "binary_data_size": len(raw)}
        else:
            if tensor.parameters:
                one["parameters"] = tensor.parameters
            one["data"] = _data(tensor)
        outputs.append(one)
    written: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        written["id"] = response.id
    if response.parameters:
        written["parameters"] = response.parameters
    written["outputs"] = outputs
    head = chunks[0] = _ENCODER.encode(written)
    if key is not None and not any(one.parameters for one in response.outputs):
        _HEADS.put(key, head)
    return RestResponse(chunks, len(chunks[0]) if len(chunks) > 1 else None)


def _data(tensor: InferTensor) -> list[Any] | msgspec.Raw:
    """Return the elements of an output, of which many are encoded in pieces, between which other threads run."""
    if tensor.data.size <= _PIECE:
        return elements_of(tensor)
    flat = tensor.data.ravel()
    pieces = (replace(tensor, data=flat[at : at + _PIECE]) for at in range(0, flat.size, _PIECE))
    return msgspec.Raw(b"[" + b",".join(_ENCODER.encode(elements_of(one))[1:-1] for one in pieces) + b"]")


def error_body(message: str) -> bytes:
    """Return the body of an error."""
    return _ENCODER.encode({"error": message})
