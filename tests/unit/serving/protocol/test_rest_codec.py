# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""REST codec: what clients send comes in as it is, and everything that does not fit is refused with the reason."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from xpuruntime.serving.messages import InferRequest, InferResponse, InferTensor, ServingError, Status
from xpuruntime.serving.protocol.datatypes import DATATYPES
from xpuruntime.serving.protocol.rest import write_request, write_response
from xpuruntime.serving.protocol.rest_request import RestRequest, header_length, read_raw_request, read_request

VALUES = {
    "BOOL": [True, False, True],
    "UINT8": [0, 7, 255],
    "UINT16": [0, 7, 2**16 - 1],
    "UINT32": [0, 7, 2**32 - 1],
    "UINT64": [0, 7, 2**64 - 1],
    "INT8": [-128, 0, 127],
    "INT16": [-(2**15), 0, 2**15 - 1],
    "INT32": [-(2**31), 0, 2**31 - 1],
    "INT64": [-(2**63), 0, 2**63 - 1],
    "FP16": [0.5, -1.0, 2.0],
    "BF16": [0x3F80, 0, 0xFF80],
    "FP32": [0.1, -1.5, 3],
    "FP64": [0.1, -1e300, 3],
    "BYTES": ["a", "", "날씨"],
}
NUMBERS = [name for name in DATATYPES if name not in ("FP16", "BF16")]


def array(datatype: str, shape: tuple[int, ...] = (3,)) -> np.ndarray:
    values = [one.encode() for one in VALUES[datatype]] if datatype == "BYTES" else VALUES[datatype]
    return np.array(values, DATATYPES[datatype].dtype).reshape(shape)


def body_of(*inputs: dict, **more: object) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def tensor(datatype: str = "FP32", **more: object) -> dict:
    return {"name": "x", "shape": [3], "datatype": datatype, **more}


def binary_request(datatype: str, raw: bytes, shape: tuple[int, ...] = (3,), **more: object) -> tuple[bytes, int]:
    head = body_of(tensor(datatype, shape=list(shape), parameters={"binary_data_size": len(raw)}), **more)
    return head + raw, len(head)


def refused(body: bytes, match: str, length: int | None = None, status: Status = Status.INVALID_ARGUMENT) -> None:
    with pytest.raises(ServingError, match=re.compile(re.escape(match), re.IGNORECASE)) as caught:
        read_request(body, "m", length=length)
    assert caught.value.code is status
    assert ". Fix: " in str(caught.value)


@pytest.mark.parametrize("datatype", NUMBERS)
def test_json_flat_and_nested_are_the_same(datatype):
    flat = read_request(body_of(tensor(datatype, shape=[1, 3], data=VALUES[datatype])), "m").request
    nested = read_request(body_of(tensor(datatype, shape=[1, 3], data=[VALUES[datatype]])), "m").request
    for read in (flat, nested):
        (found,) = read.inputs
        assert (found.datatype, found.shape) == (datatype, (1, 3))
        np.testing.assert_array_equal(found.data, array(datatype, (1, 3)), strict=True)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_binary_both_ways(datatype):
    made = array(datatype)
    request = RestRequest(None, binary_by_default=True)
    sent = write_response(InferResponse("m", "1", [InferTensor("x", datatype, (3,), made)], "7"), request)
    assert sent.length == sum(map(len, sent.chunks))
    head = json.loads(sent.chunks[0])
    assert head["model_name"] == "m"
    assert head["id"] == "7"
    (output,) = head["outputs"]
    raw = bytes(sent.chunks[1])
    assert output["parameters"] == {"binary_data_size": len(raw)}
    body, length = binary_request(datatype, raw)
    (found,) = read_request(body, "m", length=length).request.inputs
    np.testing.assert_array_equal(found.data, made, strict=True)


def test_binary_inputs_are_views_of_the_body():
    raw = np.arange(3, dtype=np.float32).tobytes()
    body, length = binary_request("FP32", raw)
    (found,) = read_request(body, "m", length=length).request.inputs
    assert not found.data.flags.owndata
    assert not found.data.flags.writeable
    assert np.shares_memory(found.data, np.frombuffer(body, np.uint8))


@pytest.mark.parametrize("datatype", NUMBERS)
def test_json_outputs_come_back(datatype):
    made = array(datatype, (3, 1))
    sent = write_response(InferResponse("m", "1", [InferTensor("y", datatype, (3, 1), made)]), RestRequest(None))
    assert sent.json_length is None
    (output,) = json.loads(b"".join(sent.chunks))["outputs"]
    back = read_request(body_of({**output, "name": "x"}), "m").request.inputs[0]
    np.testing.assert_array_equal(back.data, made, strict=True)


