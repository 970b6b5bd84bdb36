# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What is short to send and long to decode, malformed or compressed is refused before it is made."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import threading
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpuruntime.serving.http.bodies import decompress, response_encoding
from xpuruntime.serving.messages import InferRequest, InferResponse, InferTensor, RequestedOutput, ServingError, Status
from xpuruntime.serving.protocol.datatypes import DATATYPES, INLINE_BYTES, MOST_ITEMS, NotInline
from xpuruntime.serving.protocol.infer_messages import (
    read_infer_request,
    read_infer_response,
    read_stream_response,
    write_infer_request,
)
from xpuruntime.serving.protocol.rest import _numbers, array_of_json, write_response
from xpuruntime.serving.protocol.rest_request import RestRequest, read_request
from xpuruntime.serving.protocol.wire import fields_of, packed_varints, signed, varint, varint_list, varints_of
from xpuruntime.serving.transport.gate import Gate

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


@pytest.mark.parametrize("shape", [(100_000,), (100, 1000)], ids=["flat", "nested"])
def test_numbers_in_json_are_read_in_pieces(shape):
    """Nothing else runs while all of a text is changed."""

    class Whole(bytes):
        def translate(self, *_):
            raise AssertionError

    array = np.arange(100_000, dtype=np.int32).reshape(shape)
    pieces = list(_numbers(DATATYPES["INT32"], Whole(json.dumps(array.tolist()).encode()), len(shape), shape, "x"))
    assert [number for piece in pieces for number in piece] == array.ravel().tolist()
    assert max(map(len, pieces)) < 20_000


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


def test_many_numbers_that_each_have_a_field_are_refused():
    """Encoders pack them: one by one, they take a microsecond for each byte."""

    def field(number: int, data: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(data)) + data

    def message(count: int) -> bytes:
        shape = varint(3 << 3) + varint(count)
        tensor = field(1, b"x") + field(2, b"INT64") + shape + field(5, b"\x18\x01" * count)
        return field(1, b"m") + field(5, tensor)

    assert read_infer_request(message(3)).inputs[0].data.tolist() == [1, 1, 1]
    with pytest.raises(ServingError, match="fields, strings, parameters and tensors"):
        read_infer_request(message(20_000))


def test_what_takes_long_to_decode_is_not_decoded_in_an_event_loop():
    strings = InferTensor("x", "BYTES", (5000,), np.full(5000, b"a", object))
    texts = InferTensor("x", "BYTES", (3,), np.full(3, b"a" * INLINE_BYTES, object))
    numbers = InferTensor("x", "INT64", (INLINE_BYTES,), np.ones(INLINE_BYTES + 1, np.int64)[1:])
    for tensor, raw in ((strings, True), (strings, False), (texts, True), (texts, False), (numbers, False)):
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


def test_one_request_is_decoded_in_a_thread_at_a_time():
    began: list[int] = []
    go_on = threading.Event()

    def read(value: int, *, inline: bool = False) -> int:
        if inline:
            raise NotInline
        began.append(value)
        assert go_on.wait(60)
        return value

    async def several() -> None:
        gate = Gate(1)
        tasks = [asyncio.ensure_future(gate.decoded(read, value)) for value in range(4)]
        while not began:
            await asyncio.sleep(0.001)
        turn = await gate.compressed(lambda: list(began))  # in another thread, as a second decoder would be
        assert turn == [0]
        go_on.set()
        assert await asyncio.gather(*tasks) == [0, 1, 2, 3]

    asyncio.run(several())


def test_a_long_response_is_encoded_beside_nothing_else_that_is_long():
    long = InferResponse("m", "1", [InferTensor("y", "FP32", (50_000,), np.ones(50_000, np.float32))])
    short = InferResponse("m", "1", [InferTensor("y", "FP32", (5,), np.ones(5, np.float32))])
    began: list[str] = []
    go_on = threading.Event()

    def read(*, inline: bool = False) -> None:
        if inline:
            raise NotInline
        began.append("read")
        assert go_on.wait(60)

    async def several() -> None:
        gate, loop = Gate(1), asyncio.get_running_loop()
        encode = gate.encoder(lambda response: began.append("short" if response is short else "long"))
        reading = asyncio.ensure_future(gate.decoded(read))
        while not began:
            await asyncio.sleep(0.001)
        encoding = loop.run_in_executor(None, encode, long)
        await loop.run_in_executor(None, encode, short)
        assert began == ["read", "short"]
        encode(long)  # in the event loop, which never waits for a thread
        assert began == ["read", "short", "long"]
        go_on.set()
        await asyncio.gather(reading, encoding)
        assert began == ["read", "short", "long", "long"]

    asyncio.run(several())


