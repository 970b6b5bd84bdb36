# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Wire format of protocol buffers: numbers come back, and every length that lies is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpuruntime.serving.protocol.datatypes import DATATYPES
from xpuruntime.serving.protocol.grpc_codec import read_infer_request, read_infer_response, read_stream_response
from xpuruntime.serving.protocol.rest import array_of_json
from xpuruntime.serving.protocol.rest_request import read_request
from xpuruntime.serving.protocol.wire import fields_of, packed_varints, signed, varint, varint_list, varints_of
from xpuruntime.serving.status import ServingError

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
        fields_of(memoryview(message))


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
