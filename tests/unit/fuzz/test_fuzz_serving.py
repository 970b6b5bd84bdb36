# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Damaged and hostile requests to a server, HTTP and gRPC: each is answered, and so is a good one after it."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fuzzing import NUMBERS, TEXTS, cases, change_json, controls, flip_bytes

for package in ("uvicorn", "httptools", "grpc"):
    pytest.importorskip(package, reason=f"needs {package}, of the extra serve")

import grpc  # noqa: E402

import xpuruntime as xrt  # noqa: E402
from xpuruntime.serving.messages import InferRequest, InferTensor, RequestedOutput  # noqa: E402
from xpuruntime.serving.models.settings import ServeSettings  # noqa: E402
from xpuruntime.serving.protocol.infer_messages import (  # noqa: E402
    read_infer_response,
    read_stream_response,
    write_infer_request,
)
from xpuruntime.serving.protocol.rest import read_response, write_request  # noqa: E402
from xpuruntime.testing import models  # noqa: E402

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

SERVICE = "/inference.GRPCInferenceService/"
#: A good request is sent after so many damaged ones.
EVERY = 50
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
TEXT = np.array([[b"", b"ab", "가중치".encode()]], object)
NUMBERS_REQUEST = InferRequest(
    "numbers", [InferTensor("x", "FP32", X.shape, X)], id="7",
    parameters={"timeout": 10_000_000, "priority": 0, "xrt_evidence": True},
)  # fmt: skip
TEXT_REQUEST = InferRequest(
    "text", [InferTensor("x", "BYTES", TEXT.shape, TEXT)], outputs=[RequestedOutput("y", {})], version="1"
)
REQUESTS = (NUMBERS_REQUEST, TEXT_REQUEST)
#: What a request may be answered with; 500 and 503 would be faults.
STATUSES = {400, 403, 404, 405, 413, 429, 431, 501, 504}
#: What a client sends is not sent back whole.
LONGEST_REASON = 2000
#: A body that did not come whole has no response.
NONE = 0
CODES = {
    "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "PERMISSION_DENIED",
}  # fmt: skip
FACTS = ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "RepositoryIndex")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("models")
    sources = {"numbers": models.mlp(), "text": models.identity("string")}
    batching = {"max_batch_size": 4, "max_queue_delay_us": 100, "priority_levels": 2}
    settings = ServeSettings.coerce(
        {
            "schema": "xpuruntime.serve/1",
            "http": {"listen": "127.0.0.1:0"},
            "grpc": {"listen": "127.0.0.1:0"},
            "models": {
                name: {"source": str(models.save(model, folder, f"{name}.onnx")), "batching": batching}
                for name, model in sources.items()
            },
        }
    )
    with xrt.serving.Server.from_settings(settings) as made:
        yield made


@pytest.fixture(scope="module")
def expected(server: Any) -> np.ndarray:
    with grpc.insecure_channel(server.grpc_address) as channel:
        answer = channel.unary_unary(f"{SERVICE}ModelInfer")(write_infer_request(NUMBERS_REQUEST), timeout=30)
    return read_infer_response(answer).outputs[0].data.copy()


class Connection:
    """A connection that is kept until the server closes it."""

    def __init__(self, address: str) -> None:
        self.host, _, self.port = address.rpartition(":")
        self.socket: socket.socket | None = None

    def ask(self, sent: bytes, *, ended: bool) -> tuple[int, dict[bytes, bytes], bytes]:
        """Return status, headers and body of the first response; `ended` ends the stream after the request."""
        if self.socket is None:
            self.socket = socket.create_connection((self.host, int(self.port)), timeout=30)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(sent)
        if ended:
            self.socket.shutdown(socket.SHUT_WR)
        data = b""
        while b"\r\n\r\n" not in data:
            part = self._received()
            assert part or ended, "the connection was closed without an answer"
            if not part:
                self.close()
                return NONE, {}, b""  # the body did not come whole, so that there was no request
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        line, *lines = head.split(b"\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        while len(body) < int(headers[b"content-length"]):
            part = self._received()
            assert part, "the connection was closed within an answer"
            body += part
        if ended or headers.get(b"connection") == b"close":
            self.close()
        return int(line.split()[1]), headers, body[: int(headers[b"content-length"])]

    def _received(self) -> bytes:
        assert self.socket is not None
        try:
            return self.socket.recv(1 << 20)
        except ConnectionResetError:
            return b""

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None


def head(path: bytes, headers: dict[bytes, bytes]) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, b"Host: a", *(b"%b: %b" % item for item in headers.items())]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def http_request(rng: random.Random) -> tuple[bytes, bool]:
    """Return a damaged request, and whether more was promised than is sent."""
    request = rng.choice(REQUESTS)
    body, length = write_request(request, binary=rng.random() < 0.6)
    if rng.random() < 0.5:
        split = len(body) if length is None else length
        changed = json.dumps(change_json(json.loads(body[:split]), rng)).encode("utf-8", "surrogatepass")
        body, length = changed + body[split:], length and len(changed)
    if rng.random() < 0.5:
        body = flip_bytes(body, rng)
    headers: dict[bytes, bytes] = {}
    if length is not None:
        stated = b"%d" % length
        if rng.random() < 0.1:
            stated = rng.choice((flip_bytes(stated, rng), b"%d" % rng.choice(NUMBERS), b"%d" % (length + 1), b"0"))
        headers[b"Inference-Header-Content-Length"] = stated.translate(None, b"\r\n\0") or b"-"
    if rng.random() < 0.15:
        packed = rng.choice((gzip.compress(body), zlib.compress(body), body))
        body = flip_bytes(packed, rng) if rng.random() < 0.5 else packed
        headers[b"Content-Encoding"] = rng.choice((b"gzip", b"deflate", b"br", b"gzip, gzip", b"\xff"))
    if rng.random() < 0.1:
        headers[b"Accept-Encoding"] = rng.choice((b"gzip", b"deflate", b"br", b"\x80", b"gzip;q=2"))
    path = b"/v2/models/%b/infer" % request.model.encode()
    if rng.random() < 0.1:
        path = flip_bytes(path, rng).translate(None, b" \r\n\t\0\x7f") or b"/"
        path = bytes(one for one in path if 0x20 < one < 0x80)
    promised = rng.random() < 0.02
    headers[b"Content-Length"] = b"%d" % (len(body) + rng.choice((1, 1000)) if promised else len(body))
    return head(path, headers) + body, promised