def test_what_a_refused_request_was_decoded_to_is_let_go_of_in_its_thread():
    class Made:
        """Says in which thread it is freed."""

        def __del__(self) -> None:
            freed.append(threading.current_thread())

    freed: list[threading.Thread] = []

    def read(*, inline: bool = False) -> None:
        if inline:
            raise NotInline
        made = Made()
        raise ServingError(Status.INVALID_ARGUMENT, f"it is wrong, as {bool(made)}. Fix: correct it")

    with pytest.raises(ServingError, match="it is wrong"):
        asyncio.run(Gate(1).decoded(read))
    assert len(freed) == 1
    assert freed[0] is not threading.current_thread()


def test_long_outputs_are_beside_short_and_binary_ones():
    long, short = np.arange(90_000, dtype="f4").reshape(300, 300), np.arange(3, dtype="i4")
    outputs = [
        InferTensor(name, {"f": "FP32", "i": "INT32"}[made.dtype.kind], made.shape, made)
        for name, made in (("a", long), ("b", short), ("c", short), ("d", -long))
    ]
    written = write_response(InferResponse("m", "1", outputs, "\0"), RestRequest(None, frozenset("b")))
    joined = b"".join(written.chunks)
    read = json.loads(joined[: written.json_length])
    assert (read["id"], [output["name"] for output in read["outputs"]]) == ("\0", ["a", "b", "c", "d"])
    assert read["outputs"][0]["data"] == long.ravel().tolist()
    assert read["outputs"][2]["data"] == [0, 1, 2]
    assert read["outputs"][3]["data"] == (-long).ravel().tolist()
    assert joined[written.json_length :] == short.tobytes()
    assert max(map(len, written.chunks)) < 128 << 10


def test_long_texts_are_encoded_in_pieces_and_bounded():
    texts = [b"", b"a" * 70_000, b"b", *[b"c" * 500] * 1000, b'"\\']
    made = np.empty(len(texts), object)
    made[:] = texts
    response = InferResponse("m", "1", [InferTensor("y", "BYTES", made.shape, made)])
    written = write_response(response, RestRequest(None))
    assert json.loads(b"".join(written.chunks))["outputs"][0]["data"] == [text.decode() for text in texts]
    assert max(map(len, written.chunks)) < 72_000
    with pytest.raises(
        ServingError, match=r"longer than 300000 bytes\. Fix: ask for it with the parameter binary_data"
    ):
        write_response(response, RestRequest(None, most=300_000))


def test_json_of_a_response_is_bounded():
    response = InferResponse("m", "1", [InferTensor("y", "FP32", (90_000,), np.ones(90_000, np.float32))])
    assert write_response(response, RestRequest(None, most=400_000)).length < 400_000
    with pytest.raises(
        ServingError, match=r"longer than 300000 bytes\. Fix: ask for it with the parameter binary_data"
    ):
        write_response(response, RestRequest(None, most=300_000))
    assert write_response(response, RestRequest(None, binary_by_default=True, most=1000)).length > 360_000


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


LIMIT = 64 << 20


