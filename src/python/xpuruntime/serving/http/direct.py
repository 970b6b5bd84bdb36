# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`DirectInfer`: inference requests that came whole, answered without a task of the event loop.

Heads are read here only where they are plain. All others, and what is wrong with a head, are left to the parser of the
connection and to `Application`.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from xpuruntime.serving.http.bodies import ONE_WRITE, Answer, failed_answer, outputs_answer, response_encoding
from xpuruntime.serving.messages import ServingError, Status, failure_of
from xpuruntime.serving.monitoring.records import TRACE_HEADERS
from xpuruntime.serving.protocol.datatypes import INLINE_BYTES, NotInline
from xpuruntime.serving.protocol.rest import write_response
from xpuruntime.serving.protocol.rest_request import read_request
from xpuruntime.serving.transport.gate import HeldBytes

if TYPE_CHECKING:
    from xpuruntime.serving.http.application import Application
    from xpuruntime.serving.messages import InferResponse
    from xpuruntime.serving.protocol.rest import RestResponse
    from xpuruntime.serving.protocol.rest_request import RestRequest

_LINE = re.compile(rb"POST /v2/models/([A-Za-z0-9._-]{1,128})(?:/versions/([A-Za-z0-9._-]{1,128}))?/infer HTTP/1\.1")
_HEADER = re.compile(rb"([A-Za-z0-9-]+): ?([\x20-\x7e]*)")
#: Headers that change how a request is read, or how its connection goes on.
_NOT_PLAIN = {
    b"transfer-encoding",
    b"content-encoding",
    b"expect",
    b"upgrade",
    b"te",
    b"trailer",
    b"http2-settings",
} | {
    b"origin",
    b"sec-fetch-site",
}
#: Heads that are remembered, and the longest of them: those of one client are mostly equal.
_MOST_HEADS, _LONGEST_HEAD = 256, 2048


