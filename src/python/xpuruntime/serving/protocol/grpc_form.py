# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`GrpcForm`: a ``ModelInferRequest`` with raw contents at its end, to be read again with other values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.protocol.datatypes import DATATYPES, Datatype, array_at
from xpuruntime.serving.protocol.forms import LONGEST
from xpuruntime.serving.protocol.wire import LENGTH, varint

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GrpcForm"]

_RAW = bytes((7 << 3 | LENGTH,))


class GrpcForm:
    """All of a request but the bytes of its tensors.

    A message has the form where its length and everything between the tensors are the same: what is read of it then
    differs in those bytes alone.
    """

    __slots__ = ("_between", "_request", "_tensors")

    def __init__(
        self,
        request: InferRequest,
        between: list[tuple[int, int, bytes]],
        tensors: list[tuple[InferTensor, Datatype, int, int]],
    ) -> None:
        #: Without its tensors, which are views of a message that is answered some time.
        self._request, self._between, self._tensors = replace(request, inputs=()), between, tensors

    @classmethod
    def of(cls, request: InferRequest, message: memoryview, raw: Sequence[memoryview]) -> GrpcForm | None:
        """Return the form of a request that was read; `None` where its tensors are not raw ones at the end."""
        heads = [_RAW + varint(len(one)) for one in raw]
        at = len(message) - sum(len(head) + len(one) for head, one in zip(heads, raw, strict=True))
        if not 0 < at <= LONGEST:
            return None
        between = [(0, at, bytes(message[:at]))]
        tensors = []
        for tensor, head, one in zip(request.inputs, heads, raw, strict=True):
            between.append((at, at + len(head), head))
            at += len(head)
            datatype = DATATYPES[tensor.datatype]
            if datatype.is_bytes or message[at - len(head) : at] != head or message[at : at + len(one)] != one:
                return None
            made = InferTensor(tensor.name, datatype.name, tensor.shape, None, tensor.parameters)
            tensors.append((made, datatype, len(one) // datatype.size, at))
            at += len(one)
        return cls(request, between, tensors)

    def fits(self, message: memoryview) -> bool:
        """Return whether a message of the same length has this form."""
        return all(message[start:stop] == text for start, stop, text in self._between)

    def request(self, message: memoryview) -> InferRequest:
        """Return the request in a message that fits."""
        old = self._request
        inputs = [
            InferTensor(
                one.name,
                one.datatype,
                one.shape,
                array_at(datatype, one.shape, message, count, at, one.name),
                one.parameters,
            )
            for one, datatype, count, at in self._tensors
        ]
        return InferRequest(old.model, inputs, old.version, old.id, old.outputs, {}, None, 0)
