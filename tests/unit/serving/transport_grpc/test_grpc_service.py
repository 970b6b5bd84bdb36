# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""gRPC: every method answers with the same facts, values and statuses as REST does."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import threading
import time
import types

import numpy as np
import pytest
from served_models import Service
from serving_clients import Client, until

from xpuruntime.serving.messages import InferRequest, InferResponse, InferTensor, RequestedOutput, ServingError
from xpuruntime.serving.protocol.datatypes import DATATYPES, MOST_ITEMS
from xpuruntime.serving.protocol.grpc_messages import decode, encode
from xpuruntime.serving.protocol.infer_messages import (
    read_infer_request,
    read_infer_response,
    read_stream_response,
    write_infer_request,
)
from xpuruntime.serving.server import Server
from xpuruntime.serving.transport.gate import Access
from xpuruntime.serving.transport.options import TransportOptions

grpc = pytest.importorskip("grpc", reason="needs grpc, of the extra serve")
SERVICE = "/inference.GRPCInferenceService/"
ONE = InferTensor("x", "FP32", (1,), np.ones(1, np.float32))


@pytest.fixture(scope="module")
def channel(served):
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(served.server.grpc_address, options) as made:
        yield made


def ask(channel, method: str, timeout: float | None = 20, **asked) -> dict:
    sent = channel.unary_unary(f"{SERVICE}{method}")(encode(f"{method}Request", asked), timeout=timeout)
    return decode(f"{method}Response", sent)


def infer(channel, request: InferRequest, timeout: float | None = 20, **how):
    sent = channel.unary_unary(f"{SERVICE}ModelInfer")(write_infer_request(request, **how), timeout=timeout)
    return read_infer_response(sent)


def refused(call, code: str, match: str) -> None:
    with pytest.raises(grpc.RpcError, match=match) as caught:
        call()
    assert caught.value.code() is getattr(grpc.StatusCode, code)


def test_facts(channel, served):
    assert ask(channel, "ServerLive") == {"live": True}
    assert ask(channel, "ServerReady") == {"ready": True}
    assert ask(channel, "ModelReady", name="digits") == {"ready": True}
    assert ask(channel, "ModelReady", name="broken") == {}
    assert ask(channel, "ServerMetadata")["extensions"] == ["binary_tensor_data", "statistics"]
    assert ask(channel, "ModelMetadata", name="digits", version="1") == served.http.get("/v2/models/digits").json
    config = ask(channel, "ModelConfig", name="digits")["config"]
    assert config == served.http.get("/v2/models/digits/config").json
    stats = ask(channel, "ModelStatistics", name="digits")
    assert stats == served.http.get("/v2/models/digits/stats").json
    assert len(ask(channel, "ModelStatistics")["model_stats"]) == len(served.service.models)
    assert {model["name"] for model in ask(channel, "RepositoryIndex")["models"]} == served.service.models.keys()
    ask(channel, "RepositoryModelLoad", model_name="echo", parameters={"config": {"string_param": "{}"}})
    ask(channel, "RepositoryModelUnload", model_name="echo")
    assert served.service.loaded[-2:] == [("load", "echo", {"config": "{}"}), ("unload", "echo", {})]


def test_readiness_for_kubernetes(channel):
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    assert check(b"", timeout=20) == b"\x08\x01"
    assert check(b"\x0a\x06digits", timeout=20) == b"\x08\x01"
    assert check(b"\x0a\x06broken", timeout=20) == b"\x08\x02"
    refused(lambda: check(b"\x0a\x04none", timeout=20), "NOT_FOUND", "there is no model")


def test_inference_is_that_of_the_session(channel, served):
    image = np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)
    expected = served.service.session.run({"image": image})["logits"]
    for raw in (True, False):
        request = InferRequest("digits", [InferTensor("image", "FP32", image.shape, image)], id="7")
        answer = infer(channel, request, raw=raw)
        assert (answer.model, answer.version, answer.id) == ("digits", "1", "7")
        np.testing.assert_array_equal(answer.outputs[0].data, expected)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_comes_back(channel, datatype):
    kind = DATATYPES[datatype].dtype
    array = np.array([b"", b"ab\xff"], object) if datatype == "BYTES" else np.array([0, 1], kind)
    for raw in (True, False):
        if raw or not DATATYPES[datatype].only_raw:
            answer = infer(channel, InferRequest("echo", [InferTensor(datatype, datatype, (2,), array)]), raw=raw)
            np.testing.assert_array_equal(answer.outputs[0].data, array, strict=True)


