# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Messages by protobuf, and our codec of inference against it: equal both ways, and one verdict on what is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpuruntime.serving.messages import InferRequest, InferResponse, InferTensor, RequestedOutput, ServingError
from xpuruntime.serving.protocol.datatypes import DATATYPES
from xpuruntime.serving.protocol.grpc_messages import decode, encode, message_classes
from xpuruntime.serving.protocol.infer_messages import (
    read_infer_request,
    read_infer_response,
    read_stream_response,
    write_infer_request,
    write_infer_response,
    write_stream_response,
)
from xpuruntime.serving.protocol.wire import varint

pytest.importorskip("google.protobuf", reason="needs protobuf, to compare our codec with")
from google.protobuf import json_format
from google.protobuf.message import DecodeError

CLASSES = message_classes()
QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def test_dictionaries_come_back_with_what_was_sent():
    config = {
        "name": "m",
        "version_policy": {"specific": {"versions": [1, 2**40]}},
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 3], "optional": True}],
        "dynamic_batching": {"priority_queue_policy": {2: {"timeout_action": "DELAY", "max_queue_size": 4}}},
        "parameters": {"a": {"string_value": "b"}},
    }
    sent = encode("ModelConfigResponse", {"config": {**config, "max_batch_size": 0, "unknown": 1, "runtime": None}})
    assert decode("ModelConfigResponse", sent) == {"config": config}
    parameters = {"a": {"bool_param": False}, "b": {"int64_param": -5}}
    assert decode("RepositoryModelLoadRequest", encode("RepositoryModelLoadRequest", {"parameters": parameters})) == {
        "parameters": parameters
    }


def test_messages_without_tensors_are_short_and_protobuf_reads_them():
    with pytest.raises(ServingError, match="at most 65536 are read"):
        decode("ModelReadyRequest", b"\x12\x00" * (1 << 16))
    with pytest.raises(ServingError, match="the message is malformed"):
        decode("ModelReadyRequest", b"\xff\xff")


def test_a_client_may_register_the_same_messages_beside_it():
    from google.protobuf import descriptor_pb2, descriptor_pool

    CLASSES["ModelInferRequest"]()
    file = descriptor_pb2.FileDescriptorProto(name="grpc_service.proto", package="inference", syntax="proto3")
    file.message_type.add(name="ModelInferRequest")
    assert descriptor_pool.Default().AddSerializedFile(file.SerializeToString()) is not None


def array(datatype: str) -> np.ndarray:
    if datatype == "BYTES":
        return np.array([b"", b"a" * 300, b"\xff\0"], object)
    kind = DATATYPES[datatype].dtype
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return np.array([limits.min, 1, limits.max], kind)
    return np.array([0, 1, 1], kind)


def request_of(datatype: str) -> InferRequest:
    tensor = InferTensor("x", datatype, (1, 3), array(datatype).reshape(1, 3), {"p": 1})
    return InferRequest(
        "model", [tensor], "3", "id 7", [RequestedOutput("y", {"own": "v"}), RequestedOutput("z")],
        {"b": True, "i": -5, "u": 2**63, "s": "text", "d": 1.5, "priority": 2},
    )  # fmt: skip


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_infer_requests_are_those_of_protobuf_both_ways(datatype, raw):
    ours = request_of(datatype)
    if DATATYPES[datatype].only_raw and not raw:
        with pytest.raises(ServingError, match="is sent raw"):
            write_infer_request(ours, raw=False)
        return
    theirs = CLASSES["ModelInferRequest"].FromString(write_infer_request(ours, raw=raw))
    read = json_format.MessageToDict(theirs, preserving_proto_field_name=True)
    assert (theirs.model_name, theirs.model_version, theirs.id) == ("model", "3", "id 7")
    assert theirs.parameters["i"].int64_param == -5
    assert theirs.parameters["u"].uint64_param == 2**63
    assert [output["name"] for output in read["outputs"]] == ["y", "z"]
    assert (len(theirs.raw_input_contents) == 1) is raw
    back = read_infer_request(theirs.SerializeToString(), now=0)
    assert back.priority == 2
    assert back.parameters == ours.parameters
    assert [(output.name, dict(output.parameters)) for output in back.outputs] == [("y", {"own": "v"}), ("z", {})]
    (found,) = back.inputs
    assert (found.name, found.datatype, found.shape, found.parameters) == ("x", datatype, (1, 3), {"p": 1})
    np.testing.assert_array_equal(found.data, ours.inputs[0].data, strict=True)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_infer_responses_are_those_of_protobuf_both_ways(datatype):
    ours = InferResponse("m", "1", [InferTensor("y", datatype, (3,), array(datatype))], "id", {"xrt_batch_size": 4})
    theirs = CLASSES["ModelInferResponse"].FromString(write_infer_response(ours))
    assert theirs.outputs[0].name == "y"
    assert list(theirs.outputs[0].shape) == [3]
    assert theirs.parameters["xrt_batch_size"].int64_param == 4
    back = read_infer_response(theirs.SerializeToString())
    np.testing.assert_array_equal(back.outputs[0].data, ours.outputs[0].data, strict=True)
    stream = CLASSES["ModelStreamInferResponse"].FromString(write_stream_response(write_infer_response(ours)))
    assert stream.infer_response.parameters["triton_final_response"].bool_param
    del stream.infer_response.parameters["triton_final_response"]
    assert stream.infer_response == theirs
    assert not stream.error_message


