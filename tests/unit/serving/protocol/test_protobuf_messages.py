# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Our codec against protobuf's: equal messages both ways, and the same verdict on what is none."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protobuf_descriptors import message_classes

from xpuruntime.serving.messages import InferRequest, InferResponse, InferTensor, RequestedOutput
from xpuruntime.serving.protocol import grpc_codec
from xpuruntime.serving.protocol.datatypes import DATATYPES
from xpuruntime.serving.protocol.grpc_codec import (
    read_infer_request,
    read_infer_response,
    read_stream_response,
    write_infer_request,
    write_infer_response,
    write_stream_response,
)
from xpuruntime.serving.protocol.grpc_messages import METHODS
from xpuruntime.serving.protocol.schema import Enum, Field, Message, decode, encode
from xpuruntime.serving.status import ServingError

pytest.importorskip("google.protobuf", reason="needs protobuf, to compare our codec with")
from google.protobuf import json_format
from google.protobuf.message import DecodeError

CLASSES = message_classes()
RESPONSES = {"ModelStreamInfer": "ModelStreamInferResponse"}
QUICK = settings(max_examples=40, deadline=None, derandomize=True)


def class_of(method: str, *, response: bool) -> type:
    if not response:
        names = {"ModelStreamInfer": "ModelInferRequest"}
        return CLASSES[names.get(method, f"{method}Request")]
    return CLASSES[RESPONSES.get(method, f"{method}Response")]


LIMITS = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}


def values_of(kind: object, depth: int = 0) -> st.SearchStrategy:
    if isinstance(kind, Message):
        return values_of_message(kind, depth + 1)
    if isinstance(kind, Enum):
        return st.sampled_from(sorted(kind))
    if kind in LIMITS:
        return st.integers(*LIMITS[kind])
    return {
        "bool": st.booleans(),
        "string": st.text(max_size=8),
        "bytes": st.binary(max_size=8),
        "float": st.floats(width=32, allow_nan=False),
        "double": st.floats(allow_nan=False),
    }[kind]


def values_of_field(field: Field, depth: int) -> st.SearchStrategy:
    one = values_of(field.kind, depth)
    if field.key:
        return st.dictionaries(values_of(field.key), one, max_size=2)
    return st.lists(one, max_size=3) if field.repeated else one


def values_of_message(message: Message, depth: int = 0) -> st.SearchStrategy:
    choices = [name for name, field in message.items() if field.oneof]
    plain = {name: values_of_field(field, depth) for name, field in message.items() if not field.oneof}
    if not choices:
        return st.fixed_dictionaries({}, optional=plain)
    chosen = st.sampled_from(choices).flatmap(
        lambda name: st.fixed_dictionaries({name: values_of_field(message[name], depth)}, optional=plain)
    )
    return chosen if len(choices) == len(message) else st.one_of(st.fixed_dictionaries({}, optional=plain), chosen)


def fill(made: object, message: Message, value: dict) -> None:
    """Set the fields of a message of protobuf as those of a dictionary."""
    for name, one in value.items():
        field = message[name]
        target = getattr(made, name)
        if field.key:
            for key, item in one.items():
                if isinstance(field.kind, Message):
                    target[key].SetInParent()
                    fill(target[key], field.kind, item)
                else:
                    target[key] = item
        elif isinstance(field.kind, Message):
            if field.repeated:
                for item in one:
                    fill(target.add(), field.kind, item)
            else:
                target.SetInParent()
                fill(target, field.kind, one)
        elif field.repeated:
            target.extend(field.kind[item] if isinstance(field.kind, Enum) else item for item in one)
        else:
            setattr(made, name, field.kind[one] if isinstance(field.kind, Enum) else one)


SIDES = [(method, response) for method in METHODS for response in (False, True)]


@pytest.mark.parametrize(("method", "response"), SIDES, ids=[f"{m}-{'out' if r else 'in'}" for m, r in SIDES])
def test_messages_are_those_of_protobuf_both_ways(method, response):
    message = METHODS[method][response]
    kind = class_of(method, response=response)

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(value=values_of_message(message))
    def check(value):
        theirs = kind()
        fill(theirs, message, value)
        assert kind.FromString(encode(message, value)) == theirs
        again = kind()
        fill(again, message, decode(message, memoryview(theirs.SerializeToString())))
        assert again == theirs

    check()


@pytest.mark.parametrize("method", METHODS)
def test_every_field_of_ours_is_in_the_table_of_theirs(method):
    for response in (False, True):
        kind = class_of(method, response=response).DESCRIPTOR
        for name, field in METHODS[method][response].items():
            assert kind.fields_by_name[name].number == field.number