@pytest.mark.parametrize(
    ("encoding", "make"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP ", gzip.compress)]
)
def test_bodies_come_back(encoding, make):
    body = os.urandom(1000) + b"a" * 1000
    assert decompress(make(body), encoding, LIMIT) == body
    assert decompress(make(b""), encoding, LIMIT) == b""


@pytest.mark.parametrize(("encoding", "make"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_bombs_are_refused_at_the_limit(encoding, make):
    bomb = make(bytes(32 << 20))
    with pytest.raises(ServingError, match="over 200 times as long") as caught:
        decompress(bomb, encoding, LIMIT)
    assert caught.value.code is Status.TOO_LARGE
    with pytest.raises(ServingError, match=f"over {1 << 20} bytes"):
        decompress(bomb, encoding, 1 << 20)


@pytest.mark.parametrize(
    ("body", "encoding", "match"),
    [
        (b"not compressed", "gzip", "is not gzip"),
        (b"not compressed", "deflate", "is not deflate"),
        (b"", "gzip", "truncated"),
        (gzip.compress(b"abc", mtime=0)[:-1], "gzip", "truncated"),
        (gzip.compress(b"abc", mtime=0) + b"!", "gzip", "1 bytes follow"),
        (gzip.compress(b"abc", mtime=0)[:-8] + b"\0" * 8, "gzip", "is not gzip"),
        (gzip.compress(b"abc", mtime=0), "deflate", "is not deflate"),
        (b"abc", "br", "the Content-Encoding is 'br'"),
        (b"abc", "gzip, gzip", "the Content-Encoding is 'gzip, gzip'"),
    ],
)
def test_corrupt_bodies_are_refused(body, encoding, match):
    with pytest.raises(ServingError, match=match) as caught:
        decompress(body, encoding, LIMIT)
    assert caught.value.code is Status.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        ("gzip", "gzip"),
        ("Deflate", "deflate"),
        ("gzip, deflate", ""),
        ("gzip;q=0", ""),
        ("*", ""),
        ("", ""),
        ("br", ""),
    ],
)
def test_a_response_is_compressed_where_one_encoding_is_asked_for(accepted, expected):
    assert response_encoding(accepted) == expected


QUICK = settings(max_examples=150, deadline=None, derandomize=True)


@QUICK
@given(st.integers(-(2**63), 2**64 - 1))
def test_numbers_come_back(value):
    sent = varint(value)
    ((number, wire, read),) = fields_of(memoryview(b"\x08" + sent))
    assert (number, wire, read) == (1, 0, value % 2**64)
    assert signed(read) == (value if value < 2**63 else value - 2**64)
    assert packed_varints(memoryview(sent)).tolist() == [value % 2**64]


@QUICK
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60))
def test_packed_numbers_come_back(values):
    sent = varints_of(np.array(values, np.int64))
    assert sent == b"".join(map(varint, values))
    for read in (packed_varints(memoryview(sent)), np.array(varint_list(memoryview(sent)), np.uint64)):
        assert read.view(np.int64).tolist() == values


@pytest.mark.parametrize(
    "message",
    [
        b"\x08",
        b"\x08\x80",
        b"\x80",
        b"\x08" + b"\xff" * 10 + b"\x01",
        b"\x12\x05abc",
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0d\0\0\0",
        b"\x09\0\0\0\0",
        b"\x0b\x0c",
        b"\x0f",
        b"\x00\x00",
    ],
)
def test_malformed_messages_are_refused(message):
    with pytest.raises(ServingError, match="the message is malformed"):
        list(fields_of(memoryview(message)))


@pytest.mark.parametrize("packed", [b"\x80", b"\x01\x80", b"\x80" * 10 + b"\x01"])
@pytest.mark.parametrize("before", [0, 100], ids=["short", "long"])
def test_malformed_packed_numbers_are_refused(packed, before):
    with pytest.raises(ServingError, match="the message is malformed"):
        packed_varints(memoryview(b"\1" * before + packed))


def check(read, *args, **more):
    """Call a function that returns, or raises an error with a fix, and none of Python's."""
    reason = ""
    try:
        return read(*args, **more)
    except ServingError as error:
        reason = str(error)
    assert ". Fix: " in reason
    return None


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    for read in (read_infer_request, read_infer_response, read_stream_response):
        check(read, data)
    for length in (None, len(data) // 2):
        check(read_request, data, "m", length=length)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    data=_JSON,
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    name=st.sampled_from(sorted(DATATYPES)),
)
def test_any_json_is_an_array_of_the_shape_or_refused(data, shape, name):
    datatype = DATATYPES[name]
    made = check(array_of_json, datatype, shape, json.dumps(data).encode(), "x")
    if made is None:
        return
    assert made.shape == shape
    assert made.dtype == datatype.dtype
    flat = data if isinstance(data, list) else [data]
    while flat and isinstance(flat[0], list):
        flat = [item for one in flat for item in one]
    if name == "BYTES":
        assert [one.decode() for one in made.ravel()] == flat
    elif made.dtype.kind == "f":
        np.testing.assert_array_equal(made.ravel(), np.array(flat, made.dtype))
    else:
        assert made.ravel().tolist() == flat