@dataclass(slots=True)
class Head:
    """What a plain head says."""

    model: str
    version: str
    length: int
    json_length: int | None
    authorization: str
    #: All of it, with the empty line.
    raw: bytes
    trace: dict[str, str] | None = None


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that is answered later."""

    asked: RestRequest
    future: Future[InferResponse]
    held: HeldBytes


class DirectInfer:
    """Answers inference requests for the connections of one listener."""

    def __init__(self, application: Application) -> None:
        self._access, self._limit = application.options.access, application.options.max_body
        self._most_json = min(application.options.max_json, INLINE_BYTES)
        self._gate, self._budget, self._respond = application.gate, application.gate.budget, application.respond
        self._refused = application.refused
        self._heads: dict[bytes, Head | None] = {}

    def head(self, head: bytes) -> Head | None:
        """Return what a head says, which has no empty line at its end; `None` where it is not plain."""
        try:
            return self._heads[head]
        except KeyError:
            parsed_head = _read(head, self._limit, self._most_json)
        if len(head) <= _LONGEST_HEAD:
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()
            self._heads[head] = parsed_head
        return parsed_head

    def admit(self, head: Head, received: int) -> HeldBytes | None:
        """Let a request in of whose body so many bytes have come; `None` where it is refused."""
        held = HeldBytes(self._budget)
        try:
            self._access.check(head.authorization)
            held.take(received)
            self._gate.__enter__()
        except ServingError:
            held.__exit__()
            return None
        return held

    def refuse(self, held: HeldBytes, error: ServingError, head: Head | None = None) -> Answer:
        """Return the response to a request that was let in, and whose body could not be taken.

        With its head it is counted and logged, which a request that is queued is anyway.
        """
        self._leave(held)
        if head is not None:
            self._refused(head.model, head.version, error, head.trace)
        return failed_answer(error, closing=self._gate.closed)

    def begin(
        self, head: Head, body: bytes | memoryview, line: bytes, held: HeldBytes | None = None
    ) -> bytes | Answer | Waiting | None:
        """Return the response to a request, or that it is answered later; `None` where it takes long to decode."""
        waiting = False
        entered = held is not None
        rest_request: RestRequest | None = None
        try:
            if not entered:
                self._access.check(head.authorization)
                self._gate.__enter__()
                entered = True
            rest_request = read_request(body, head.model, head.version, head.json_length, time.monotonic(), inline=True)
            rest_request.most = self._limit
            rest_request.request.trace = head.trace
            rest_request.request.write = self._gate.encoder(partial(write_response, rest_request=rest_request))
            outcome = self._respond(rest_request.request)
            if isinstance(outcome, Future):
                if not outcome.done():
                    if held is None:
                        held = HeldBytes(self._budget)
                        try:
                            held.take(len(body))
                        except BaseException:
                            outcome.cancel()
                            raise
                    waiting = True
                    return Waiting(rest_request, outcome, held)
                outcome = outcome.result()
            if held is not None:
                held.__exit__()
            return self._good(outcome, rest_request, line)
        except NotInline:
            return None
        except Exception as error:
            failed = failure_of(error)
            if rest_request is None:
                self._refused(head.model, head.version, failed, head.trace)
            return failed_answer(failed, closing=self._gate.closed)
        finally:
            if rest_request is not None and not waiting:
                rest_request.request.write = None  # which holds the request that holds it
            if entered and not waiting:
                if held is not None:
                    held.__exit__()
                self._gate.__exit__(None, None, None)

    def end(self, waiting: Waiting, line: bytes) -> bytes | Answer:
        """Return the response to a request whose future is done; see `begin`."""
        self._leave(waiting.held)
        waiting.asked.request.write = None
        try:
            return self._good(waiting.future.result(), waiting.asked, line)
        except BaseException as error:
            return failed_answer(failure_of(error), closing=self._gate.closed)

    def give_up(self, waiting: Waiting) -> Answer:
        """Take a request out of its queue, and return what its client gets if it is still there."""
        waiting.future.cancel()
        waiting.asked.request.write = None
        return self.refuse(waiting.held, stopped())

    def _good(self, response: InferResponse, rest_request: RestRequest, line: bytes) -> bytes | Answer:
        written: RestResponse = response.written or write_response(response, rest_request)
        length = written.length
        if length > ONE_WRITE:
            self._budget.check(length)
            return outputs_answer(written)
        if written.json_length is None:
            head = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % length
        else:
            head = (
                b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"
                b"content-length: %d\r\n\r\n" % (written.json_length, length)
            )
        return b"".join((line, head, *written.chunks))

    def _leave(self, held: HeldBytes) -> None:
        held.__exit__()
        self._gate.__exit__(None, None, None)


def stopped() -> ServingError:
    """Return the error of requests that a server has not answered when it stops."""
    return ServingError(Status.UNAVAILABLE, "the server has stopped. Fix: send the request to another one")


def _read(head: bytes, most: int, most_json: int) -> Head | None:
    first, *rest = head.split(b"\r\n")
    line = _LINE.fullmatch(first)
    if line is None or line[1] in (b".", b"..") or line[2] in (b".", b".."):
        return None
    headers: dict[bytes, bytes] = {}
    for header_line in rest:
        header = _HEADER.fullmatch(header_line)
        if header is None or (name := header[1].lower()) in headers:
            return None
        headers[name] = header[2].strip(b" ")
    if not _NOT_PLAIN.isdisjoint(headers) or headers.get(b"connection", b"keep-alive").lower() != b"keep-alive":
        return None
    if response_encoding(headers.get(b"accept-encoding", b"").decode()):
        return None
    length = _number(headers.get(b"content-length", b""))
    if not length or length > most:
        return None
    json_length: int | None = None
    if (stated := headers.get(b"inference-header-content-length")) is not None:
        json_length = _number(stated)
        if not json_length or json_length > length:
            return None
    if (json_length or length) > most_json:
        return None
    trace = None
    if b"traceparent" in headers:
        trace = {name: headers.get(name.encode(), b"").decode() for name in TRACE_HEADERS}
    authorization = headers.get(b"authorization", b"").decode()
    model, version, raw = line[1].decode(), (line[2] or b"").decode(), head + b"\r\n\r\n"
    return Head(model, version, length, json_length, authorization, raw, trace)


def _number(text: bytes) -> int:
    return int(text) if text.isdigit() and len(text) <= 18 else 0