@pytest.mark.parametrize(
    ("call", "code", "match"),
    [
        (lambda c: infer(c, InferRequest("none", [ONE])), "NOT_FOUND", "there is no model 'none'"),
        (lambda c: infer(c, InferRequest("full", [ONE])), "RESOURCE_EXHAUSTED", "the queue is full"),
        (lambda c: infer(c, InferRequest("broken", [ONE])), "INTERNAL", "RuntimeError"),
        (lambda c: infer(c, InferRequest("../x", [ONE])), "INVALID_ARGUMENT", "cannot be the name of a model"),
        (lambda c: infer(c, InferRequest("", [ONE])), "INVALID_ARGUMENT", "cannot be the name of a model"),
        (
            lambda c: infer(c, InferRequest("slow", [ONE], parameters={"timeout": 20_000})),
            "DEADLINE_EXCEEDED",
            "the deadline is over",
        ),
        (lambda c: infer(c, InferRequest("slow", [ONE]), timeout=0.05), "DEADLINE_EXCEEDED", "(?i)deadline"),
        (
            lambda c: infer(c, InferRequest("echo", [ONE], outputs=[RequestedOutput("y")])),
            "INVALID_ARGUMENT",
            "there is no output 'y'",
        ),
        (lambda c: ask(c, "ModelMetadata", name="none"), "NOT_FOUND", "there is no model"),
        (lambda c: ask(c, "ModelMetadata"), "INVALID_ARGUMENT", "cannot be the name"),
        (lambda c: c.unary_unary(f"{SERVICE}ModelInfer")(b"\xff", timeout=20), "INVALID_ARGUMENT", "is malformed"),
        (lambda c: c.unary_unary(f"{SERVICE}LogSettings")(b"", timeout=20), "UNIMPLEMENTED", "LogSettings is not"),
        (
            lambda c: c.unary_unary(f"{SERVICE}SystemSharedMemoryStatus")(b"", timeout=20),
            "UNIMPLEMENTED",
            "shared memory lets a client",
        ),
        (lambda c: c.unary_unary(f"{SERVICE}Nothing")(b"", timeout=20), "UNIMPLEMENTED", "Method not found"),
        (
            lambda c: c.unary_unary(f"{SERVICE}ModelInfer")(bytes(5 << 20), timeout=20),
            "RESOURCE_EXHAUSTED",
            "larger than max",
        ),
    ],
)
def test_wrong_calls_say_why(channel, call, code, match):
    refused(lambda: call(channel), code, match)


def test_a_call_that_is_cancelled_takes_its_request_out_of_the_queue(channel, served):
    before = len(served.service.waiting)
    sent = write_infer_request(InferRequest("slow", [ONE]))
    call = channel.unary_unary(f"{SERVICE}ModelInfer").future(sent, timeout=20)
    end = time.monotonic() + 120
    while len(served.service.waiting) == before and time.monotonic() < end:
        time.sleep(0.005)
    call.cancel()
    while not served.service.waiting[-1].cancelled() and time.monotonic() < end:
        time.sleep(0.005)
    assert served.service.waiting[-1].cancelled()


def test_a_stream_is_answered_in_order_and_goes_on_after_a_failure(channel):
    models = ["echo", "none", "echo", "full", "two.words-x_1"]
    requests = [write_infer_request(InferRequest(model, [ONE], id=str(at))) for at, model in enumerate(models)]
    answers = list(channel.stream_stream(f"{SERVICE}ModelStreamInfer")(iter(requests), timeout=20))
    read = [read_stream_response(answer) for answer in answers]
    assert [response.id for _, response in read] == ["0", "1", "2", "3", "4"]
    assert [error.split(".")[0] for error, _ in read] == [
        "", "there is no model 'none' ", "", "the queue is full", ""
    ]  # fmt: skip
    assert read[0][1].outputs[0].data.tolist() == [1.0]


def test_a_stream_that_is_cancelled_takes_its_requests_out_of_the_queue(channel, served):
    before = len(served.service.waiting)
    event = threading.Event()

    def requests():
        for _ in range(3):
            yield write_infer_request(InferRequest("slow", [ONE]))
        event.wait(20)

    call = channel.stream_stream(f"{SERVICE}ModelStreamInfer")(requests(), timeout=20)
    end = time.monotonic() + 120
    while len(served.service.waiting) < before + 3 and time.monotonic() < end:
        time.sleep(0.005)
    call.cancel()
    event.set()
    futures = served.service.waiting[before:]
    while not all(future.cancelled() for future in futures) and time.monotonic() < end:
        time.sleep(0.005)
    assert len(futures) == 3
    assert all(future.cancelled() for future in futures)


