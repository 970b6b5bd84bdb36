# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What is short to send and long to decode is refused before it is made, and what takes long leaves the event loop."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest

from xpuruntime.serving.gate import Gate
from xpuruntime.serving.messages import InferRequest, InferResponse, InferTensor, RequestedOutput
from xpuruntime.serving.protocol.datatypes import INLINE_BYTES, MOST_ITEMS, NotInline
from xpuruntime.serving.protocol.grpc_codec import read_infer_request, write_infer_request
from xpuruntime.serving.protocol.rest import write_response
from xpuruntime.serving.protocol.rest_request import RestRequest, read_request
from xpuruntime.serving.protocol.wire import packed_varints, varints_of
from xpuruntime.serving.status import ServingError

ONE = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}
STRINGS = MOST_ITEMS + 1


def many(pattern: str, count: int) -> str:
    return ",".join([pattern] * count)


def rest(inputs: str = json.dumps(ONE), more: str = "") -> bytes:
    return f'{{"inputs": [{inputs}]{more}}}'.encode()


def strings(shape: str, data: str) -> bytes:
    return rest(f'{{"name": "x", "datatype": "BYTES", "shape": {shape}, "data": {data}}}')


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (rest(many(json.dumps(ONE), 20_000)), "fields, strings, parameters and tensors"),
        (rest(more=f', "outputs": [{many("""{"name": "y"}""", 20_000)}]'), "fields, strings, parameters and tensors"),
        (rest(more=f', "parameters": {{{many(""""a": 1""", 20_000)}}}'), "the parameters of the request have"),
        (rest(json.dumps({**ONE, "shape": [1] * 9000})), "dimensions of 'x' have"),
        (strings(f"[{STRINGS}]", f"[{many(chr(34) * 2, STRINGS * 2)}]"), "fields, strings, parameters and tensors"),
        (strings(f"[{STRINGS}, 0]", f"[{many('[]', STRINGS)}]"), "fields, strings, parameters and tensors"),
    ],
    ids=["inputs", "outputs", "parameters", "dimensions", "strings", "lists"],
)
def test_json_of_too_many_parts_is_refused(body, match):
    with pytest.raises(ServingError, match=match):
        read_request(body, "m")


def test_too_many_strings_and_tensors_are_refused_in_binary():
    raw = bytes(4 * STRINGS)
    stated = {"name": "x", "datatype": "BYTES", "shape": [STRINGS], "parameters": {"binary_data_size": len(raw)}}
    head = rest(json.dumps(stated))
    with pytest.raises(ServingError, match="fields, strings, parameters and tensors"):
        read_request(head + raw, "m", length=len(head))
    tensor = InferTensor("x", "BYTES", (STRINGS,), np.full(STRINGS, b"", object))
    for how in ({"raw": True}, {"raw": False}):
        with pytest.raises(ServingError, match="fields, strings, parameters and tensors"):
            read_infer_request(write_infer_request(InferRequest("m", [tensor]), **how))
    named = [RequestedOutput(f"y{at}") for at in range(20_000)]
    with pytest.raises(ServingError, match="fields, strings, parameters and tensors"):
        read_infer_request(write_infer_request(InferRequest("m", [], outputs=named)))


def test_what_takes_long_to_decode_is_not_decoded_in_an_event_loop():
    strings = InferTensor("x", "BYTES", (5000,), np.full(5000, b"a", object))
    numbers = InferTensor("x", "INT64", (INLINE_BYTES,), np.ones(INLINE_BYTES + 1, np.int64)[1:])
    for tensor, raw in ((strings, True), (strings, False), (numbers, False)):
        message = write_infer_request(InferRequest("m", [tensor]), raw=raw)
        with pytest.raises(NotInline):
            read_infer_request(message, inline=True)
        np.testing.assert_array_equal(read_infer_request(message).inputs[0].data, tensor.data)
    plain = write_infer_request(InferRequest("m", [numbers]), raw=True)
    assert len(plain) > INLINE_BYTES
    np.testing.assert_array_equal(read_infer_request(plain, inline=True).inputs[0].data, numbers.data)
    text = rest(f'{{"name": "x", "datatype": "FP32", "shape": [40000], "data": [{many("1", 40_000)}]}}')
    with pytest.raises(NotInline):
        read_request(text, "m", inline=True)
    assert read_request(text, "m").request.inputs[0].data.sum() == 40_000


def test_a_gate_has_long_decoding_done_in_another_thread():
    def read(value: int, *, inline: bool = False) -> tuple[int, threading.Thread]:
        if inline and value > 1:
            raise NotInline
        return value, threading.current_thread()

    async def both() -> None:
        gate, here = Gate(1), threading.current_thread()
        assert await gate.decoded(read, 1) == (1, here)
        value, thread = await gate.decoded(read, 2)
        assert (value, thread is here) == (2, False)

    asyncio.run(both())


@pytest.mark.parametrize("shape", [(90_000,), (300, 300), (300, 1, 300)])
@pytest.mark.parametrize("datatype", ["FP32", "INT16", "UINT64", "BOOL"])
def test_long_data_are_decoded_and_encoded_in_pieces(datatype, shape):
    values = np.arange(90_000) % (2 if datatype == "BOOL" else 30_000)
    made = values.astype({"FP32": "f4", "INT16": "i2", "UINT64": "u8", "BOOL": "?"}[datatype]).reshape(shape)
    for data in (made.tolist(), made.ravel().tolist()):
        body = json.dumps({"inputs": [{**ONE, "datatype": datatype, "shape": list(shape), "data": data}]}, indent=1)
        (read,) = read_request(body.encode(), "m").request.inputs
        np.testing.assert_array_equal(read.data, made, strict=True)
    written = write_response(InferResponse("m", "1", [InferTensor("y", datatype, shape, made)]), RestRequest(None))
    assert json.loads(b"".join(written.chunks))["outputs"][0]["data"] == made.ravel().tolist()


@pytest.mark.parametrize("at", [0, 40_000, 89_999])
def test_a_wrong_number_of_long_data_is_refused_wherever_it_is(at):
    for wrong in ("a", None, 1.5, 2**40, [1], {"a": 1}):
        data = [1] * 90_000
        data[at] = wrong
        for nested in (data, [data[row : row + 300] for row in range(0, 90_000, 300)]):
            body = json.dumps({"inputs": [{**ONE, "datatype": "INT16", "shape": [300, 300], "data": nested}]})
            with pytest.raises(ServingError, match=r"are not INT16|are not nested|cannot hold|begin with 3 brackets"):
                read_request(body.encode(), "m")


def test_long_packed_numbers_come_back():
    values = np.random.default_rng(7).integers(-(2**62), 2**62, 300_000)
    assert packed_varints(memoryview(varints_of(values))).view(np.int64).tolist() == values.tolist()
    with pytest.raises(ServingError, match="ends within a number"):
        packed_varints(memoryview(varints_of(values)[:-1]))
    with pytest.raises(ServingError, match="the message is malformed"):
        packed_varints(memoryview(b"\xff" * (3 << 20)))
