# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Checks over gRPC, with the codec of this package."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from xpuruntime.errors import InputError
from xpuruntime.serving.conformance.result import (
    Checker,
    FailedCheck,
    UnobservableCheck,
    check_outputs,
    need_same,
    probe_inputs,
)
from xpuruntime.serving.messages import InferRequest, InferResponse, InferTensor
from xpuruntime.serving.protocol.datatypes import DATATYPES
from xpuruntime.serving.protocol.grpc_messages import decode, encode
from xpuruntime.serving.protocol.infer_messages import read_infer_response, write_infer_request

_SERVICE = "/inference.GRPCInferenceService/"
#: Codes that say that a request was not judged. Of the others the protocol asks only that they are not OK.
_NOT_JUDGED = ("UNAVAILABLE", "CANCELLED", "UNIMPLEMENTED", "UNAUTHENTICATED")
#: How the details begin of errors that grpcio makes itself, of what is no answer of gRPC.
_OF_CLIENT = (
    "Stream removed",
    "Received http2 header",
    "Received RST_STREAM",
    "No status received",
    "Compression bit set",
    "CLIENT: ",
)
_MOST_RECEIVED = 128 << 20
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:/\[\]@]+):(\d{1,5})")


class GrpcChecks:
    """Checks of one server over gRPC; `close` ends the connection.

    See `HttpClient` for token, seconds and authorities, which are gRPC's own by default. An address that begins with
    ``grpcs://`` has TLS, with ``grpc://`` none, and another one where `encrypted` says so.
    """

    def __init__(
        self,
        address: str,
        token: str | None,
        seconds: float,
        authorities: bytes | None = None,
        *,
        encrypted: bool = False,
    ) -> None:
        import grpc

        self._grpc, self._seconds = grpc, seconds
        limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", _MOST_RECEIVED)]
        target, encrypted = _target(address, encrypted)
        if encrypted:
            self._channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(authorities), limits)
        else:
            self._channel = grpc.insecure_channel(target, limits)
        self._metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        self.checker = Checker("grpc")
        self.server: Mapping[str, Any] = {}

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def call(self, method: str, message: bytes) -> bytes:
        """Send one message, and return the answer; an error of the server is a failed check."""
        code, answer, details = self._send(method, message)
        if code is not None:
            raise FailedCheck(f"{code}: {details}")
        return answer

    def ask(self, method: str, **fields: Any) -> dict[str, Any]:
        """Ask for facts."""
        return decode(f"{method}Response", self.call(method, encode(f"{method}Request", fields)))

    def refused(self, method: str, message: bytes) -> str:
        """Raise unless the server refuses a message."""
        if (code := self._code(method, message)[0]) is None:
            raise FailedCheck("it was answered")
        return code

    def _code(self, method: str, message: bytes) -> tuple[str | None, bytes]:
        code, answer, details = self._send(method, message)
        if code in _NOT_JUDGED or details.startswith(_OF_CLIENT):
            raise FailedCheck(f"{code}: {details}")
        return code, answer

    def _send(self, method: str, message: bytes) -> tuple[str | None, bytes, str]:
        try:
            answer = self._channel.unary_unary(_SERVICE + method)(
                message, timeout=self._seconds, metadata=self._metadata
            )
        except self._grpc.RpcError as error:
            if error.code() is self._grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from None
            return str(error.code().name), b"", str(error.details())
        if answer is None:  # as grpcio reads the status OK without a message, or with one that is cut off
            raise FailedCheck("the status is OK, and no whole message came")
        return None, answer, ""

    def run_server(self) -> None:
        """Check what is there without a model."""
        run = self.checker.run
        run("health: live", lambda: _need(self.ask("ServerLive").get("live"), "live"))
        run("health: ready", lambda: _need(self.ask("ServerReady").get("ready"), "ready"))
        run("server metadata", self._server_metadata)
        unknown = encode("ModelMetadataRequest", {"name": "xrt-oip-check-no-such-model"})
        run("unknown model", lambda: self.refused("ModelMetadata", unknown))
        run("malformed message", lambda: self.refused("ModelInfer", b"\xff\xff"))

    def _server_metadata(self) -> str:
        self.server = self.ask("ServerMetadata")
        if "name" not in self.server:
            raise FailedCheck("the server has no name")
        return f"{self.server['name']} {self.server.get('version', '')}"

    def run_model(
        self, model: str, shapes: Mapping[str, Sequence[int]], of_rest: InferResponse | None
    ) -> InferResponse | None:
        """Check one model, also against the answer that REST gave; return the answer."""
        run = self.checker.run
        facts: dict[str, Any] = {}
        answers: list[InferResponse] = []
        inputs: list[InferTensor] = []

        def metadata() -> None:
            facts.update(self.ask("ModelMetadata", name=model))
            if facts.get("name") != model:
                raise FailedCheck(f"name is {facts.get('name')!r}")
            inputs.extend(probe_inputs(facts, shapes))
            if not inputs:
                raise UnobservableCheck("it states no inputs, so no request can be made")

        def infer(raw: bool) -> str:
            if not raw and any(DATATYPES[input_.datatype].only_raw for input_ in inputs):
                raise UnobservableCheck("an input has no form in typed contents")
            try:
                sent = self.call("ModelInfer", write_infer_request(InferRequest(model, inputs, id="7"), raw=raw))
            except FailedCheck as error:
                raise UnobservableCheck(f"for probe inputs: {error}") from None
            response = read_infer_response(sent)
            check_outputs(response, facts, model)
            if response.id != "7":
                raise FailedCheck(f"the id '7' came back as {response.id!r}")
            for before in [*answers, *([of_rest] if of_rest is not None else [])]:
                need_same(before, response, "the answer")
            answers.append(response)
            return "as over REST" if of_rest is not None else ""

        if not run(f"{model}: metadata", metadata):
            return None
        run(f"{model}: ready", lambda: _need(self.ask("ModelReady", name=model).get("ready"), "ready"))
        run(f"infer {model}: raw contents", lambda: infer(True))
        run(f"infer {model}: typed contents", lambda: infer(False))
        message = write_infer_request(InferRequest(model, inputs))
        short = _with_short_contents(model, inputs)
        run(f"infer {model}: short contents", lambda: self.refused("ModelInfer", short))
        run(f"infer {model}: more contents than inputs", lambda: self._surplus(message + b"\x3a\x00", answers))
        return answers[0] if answers else None

    def _surplus(self, message: bytes, answers: list[InferResponse]) -> str:
        code, answer = self._code("ModelInfer", message)
        if code is not None:
            return code
        if not answers:
            raise UnobservableCheck("it was answered, and there is no answer to compare with")
        need_same(answers[0], read_infer_response(answer), "the answer")
        return "ignored, which the protocol leaves open"


def _with_short_contents(model: str, inputs: list[InferTensor]) -> bytes:
    first, *rest = inputs
    longer = (first.shape[0] + 1, *first.shape[1:]) if first.shape else (2,)
    return write_infer_request(
        InferRequest(model, [InferTensor(first.name, first.datatype, longer, first.data), *rest])
    )


def _target(address: str, encrypted: bool) -> tuple[str, bool]:
    target = address
    for scheme, has in (("grpc://", False), ("grpcs://", True)):
        if address.startswith(scheme):
            target, encrypted = address.removeprefix(scheme), has
    match = _ADDRESS.fullmatch(target)
    if not target.startswith("unix:") and (match is None or not 0 < int(match[1]) < 1 << 16):
        raise InputError(f"{address[:80]!r} is no address of gRPC. Fix: write HOST:PORT, or grpcs://HOST:PORT with TLS")
    return target, encrypted


def _need(value: Any, what: str) -> str:
    if value is not True:
        raise FailedCheck(f"{what} is {value!r}")
    return ""