def test_messages_of_too_many_fields_are_refused(channel):
    for method, unknown in (("ModelInfer", MOST_ITEMS), ("ModelReady", 30_000)):
        message = b"\xa2\x06\x00" * unknown + b"\x08\x01"
        call = channel.unary_unary(f"{SERVICE}{method}")
        refused(
            lambda call=call, sent=message: call(sent, timeout=60),
            "INVALID_ARGUMENT",
            r"more than .* fields|at most 65536 are read",
        )
    health = channel.unary_unary("/grpc.health.v1.Health/Check")
    refused(lambda: health(b"\xa2\x06\x00" * 30_000, timeout=60), "INVALID_ARGUMENT", "at most 65536 are read")


def test_a_message_of_too_many_tensors_is_refused(channel):
    for field in (b"\x2a\x00", b"\x32\x00", b"\x3a\x00"):
        with pytest.raises(ServingError, match=r"more than .* tensors together"):
            read_infer_request(b"\x0a\x01m" + field * (MOST_ITEMS // 64))
        call = channel.unary_unary(f"{SERVICE}ModelInfer")
        refused(
            lambda call=call, sent=field * MOST_ITEMS: call(sent, timeout=60), "INVALID_ARGUMENT", "tensors together"
        )


def test_a_message_that_is_refused_is_let_go_of(channel):
    """The call keeps the error that ends it: no frame that has the message is left with that in a cycle."""
    message = write_infer_request(
        InferRequest("full", [InferTensor("x", "UINT8", (1 << 16,), np.zeros(1 << 16, np.uint8))])
    )
    gc.collect()
    gc.disable()
    try:
        refused(
            lambda: channel.unary_unary(f"{SERVICE}ModelInfer")(message, timeout=20), "RESOURCE_EXHAUSTED", "is full"
        )
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [
            (frame.f_code.co_name, name)
            for frame in gc.garbage
            if isinstance(frame, types.FrameType) and "xpuruntime" in frame.f_code.co_filename
            for name, held in frame.f_locals.items()
            if isinstance(held, (bytes, memoryview, InferRequest)) and held
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []


def test_http_and_grpc_have_one_limit_for_what_is_held(service):
    """A request that waits holds its message; once it is answered, the next one is let in."""
    wide = InferTensor("x", "FP32", (500,), np.zeros(500, np.float32))
    sent = write_infer_request(InferRequest("slow", [wide]))
    options = TransportOptions(max_buffered=3000)
    with (
        Server(service, http="127.0.0.1:0", grpc="127.0.0.1:0", options=options) as server,
        grpc.insecure_channel(server.grpc_address) as channel,
    ):
        call, client = channel.unary_unary(f"{SERVICE}ModelInfer"), Client(server.http_address)
        stated = {"name": "x", "datatype": "FP32", "shape": [500], "parameters": {"binary_data_size": 2000}}
        head = json.dumps({"inputs": [stated]}).encode()

        def over_http(model):
            length = {"Inference-Header-Content-Length": str(len(head))}
            return client.post(f"/v2/models/{model}/infer", head + bytes(2000), **length).status

        before = len(service.waiting)
        waiting = call.future(sent, timeout=60)
        assert until(lambda: len(service.waiting) > before)
        refused(lambda: call(sent, timeout=60), "RESOURCE_EXHAUSTED", "have more than 3000 bytes")
        answers = list(channel.stream_stream(f"{SERVICE}ModelStreamInfer")(iter([sent]), timeout=60))
        assert "have more than 3000 bytes" in read_stream_response(answers[0])[0]
        assert over_http("slow") == 429
        waiting.cancel()
        assert until(lambda: over_http("two.words-x_1") == 200)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


class Wide(Service):
    """Answers each request with 24 MiB."""

    def _echo(self, request: InferRequest) -> InferResponse:
        return InferResponse("echo", "1", [InferTensor("y", "FP32", (6 << 20,), np.zeros(6 << 20, np.float32))])


def test_a_client_that_takes_nothing_is_closed_and_what_it_holds_counts():
    """It lets the server send all, and reads nothing."""
    sent = write_infer_request(InferRequest("echo", [ONE]))
    fields = {":method": "POST", ":scheme": "http", ":path": f"{SERVICE}ModelInfer", ":authority": "a"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    head = b"".join(b"\0%c%b%c%b" % (len(key), key.encode(), len(one), one.encode()) for key, one in fields.items())
    window = (2**31 - 1).to_bytes(4, "big")
    message = b"\0" + len(sent).to_bytes(4, "big") + sent
    own, options = Wide(), TransportOptions(max_buffered=40 << 20, response_seconds=1.0)
    with (
        contextlib.closing(own),
        Server(own, http=None, grpc="127.0.0.1:0", options=options) as server,
        grpc.insecure_channel(server.grpc_address, [("grpc.max_receive_message_length", -1)]) as channel,
        socket.socket() as stuck,
    ):
        host, _, port = server.grpc_address.rpartition(":")
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect((host, int(port)))
        stuck.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"\0\4" + window))
        stuck.sendall(frame(8, 0, 0, (2**31 - 1 - 65535).to_bytes(4, "big")))
        stuck.sendall(frame(1, 4, 1, head) + frame(0, 1, 1, message))
        call = channel.unary_unary(f"{SERVICE}ModelInfer")

        def let_in() -> bool:
            with contextlib.suppress(grpc.RpcError):
                return bool(call(sent, timeout=60))
            return False

        assert until(lambda: own.requests)
        refused(lambda: call(sent, timeout=60), "RESOURCE_EXHAUSTED", "all requests together have more")
        assert until(let_in, 60)


def test_messages_that_do_not_come_make_others_wait_for_a_turn_only(service, monkeypatch):
    """Beyond some such calls further ones are refused: what has come of their messages is counted nowhere."""
    from xpuruntime.serving.transport import grpc_handlers

    monkeypatch.setattr(grpc_handlers, "_MOST_LATE", 3)
    sent, end = write_infer_request(InferRequest("echo", [ONE])), threading.Event()

    def nothing():
        end.wait(60)
        yield from ()

    with (
        Server(service, http=None, grpc="127.0.0.1:0") as server,
        grpc.insecure_channel(server.grpc_address) as channel,
    ):
        silent = channel.stream_unary(f"{SERVICE}ModelInfer")
        waiting = [silent.future(nothing(), timeout=60) for _ in range(5)]
        assert until(lambda: sum(call.done() for call in waiting) == 2)
        codes = [call.code().name for call in waiting if call.done()]
        assert codes == ["RESOURCE_EXHAUSTED"] * 2
        assert "messages of 3 calls are slow to come" in next(call for call in waiting if call.done()).details()
        for _ in range(20):
            assert infer(channel, InferRequest("echo", [ONE])).outputs[0].data.tolist() == [1.0]
        end.set()
        empty = next(call for call in waiting if call.code().name != codes[0])
        refused(empty.result, "INVALID_ARGUMENT", "no message")
        again = [silent.future(iter([sent]), timeout=60) for _ in range(5)]
        assert all(read_infer_response(call.result()).outputs[0].data.tolist() == [1.0] for call in again)


def test_calls_without_a_token_take_no_turn_of_those_with_one(service, monkeypatch):
    from xpuruntime.serving.transport import grpc_handlers

    monkeypatch.setattr(grpc_handlers, "_MOST_LATE", 1)
    monkeypatch.setattr(grpc_handlers, "_TURN", 0.2)
    options, end = TransportOptions(access=Access(token="0123456789abcdef")), threading.Event()
    metadata, ready = [("authorization", "Bearer 0123456789abcdef")], encode("ModelReadyRequest", {"name": "echo"})

    def nothing():
        end.wait(60)
        yield from ()

    def late():
        time.sleep(1)
        yield ready

    with (
        Server(service, http=None, grpc="127.0.0.1:0", options=options) as server,
        grpc.insecure_channel(server.grpc_address) as channel,
    ):
        check = channel.stream_unary("/grpc.health.v1.Health/Check")
        waiting = [check.future(nothing(), timeout=60) for _ in range(4)]
        assert until(lambda: sum(call.done() for call in waiting) == 3)
        call = channel.stream_unary(f"{SERVICE}ModelReady")
        assert decode("ModelReadyResponse", call(late(), timeout=20, metadata=metadata)) == {"ready": True}
        end.set()


@pytest.mark.parametrize(
    "garbage", [b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\xff" * 300, b""]
)
def test_what_is_not_grpc_is_refused(channel, served, garbage):
    host, _, port = served.server.grpc_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        while True:
            try:
                if not sock.recv(65536):
                    break
            except ConnectionResetError:
                break
    assert infer(channel, InferRequest("echo", [ONE])).outputs[0].data.tolist() == [1.0]


def test_a_compressed_message_beyond_the_limit_is_refused(channel):
    """4 MiB are allowed, compressed or not; 64 MiB of zeros are 64 KiB on the wire."""
    call = channel.unary_unary(f"{SERVICE}ModelInfer")
    for length, code in ((1 << 20, "INVALID_ARGUMENT"), (64 << 20, "RESOURCE_EXHAUSTED")):
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(length), timeout=20, compression=grpc.Compression.Gzip)
        assert caught.value.code() is getattr(grpc.StatusCode, code)
    assert infer(channel, InferRequest("echo", [ONE])).outputs[0].data.tolist() == [1.0]