def test_everything_that_a_request_can_have():
    read = read_request(
        body_of(
            {"name": "a", "shape": [1], "datatype": "INT8", "data": [1], "parameters": {"own": "x"}},
            id="42",
            parameters={"timeout": 2_000_000, "priority": 3, "mine": 1.5, "binary_data_output": True},
            outputs=[{"name": "y", "parameters": {"binary_data": False, "k": True}}, {"name": "z"}],
            model_name="m",
            model_version="2",
        ),
        "m",
        now=100.0,
    )
    request = read.request
    assert (request.id, request.version, request.deadline, request.priority) == ("42", "2", 102.0, 3)
    assert request.parameters == {"timeout": 2_000_000, "priority": 3, "mine": 1.5}
    assert request.inputs[0].parameters == {"own": "x"}
    assert [(output.name, dict(output.parameters)) for output in request.outputs] == [("y", {"k": True}), ("z", {})]
    assert (read.binary, read.binary_by_default) == (frozenset({"z"}), False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"data": [1, 2]}, "has 2 elements, and the shape [3] has 3"),
        ({"data": [1, 2, 3, 4]}, "has 4 elements"),
        ({"data": [[1, 2, 3]]}, "begin with 2 brackets, and its shape [3] takes 1 (flat)"),
        ({"data": ["1", 2, 3]}, "are not FP32: Expected `float`, got `str`"),
        ({"data": [True, 2, 3]}, "got `bool`"),
        ({"data": [1e39, 2, 3]}, "an element that FP32 cannot hold"),
        ({"data": {"a": 1}}, "begin with 0 brackets"),
        ({"data": None}, "has no data"),
        ({}, "has no data"),
        ({"datatype": "FP8", "data": [1]}, "the datatype 'FP8', which the protocol does not have"),
        ({"datatype": "fp32", "data": [1]}, "the datatype 'fp32'"),
        ({"datatype": "FP16", "data": [1, 2, 3]}, "is FP16, which JSON has no form for"),
        ({"datatype": "INT32", "data": [1.0, 2, 3]}, "are not INT32: Expected `int`, got `float`"),
        ({"datatype": "INT8", "data": [128, 0, 0]}, "an element that INT8 cannot hold"),
        ({"datatype": "INT64", "data": [2**63, 0, 0]}, "an element that INT64 cannot hold"),
        ({"datatype": "UINT64", "data": [-1, 0, 0]}, "an element that UINT64 cannot hold"),
        ({"datatype": "UINT64", "data": [2**64, 0, 0]}, "an element that UINT64 cannot hold"),
        ({"datatype": "BOOL", "data": [1, 0, 1]}, "Fix: send true or false"),
        ({"shape": [-1], "data": [1]}, "state the size of each dimension"),
        ({"shape": [2**62, 4], "data": [1]}, "which no memory can hold"),
        ({"shape": [2**70], "data": [1]}, "state the size of each dimension"),
        ({"shape": [1] * 33, "data": [1]}, "has 33 dimensions"),
        ({"shape": [2, 2], "data": [[1, 2], [3]]}, "are not nested as its shape [2, 2]"),
        ({"shape": [2, 2], "data": [[1, 2]]}, "are not nested as its shape"),
        ({"shape": [2, 2, 1], "data": [[1], [2], [3], [4]]}, "takes 1 (flat) or 3"),
        ({"shape": [2, 0], "data": [[], [], []]}, "are not nested as its shape"),
        ({"shape": [2, 0], "data": [[1], [2]]}, "are not nested as its shape"),
        ({"data": [1, 2, 3], "extra": 1}, "unknown field `extra`"),
        ({"data": [1, 2, 3], "parameters": {"binary_data_size": 12}}, "has both data and binary_data_size"),
        ({"parameters": {"binary_data_size": 12}}, "0 bytes are left behind the JSON"),
        ({"parameters": {"binary_data_size": -1}}, "the binary_data_size -1"),
        ({"parameters": {"binary_data_size": True}}, "the binary_data_size True"),
        ({"data": [1, 2, 3], "parameters": {"a": []}}, "Expected `bool | int | float | str | null`, got `array`"),
    ],
)
def test_wrong_tensors_are_refused(change, match):
    refused(body_of(tensor(**change)), match)


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (2, 0, 3), (1, 2, 0)])
def test_empty_tensors_may_be_nested(datatype, shape):
    empty = np.zeros(shape, object if datatype == "BYTES" else np.float32)
    for data in ([], empty.tolist()):
        (read,) = read_request(body_of(tensor(shape=shape, datatype=datatype, data=data)), "m").request.inputs
        np.testing.assert_array_equal(read.data, empty, strict=True)