def test_damaged_http_requests_are_answered(server: Any, expected: np.ndarray) -> None:
    good, length = write_request(NUMBERS_REQUEST, binary=True)
    good = (
        head(
            b"/v2/models/numbers/infer",
            {b"Content-Length": b"%d" % len(good), b"Inference-Header-Content-Length": b"%d" % (length or 0)},
        )
        + good
    )
    seen = Counter[int]()
    with contextlib.closing(Connection(server.http_address)) as connection:
        for seed, rng in cases():
            sent, promised = http_request(rng)
            status, headers, body = connection.ask(sent, ended=promised)
            seen[status] += 1
            if status not in (200, NONE):
                assert status in STATUSES, f"seed {seed}: {status} {body[:500]!r} to {sent!r}"
                check_reason(json.loads(body)["error"], seed)
            if seed % EVERY == 0:
                status, headers, body = connection.ask(good, ended=False)
                assert status == 200, f"after seed {seed}: {body!r}"
                answer = read_response(body, int(headers[b"inference-header-content-length"]))
                np.testing.assert_array_equal(answer.outputs[0].data, expected, err_msg=f"after seed {seed}")
    print(f"HTTP: {sum(seen.values()):,} bodies, by status: {dict(sorted(seen.items()))}")
    assert {200, 400} <= seen.keys()
    _nothing_is_left(server)


def check_reason(reason: str, seed: int) -> None:
    """Fail unless an error says what to do, and is safe to print."""
    assert any(one in reason for one in (". Fix: ", ". Valid ", "; did you mean ")), f"seed {seed}: {reason}"
    assert len(reason) < LONGEST_REASON, f"seed {seed}: {len(reason)} characters: {reason[:300]}"
    assert not controls(reason), f"seed {seed}: control characters in {reason!r}"


def grpc_request(rng: random.Random) -> tuple[str, bytes]:
    """Return a method and a damaged message."""
    if rng.random() < 0.1:
        method = rng.choice(FACTS)
        text = rng.choice((b"numbers", b"text", rng.choice(TEXTS).encode("utf-8", "surrogatepass")))[:100]
        message = b"\x0a%c%b\x12\x011" % (len(text), text)
    else:
        method = "ModelStreamInfer" if rng.random() < 0.05 else "ModelInfer"
        message = write_infer_request(rng.choice(REQUESTS), raw=rng.random() < 0.5)
    return method, flip_bytes(message, rng) if rng.random() < 0.9 else rng.randbytes(rng.randrange(200))


def test_damaged_grpc_messages_are_answered(server: Any, expected: np.ndarray) -> None:
    seen = Counter[str]()
    good = write_infer_request(NUMBERS_REQUEST)
    with grpc.insecure_channel(server.grpc_address) as channel:
        calls = {name: channel.unary_unary(f"{SERVICE}{name}") for name in ("ModelInfer", *FACTS)}
        stream = channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        for seed, rng in cases():
            method, message = grpc_request(rng)
            try:
                if method == "ModelStreamInfer":
                    answers = [read_stream_response(one) for one in stream(iter([message, good]), timeout=30)]
                    assert len(answers) == 2, f"seed {seed}: {len(answers)} answers to two requests"
                    if answers[0][0]:
                        check_reason(answers[0][0], seed)
                    np.testing.assert_array_equal(answers[1][1].outputs[0].data, expected, err_msg=f"seed {seed}")
                else:
                    calls[method](message, timeout=30)
                seen["OK"] += 1
            except grpc.RpcError as error:
                code, reason = error.code().name, error.details()
                seen[code] += 1
                assert code in CODES, f"seed {seed}: {code}: {reason}"
                check_reason(reason, seed)
            if seed % EVERY == 0:
                answer = read_infer_response(calls["ModelInfer"](good, timeout=30))
                np.testing.assert_array_equal(answer.outputs[0].data, expected, err_msg=f"after seed {seed}")
    print(f"gRPC: {sum(seen.values()):,} messages, by code: {dict(sorted(seen.items()))}")
    assert {"OK", "INVALID_ARGUMENT"} <= seen.keys()
    _nothing_is_left(server)


def _nothing_is_left(server: Any) -> None:
    for slot in server._service.slots.values():
        assert slot.version().batcher.unanswered == 0