def array(datatype: str) -> np.ndarray:
    if datatype == "BYTES":
        return np.array([b"", b"a" * 300, b"\xff\0"], object)
    kind = DATATYPES[datatype].dtype
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return np.array([limits.min, 1, limits.max], kind)
    return np.array([0, 1, 1], kind)


def request_of(datatype: str) -> InferRequest:
    made = InferTensor("x", datatype, (1, 3), array(datatype).reshape(1, 3), {"p": 1})
    return InferRequest(
        "model", [made], "3", "id 7", [RequestedOutput("y", {"own": "v"}), RequestedOutput("z")],
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
    assert [one["name"] for one in read["outputs"]] == ["y", "z"]
    assert (len(theirs.raw_input_contents) == 1) is raw
    back = read_infer_request(theirs.SerializeToString(), now=0)
    assert back.priority == 2
    assert back.parameters == ours.parameters
    assert [(one.name, dict(one.parameters)) for one in back.outputs] == [("y", {"own": "v"}), ("z", {})]
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
    (found,) = read_infer_request(bytes((5 << 3 | 2,)) + _length(inner) + inner).inputs
    assert found.data.tolist() == values


def _length(data: bytes) -> bytes:
    from xpuruntime.serving.protocol.schema import varint

    return varint(len(data))


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
    assert [one.name for one in ours.inputs] == [one.name for one in theirs.inputs]
    assert [list(one.shape) for one in ours.inputs] == [list(one.shape) for one in theirs.inputs]
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


def test_empty_contents_beside_raw_ones_are_none():
    (found,) = read_infer_request(sent(lambda one: one.inputs[0].contents.SetInParent())).inputs
    assert found.data.shape == (1, 3)


def test_requests_that_differ_in_values_alone_are_read_as_the_first_was():
    def sent(first: float, *, model: str = "m", id: str = "", mask: bool = True) -> bytes:
        inputs = [
            InferTensor("x", "FP32", (2,), np.array([first, 2], np.float32)),
            InferTensor("mask", "BOOL", (1,), np.array([mask])),
        ]
        return write_infer_request(InferRequest(model, inputs, id=id))

    for first in (1.0, 3.0, 5.0):
        for model, id in (("m", ""), ("n", ""), ("m", "a"), ("m", "b")):
            read = read_infer_request(sent(first, model=model, id=id, mask=first > 2))
            assert (read.model, read.id) == (model, id)
            assert read.inputs[0].data.tolist() == [first, 2]
            assert read.inputs[1].data.tolist() == [first > 2]
            assert read.parameters == {}
    bad = sent(1.0)[:-1] + b"\x02"
    with pytest.raises(ServingError, match="neither 0 nor 1"):
        read_infer_request(bad)
    good = sent(1.0)
    for at in range(len(good)):  # no byte between the values is passed over
        changed = good[:at] + bytes((good[at] ^ 1,)) + good[at + 1 :]
        with contextlib.suppress(ServingError):
            first_read = read_infer_request(changed)
            grpc_codec._FORMS.put((len(changed), changed[:48]), None)
            again = read_infer_request(changed)
            assert (first_read.model, [one.name for one in first_read.inputs]) == (
                again.model,
                [one.name for one in again.inputs],
            )
            assert [one.data.tolist() for one in first_read.inputs] == [one.data.tolist() for one in again.inputs]


def test_typed_contents_and_parameters_are_read_anew():
    request = InferRequest(
        "m", [InferTensor("x", "INT32", (2,), np.array([1, 2], np.int32))], parameters={"timeout": 5}
    )
    for now in (1.0, 2.0):
        assert read_infer_request(write_infer_request(request), now).deadline == pytest.approx(now + 5e-6)
        plain = InferRequest("m", [InferTensor("x", "INT32", (2,), np.array([now, 2], np.int32))])
        assert read_infer_request(write_infer_request(plain, raw=False)).inputs[0].data.tolist() == [now, 2]


def test_responses_with_equal_heads_have_their_own_values():
    for value, id in ((1.0, ""), (2.0, ""), (3.0, "seven"), (4.0, "")):
        array = np.full((1, 2), value, np.float32)
        found = read_infer_response(
            write_infer_response(InferResponse("m", "1", [InferTensor("y", "FP32", (1, 2), array)], id))
        )
        assert found.id == id
        np.testing.assert_array_equal(found.outputs[0].data, array)