@pytest.mark.parametrize("name", ["shared_memory_region", "shared_memory_offset"])
def test_shared_memory_is_not_served(name):
    refused(body_of(tensor(parameters={name: "r"})), name, status=Status.UNIMPLEMENTED)
    request = body_of(tensor(data=[1, 2, 3]), outputs=[{"name": "y", "parameters": {name: "r"}}])
    refused(request, name, status=Status.UNIMPLEMENTED)


def test_sequences_are_not_served_and_no_sequence_is_none():
    refused(body_of(tensor(data=[1, 2, 3]), parameters={"sequence_id": 3}), "sequence_id", status=Status.UNIMPLEMENTED)
    none = {"sequence_id": 0, "sequence_start": False}
    assert read_request(body_of(tensor(data=[1, 2, 3]), parameters=none), "m").request.inputs


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"", "not a request of the protocol"),
        (b"[]", "Expected `object`"),
        (b"{", "truncated"),
        (b"{}", "missing required field `inputs`"),
        (b'{"inputs": [], "output": []}', "unknown field `output`"),
        (b'{"inputs": []}{}', "trailing characters"),
        (b'{"inputs": [{"name": "\xff"}]}', "utf-8"),
        (b"\x1f\x8b\x08", "malformed"),
        (b"[" * 100_000, "not a request"),
        (b'{"inputs": [], "parameters": {"timeout": -1}}', "the parameter timeout is -1"),
        (b'{"inputs": [], "parameters": {"timeout": "soon"}}', "the parameter timeout is 'soon'"),
        (b'{"inputs": [], "parameters": {"priority": true}}', "the parameter priority is True"),
        (b'{"inputs": [], "parameters": {"binary_data_output": 1}}', "parameter binary_data_output 1"),
        (b'{"inputs": [], "parameters": {"xrt_evidence": "true"}}', "the parameter xrt_evidence 'true'"),
        (b'{"inputs": [], "parameters": {"xrt_evidnce": true}}', "may have xrt_evidence"),
        (b'{"inputs": [], "model_name": "other"}', "the body has model_name 'other', and the path 'm'"),
    ],
)
def test_wrong_bodies_are_refused(body, match):
    refused(body, match)


def test_names_given_twice_are_refused():
    one = tensor(data=[1, 2, 3])
    refused(body_of(one, one), "the input 'x' is given twice")
    refused(body_of(one, outputs=[{"name": "y"}, {"name": "y"}]), "the output 'y' is given twice")


def test_deep_nesting_in_data_is_refused():
    body = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": ' + b"[" * 500 + b"]" * 500 + b"}]}"
    refused(body, "begin with 33 brackets")


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"\0" * 11, "has 11 bytes, and FP32 of shape [3] takes 12"),
        (b"\0" * 13, "has 13 bytes"),
    ],
)
def test_binary_of_another_length_is_refused(raw, match):
    body, length = binary_request("FP32", raw)
    refused(body, match, length)


def test_lengths_that_lie_are_refused():
    raw = b"\0" * 12
    body, length = binary_request("FP32", raw)
    refused(body + b"!", "1 bytes follow the JSON", length)
    refused(body[:-1], "11 bytes are left", length)
    refused(body, "not a request of the protocol", length - 1)
    refused(body, "not a request of the protocol", length + 1)
    for stated in ("-1", "1.5", "", "ten", "\uff11\uff12", " 5", "9" * 40):
        with pytest.raises(ServingError, match="Inference-Header-Content-Length"):
            header_length(stated, 100)
    with pytest.raises(ServingError, match="is 101, and the body has 100 bytes"):
        header_length("101", 100)
    assert header_length("100", 100) == 100
    assert header_length(None, 100) is None


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"\1\0\0\0a", "3 elements take at least 12 bytes, and there are 5"),
        (b"\0\0\0\0" * 2 + b"\xff\xff\xff\xff", "element 2 states 4294967295 bytes, and 0 are left"),
        (b"\4\0\0\0aaaa\0\0\0\0", "the length of element 2 is missing"),
        (b"\0\0\0\0" * 4, "4 bytes follow its 3 elements"),
    ],
)
def test_bytes_whose_lengths_lie_are_refused(raw, match):
    body, length = binary_request("BYTES", raw)
    refused(body, match, length)


def test_bytes_of_a_huge_shape_are_refused_before_they_are_made():
    body, length = binary_request("BYTES", b"\0" * 12, shape=(2**50,))
    refused(body, "elements take at least", length)


def test_bools_are_zero_or_one():
    body, length = binary_request("BOOL", b"\0\1\2")
    refused(body, "neither 0 nor 1", length)


def test_an_empty_tensor_is_a_tensor():
    read = read_request(body_of(tensor(shape=[0, 4], data=[])), "m").request
    assert read.inputs[0].data.shape == (0, 4)
    body, length = binary_request("FP32", b"", shape=(0, 4))
    assert read_request(body, "m", length=length).request.inputs[0].data.shape == (0, 4)