def test_errors_of_a_stream_name_their_request():
    sent = write_stream_response(error="no such model", id="7")
    theirs = CLASSES["ModelStreamInferResponse"].FromString(sent)
    assert (theirs.error_message, theirs.infer_response.id) == ("no such model", "7")
    assert theirs.infer_response.parameters["triton_final_response"].bool_param
    error, response = read_stream_response(sent)
    assert (error, response.id) == ("no such model", "7")


@QUICK
@given(
    values=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20),
    cut=st.integers(0, 20),
    field=st.sampled_from(["int_contents", "int64_contents"]),
)
def test_contents_in_several_parts_are_one_tensor(values, cut, field):
    """Protobuf may send a repeated field in pieces, packed or not, and a message in parts."""
    kind = CLASSES["ModelInferRequest"]
    parts = []
    for piece in (values[:cut], values[cut:]):
        part = kind.InferInputTensor()
        getattr(part.contents, field).extend(piece)
        parts.append(part.SerializeToString())
    head = kind.InferInputTensor(
        name="x", datatype="INT32" if field == "int_contents" else "INT64", shape=[len(values)]
    ).SerializeToString()
    inner = head + parts[0] + parts[1]
    (found,) = read_infer_request(bytes((5 << 3 | 2,)) + varint(len(inner)) + inner).inputs
    assert found.data.tolist() == values


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_what_protobuf_refuses_is_refused(data):
    """Mutations of a message: where protobuf cannot read it, we neither; where we can, we read the same."""
    kind = CLASSES["ModelInferRequest"]
    message = bytearray(write_infer_request(request_of("INT32"), raw=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.integers(0, 255))
    cut = bytes(message[: data.draw(st.integers(0, len(message)))])
    try:
        theirs = kind.FromString(cut)
    except DecodeError:
        theirs = None
    try:
        ours = read_infer_request(cut)
    except ServingError:
        return
    assert theirs is not None
    assert (ours.model, ours.version, ours.id) == (theirs.model_name, theirs.model_version, theirs.id)
    assert [input_.name for input_ in ours.inputs] == [input_.name for input_ in theirs.inputs]
    assert [list(input_.shape) for input_ in ours.inputs] == [list(input_.shape) for input_ in theirs.inputs]
    assert ours.parameters.keys() == theirs.parameters.keys()


def test_raw_contents_are_views_of_the_message():
    message = write_infer_request(request_of("FP32"))
    (found,) = read_infer_request(message).inputs
    assert not found.data.flags.owndata
    assert np.shares_memory(found.data, np.frombuffer(message, np.uint8))


def sent(change) -> bytes:
    theirs = CLASSES["ModelInferRequest"].FromString(write_infer_request(request_of("FP32")))
    change(theirs)
    return theirs.SerializeToString()


def both(one):
    one.inputs[0].contents.fp32_contents.append(1)


def wrong_field(one):
    del one.raw_input_contents[:]
    one.inputs[0].contents.int_contents.extend([1, 2, 3])


def out_of_range(one):
    del one.raw_input_contents[:]
    one.inputs[0].datatype = "INT8"
    one.inputs[0].contents.int_contents.extend([1, 2, 128])


def twice(one):
    one.inputs.add().CopyFrom(one.inputs[0])
    one.raw_input_contents.append(one.raw_input_contents[0])


def too_few(one):
    one.inputs.add(name="w", datatype="FP32", shape=[1])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (both, "has contents, and the message has raw_input_contents"),
        (wrong_field, "is FP32 and has int_contents"),
        (out_of_range, "an element that INT8 cannot hold"),
        (twice, "the input 'x' is given twice"),
        (too_few, "raw_input_contents has 1 elements for 2 tensors"),
        (lambda one: one.inputs[0].shape.append(2), "has 12 bytes, and FP32 of shape"),
        (lambda one: one.inputs[0].shape.__setitem__(0, -1), "state the size of each dimension"),
        (lambda one: setattr(one.inputs[0], "datatype", "FP8"), "which the protocol does not have"),
        (lambda one: one.parameters["e"].SetInParent(), "the parameter 'e' has no value"),
        (lambda one: one.inputs[0].parameters["shared_memory_region"].SetInParent(), "has no value"),
        (lambda one: setattr(one.parameters["sequence_id"], "int64_param", 4), "extension for sequences"),
        (lambda one: one.outputs.add(name="y"), "the output 'y' is given twice"),
        (lambda one: one.raw_input_contents.__delitem__(0), "has 0 elements, and the shape"),
    ],
)
def test_requests_that_do_not_fit_are_refused(change, match):
    with pytest.raises(ServingError, match=match):
        read_infer_request(sent(change))