def test_a_tensor_without_dimensions_has_one_element():
    for data in ([5], 5):
        (found,) = read_request(body_of(tensor("INT32", shape=[], data=data)), "m").request.inputs
        assert found.data.shape == ()
        assert found.data == 5


@pytest.mark.parametrize(
    ("output", "match"),
    [
        (InferTensor("y", "FP32", (1,), np.array([np.nan], "f4")), "has NaN or an infinity"),
        (InferTensor("y", "FP64", (1,), np.array([np.inf])), "has NaN or an infinity"),
        (InferTensor("y", "FP16", (1,), np.zeros(1, "f2")), "is FP16"),
        (InferTensor("y", "BYTES", (1,), np.array([b"\xff"], object)), "not UTF-8"),
    ],
)
def test_outputs_without_a_form_in_json_are_refused(output, match):
    with pytest.raises(ServingError, match=match) as caught:
        write_response(InferResponse("m", "1", [output]), RestRequest(None))
    assert "binary_data true" in str(caught.value)
    assert write_response(InferResponse("m", "1", [output]), RestRequest(None, binary_by_default=True)).json_length


def metadata(shape: list[int], datatype: str = "FP32", inputs: int = 1) -> dict:
    return {"inputs": [{"name": f"x{at}", "datatype": datatype, "shape": shape} for at in range(inputs)]}


@pytest.mark.parametrize(
    ("shape", "batched", "floats", "expected"),
    [
        ([-1, 2, 3], True, 6, (1, 2, 3)),
        ([-1, 2, 3], False, 12, (2, 2, 3)),
        ([-1, -1, 3], True, 12, (1, 4, 3)),
        ([2, 3], False, 6, (2, 3)),
    ],
)
def test_raw_requests(shape, batched, floats, expected):
    made = np.arange(floats, dtype=np.float32)
    read = read_raw_request(made.tobytes(), metadata(shape), "m", "2", batched=batched)
    assert read.binary_by_default
    assert read.request.version == "2"
    np.testing.assert_array_equal(read.request.inputs[0].data, made.reshape(expected), strict=True)


def test_raw_requests_of_bytes_are_one_element():
    read = read_raw_request(b"hello", metadata([-1, 1], "BYTES"), "m", batched=True)
    assert read.request.inputs[0].data.tolist() == [[b"hello"]]


@pytest.mark.parametrize(
    ("facts", "body", "match"),
    [
        (metadata([1], inputs=2), b"\0" * 4, "for models with one input, and 'm' has 2"),
        (metadata([-1, -1]), b"\0" * 4, "leaves one dimension free"),
        (metadata([-1, 2]), b"\0" * 9, "has 9 bytes"),
        (metadata([2]), b"\0" * 9, "has 9 bytes"),
    ],
)
def test_raw_requests_that_do_not_fit_are_refused(facts, body, match):
    with pytest.raises(ServingError, match=match):
        read_raw_request(body, facts, "m", batched=False)


def test_requests_that_differ_in_values_alone_are_read_as_the_first_was():
    for datatype, values in (("FP32", [1.5, 2.5]), ("BOOL", [True, False]), ("BYTES", [b"a", b"bc"]), ("BF16", [1, 2])):
        dtype = DATATYPES[datatype].dtype
        for turn in range(3):
            array = np.array(values[::-1] if turn == 1 else values, dtype)
            sent = InferRequest("m", [InferTensor("x", datatype, (2,), array)], parameters={"timeout": 1000})
            body, length = write_request(sent, binary=True)
            read = read_request(body, "m", "", length, now=float(turn))
            np.testing.assert_array_equal(read.request.inputs[0].data, array)
            assert read.request.deadline == pytest.approx(turn + 0.001)
            assert read.binary_by_default
    good, length = write_request(
        InferRequest("m", [InferTensor("x", "BOOL", (2,), np.array([True, False]))]), binary=True
    )
    for bad in (good[:-1] + b"\x02", good[:-1], good + b"\x00"):
        with pytest.raises(ServingError):
            read_request(bad, "m", "", length)
    read_request(good, "m", "", length)
    with pytest.raises(ServingError, match="has no data"):
        read_request(good.replace(b'"binary_data_size":2', b'"binary_data_silo":2'), "m", "", length)


def test_forms_of_one_model_are_not_those_of_another():
    body, length = write_request(
        InferRequest("m", [InferTensor("x", "FP32", (1,), np.ones(1, np.float32))]), binary=True
    )
    assert read_request(body, "m", "", length).request.model == "m"
    assert read_request(body, "n", "2", length).request.model == "n"
    assert read_request(body, "n", "2", length).request.version == "2"
