# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Connections of the HTTP listener: uvicorn's, with bounds, and a short way for inference requests that came whole."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from xpuruntime.runtime.telemetry import named_logger
from xpuruntime.serving.http.bodies import CLOSE, ONE_WRITE, SLOWEST, BodyReceiver, Forwarding, pieces
from xpuruntime.serving.http.direct import DirectInfer, Waiting, stopped
from xpuruntime.serving.messages import Status
from xpuruntime.serving.protocol.rest import error_body
from xpuruntime.serving.transport.gate import HeldBytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator
    from concurrent.futures import Future

    from xpuruntime.serving.http.application import Application
    from xpuruntime.serving.http.bodies import Answer, BodyThreads
    from xpuruntime.serving.http.direct import Head
    from xpuruntime.serving.messages import InferResponse, ServingError
    from xpuruntime.serving.transport.gate import BodyBudget
    from xpuruntime.serving.transport.options import TransportOptions

__all__ = ["close_stuck", "connection_class"]

#: Apart from uvicorn's own, which would log every malformed request; the client gets those as errors.
_logger = named_logger("xpuruntime.serving.connections")
_logger.setLevel(logging.ERROR)


#: Bytes behind a request that is being answered which are kept before the socket is read no more.
_LONGEST_KEPT = 64 << 10
#: Bytes that are read at a time where a large body may begin: those of it that come with the head are copied.
_SHORT = 16 << 10
#: Requests of one connection that are answered before others have their turn.
_IN_A_ROW = 16


class ShortReads(Forwarding):
    """Reads little at a time, and no more in one turn of the event loop: others would wait for all that is parsed.

    Most of a large body is left for its `BodyReceiver`.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._buffer = memoryview(bytearray())

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - of asyncio
        """Return where what comes goes."""
        if not self._buffer:
            self._buffer = memoryview(bytearray(_SHORT))
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what has come."""
        self.connection.data_received(bytes(self._buffer[:nbytes]))
        if nbytes == _SHORT:
            self.connection.give_way()


class _Parser(HttpRequestParser):
    """A parser that hands the connection what comes behind a head with which the protocol may change."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except HttpParserUpgrade as end:
            self._connection.head_ended(end.args[0])


class Connection(HttpToolsProtocol):
    """A connection whose heads must come in time and be short.

    A plain inference request that has come whole is answered by `DirectInfer`; while its answer is waited for, what
    comes is kept. All else is fed to the parser.
    """

    #: Of the application that is served; `connection_class` sets all.
    bounds: TransportOptions
    direct: DirectInfer
    threads: BodyThreads
    budget: BodyBudget

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parse_anew()
        self.logger = _logger
        self.thread = threading.get_ident()
        self.waiting: Waiting | None = None
        self.receiving: BodyReceiver | None = None
        #: The protocol between bodies.
        self.short_reads = ShortReads(self)
        self.kept = b""
        #: What the parser got last, and how much of it and of what came before makes no head yet and is no body.
        self.fed, self.unparsed = b"", 0
        #: Whether the parser is within a message.
        self.within = False
        self.used = 0.0
        self.line_headers: Any = None
        self.line = b""
        #: What is left of a long response, and whether the connection is closed behind it.
        self.sending: Iterator[bytes | memoryview] | None = None
        self.left, self.closes = 0, False
        #: What the client has not taken of responses, and how much it was when that was looked at last.
        self.unsent, self.unsent_before = HeldBytes(self.budget), 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.head_timer: asyncio.TimerHandle | None = None
        self.head_length = 0
        super().connection_made(transport)
        transport.set_protocol(self.short_reads)
        if len(self.connections) > self.bounds.max_connections:
            self._refuse(b"503 Service Unavailable", f"there are {self.bounds.max_connections} connections already")
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        waiting, self.waiting = self.waiting, None
        self.kept, self.sending, self.left = b"", None, 0
        if waiting is not None:
            self.direct.give_up(waiting)
        if self.receiving is not None:
            self.direct.refuse(self._received().held, stopped())
        self.unsent.__exit__()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._hold_unsent()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._hold_unsent()
        if self.sending is not None:
            self.loop.call_soon(self._send_on)

    def _hold_unsent(self) -> None:
        self.unsent.__exit__()
        if self.flow.write_paused or self.sending is not None:
            self.unsent.keep(self.left + self.transport.get_write_buffer_size())

    def close_if_stuck(self) -> None:
        """Close the connection of a client that takes nothing; called every `response_seconds`."""
        waits = self.flow.write_paused or self.transport.is_closing()
        before = self.unsent_before
        self.unsent_before = self.left + self.transport.get_write_buffer_size() if waits else 0
        taken = before - self.unsent_before
        if before and self.unsent_before and taken < SLOWEST * self.bounds.response_seconds:
            self.transport.abort()

    def _answering(self) -> bool:
        return self.waiting is not None or self.sending is not None

    def data_received(self, data: bytes) -> None:
        if self._answering():
            self.kept += data
            if len(self.kept) > _LONGEST_KEPT:
                self.flow.pause_reading()
            return
        if self.kept:
            data = self.kept + data
            self.kept = b""
        self._take(data)

    def give_way(self) -> None:
        """Let others have their turn before more is read."""
        if self._reads():
            self.transport.pause_reading()
            self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._reads():
            self.transport.resume_reading()

    def _reads(self) -> bool:
        ours = self.receiving is None or self.transport.get_protocol() is self.receiving  # else threads read
        return ours and not self.flow.read_paused and not self.transport.is_closing()

    def _take(self, data: bytes) -> None:
        """Answer the plain requests at the beginning of what has come, and feed the rest to the parser."""
        cycle = self.cycle
        busy = self.within or not (cycle is None or cycle.response_complete) or self.flow.write_paused
        if busy or self.scheme == "https":  # what is encrypted and not taken yet is not told; see `close_if_stuck`
            self._feed(data)
            return
        for _ in range(_IN_A_ROW):
            end = data.find(b"\r\n\r\n", 0, self.bounds.max_header)
            head = None if end < 0 else self.direct.head(data[:end])
            if head is None:
                self._feed(data)
                return
            end += 4
            stop = end + head.length
            if len(data) < stop:
                self._receive_rest(data, head, end)
                return
            self._stop_timer()
            reply = self.direct.begin(head, data[end:stop], self._good_line())
            if reply is None:
                self._feed(data)
                return
            data = data[stop:]
            if not self._begun(reply, data):
                return
            if not data or self.transport.is_closing():
                return
            if self.sending is not None:
                self.kept = data
                return
            if self.flow.write_paused:
                self._feed(data)
                return
        self.kept = data
        self.loop.call_soon(self._go_on)

    def _feed(self, data: bytes) -> None:
        self.fed = data
        self.unparsed += len(data)
        super().data_received(data)
        if self.unparsed > self.bounds.max_header:
            self._refuse_long_head()

    def _other_protocol(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def head_ended(self, at: int) -> None:
        """Go on in HTTP/1.1, as a server may: the parser left out the body, so the message is parsed again."""
        if not self._other_protocol():
            return
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self._parse_anew()
        self._feed(b"\r\n".join([*lines, b"", self.fed[at:]]))

    def _parse_anew(self) -> None:
        self.parser = _Parser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _begun(self, reply: bytes | Answer | Waiting, rest: bytes = b"") -> bool:
        """Send a response, and return whether there is one: else it comes later, and `rest` is kept until then."""
        if isinstance(reply, Waiting):
            self.waiting, self.kept = reply, rest
            reply.future.add_done_callback(self._done)
            return False
        self._answered(reply)
        return True

    def _receive_rest(self, data: bytes, head: Head, end: int) -> None:
        """Receive the rest of a body: in threads where it comes fast, else here."""
        held = self.direct.admit(head, len(data) - end)
        if held is None:
            self._feed(data)
            return
        self._stop_timer()
        receiver = self.receiving = BodyReceiver(self, head, memoryview(data)[end:], held, self.bounds.body_seconds)
        transport = self.transport
        transport.pause_reading()
        if not self.threads.begin(receiver, transport.get_extra_info("socket").fileno()):
            transport.resume_reading()
            receiver.watch()
            transport.set_protocol(receiver)

    def body_handed_back(self, receiver: BodyReceiver, size: int) -> None:
        """Go on where threads have received a body, or a part of it."""
        if self.receiving is not receiver or self.transport.is_closing():
            return
        self.transport.resume_reading()
        if receiver.handed_back(size):
            self.body_received(receiver)
        else:
            receiver.watch()
            self.transport.set_protocol(receiver)

    def _received(self) -> BodyReceiver:
        """Return the receiver of a body, which is not the protocol any more."""
        receiver, self.receiving = self.receiving, None
        assert receiver is not None
        receiver.stop()
        self.transport.set_protocol(self.short_reads)
        return receiver

    def body_received(self, receiver: BodyReceiver) -> None:
        """Answer the request whose body has come."""
        self._received()
        reply = self.direct.begin(receiver.head, receiver.body, self._good_line(), receiver.held)
        if reply is not None:
            self._begun(reply)
            return
        self._feed(receiver.head.raw)
        self.cycle.receive = _receiving(receiver.body, self.cycle.receive)  # type: ignore[assignment,method-assign]
        self.cycle.more_body = False
        self.within = False
        self._parse_anew()

    def body_failed(self, receiver: BodyReceiver, error: ServingError) -> None:
        """Answer a request whose body came too slowly, or is too much.

        Of one that is too much, the rest is on its way: the application takes it, or its response would be lost.
        """
        self._received()
        if error.code is Status.RESOURCE_EXHAUSTED:
            self.direct.refuse(receiver.held, error)
            self._feed(receiver.head.raw + receiver.begun)
        else:
            self._answered(self.direct.refuse(receiver.held, error, receiver.head))

    def _go_on(self) -> None:
        if self.kept and not self._answering() and not self.transport.is_closing():
            data, self.kept = self.kept, b""
            self._take(data)

    def _done(self, future: Future[InferResponse]) -> None:
        """Answer in the event loop. Called in any thread, and in that of the loop where a request ran there."""
        if threading.get_ident() == self.thread:
            self._finish(future)
            return
        try:
            self.loop.call_soon_threadsafe(self._finish, future)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _finish(self, future: Future[InferResponse]) -> None:
        waiting = self.waiting
        if waiting is None or waiting.future is not future:
            return  # the connection was lost meanwhile
        self.waiting = None
        self._answered(self.direct.end(waiting, self._good_line()))
        self._answer_next()

    def _answered(self, reply: bytes | Answer) -> None:
        self.used = self.loop.time()
        self.server_state.total_requests += 1
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        if isinstance(reply, bytes):
            self.transport.write(reply)
            return
        headers = [*self.server_state.default_headers, *reply.headers, (b"content-length", b"%d" % reply.length)]
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        body = reply.chunks if reply.length <= ONE_WRITE else ()
        self.transport.write(b"".join((STATUS_LINE[reply.status], lines, b"\r\n", *body)))
        if reply.length > ONE_WRITE:
            self.sending, self.left, self.closes = pieces(reply.chunks), reply.length, CLOSE in reply.headers
            self._send_on()
        elif CLOSE in reply.headers:
            self.transport.close()

    def _send_on(self) -> None:
        """Write a piece of a response in each turn of the event loop, as the client takes them."""
        if self.sending is None or self.flow.write_paused:
            return
        piece = next(self.sending, b"")
        self.left -= len(piece)
        if self.left == 0:
            self.sending = None
        self.transport.write(piece)
        self._hold_unsent()
        if self.sending is None and self.closes:
            self.transport.close()
        elif self.sending is None:
            self._answer_next()
        elif not self.flow.write_paused:
            self.loop.call_soon(self._send_on)

    def _answer_next(self) -> None:
        if not self._answering() and not self.transport.is_closing():
            self.flow.resume_reading()
            self._go_on()

    def _good_line(self) -> bytes:
        """Return what good responses begin with; the headers have the date, and change each second."""
        if self.server_state.default_headers is not self.line_headers:
            self.line_headers = self.server_state.default_headers
            self.line = STATUS_LINE[200] + b"".join([b"%b: %b\r\n" % header for header in self.line_headers])
        return self.line

    def timeout_keep_alive_handler(self) -> None:
        left = self.used + self.timeout_keep_alive - self.loop.time()
        if self._answering() or self.receiving is not None:
            left = self.timeout_keep_alive
        if left > 0.001:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """Close; a request that has no answer by now was waited for as long as the server does."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            self._answered(self.direct.give_up(waiting))
        elif self.receiving is not None:
            self._answered(self.direct.refuse(self._received().held, stopped()))
        elif self.sending is None:
            super().shutdown()
            return
        self.closes = True
        if self.sending is None:
            self.transport.close()

    def on_message_begin(self) -> None:
        self.within = True
        self.head_length = 0
        if self.head_timer is None:
            self._expect_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.unparsed = 0
        self._stop_timer()
        if not self.transport.is_closing() and not self._other_protocol():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.unparsed = 0
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self.unparsed, self.within = 0, False
        if not self.transport.is_closing() and not self._other_protocol():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", msg)

    def _count(self, length: int) -> None:
        self.head_length += length
        if self.head_length > self.bounds.max_header:
            self._refuse_long_head()

    def _refuse_long_head(self) -> None:
        reason = f"the head is longer than {self.bounds.max_header} bytes"
        self._refuse(b"431 Request Header Fields Too Large", reason)

    def _expect_head(self) -> None:
        self.head_timer = self.loop.call_later(self.bounds.header_seconds, self._late)

    def _stop_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _late(self) -> None:
        self.head_timer = None
        reason = f"the head of a request did not come within {self.bounds.header_seconds:g} s"
        self._refuse(b"408 Request Timeout", reason)

    def _refuse(self, status: bytes, reason: str) -> None:
        if self.transport.is_closing():
            return
        self._stop_timer()
        body = error_body(f"{reason.removesuffix('.')}. Fix: send requests of HTTP/1.1, whole and short")
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()


def _receiving(body: memoryview, receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
    """Return what an application receives of a body that has come, which uvicorn would copy, and then `receive`."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def following() -> Any:
        return messages.pop() if messages else await receive()

    return following


async def close_stuck(connections: Iterable[Connection], seconds: float) -> None:
    """Close connections whose clients do not take their responses, until this is cancelled."""
    while True:
        await asyncio.sleep(seconds)
        for connection in list(connections):
            connection.close_if_stuck()


def connection_class(application: Application, body_threads: BodyThreads) -> type[asyncio.Protocol]:
    """Return the class of connections of an application, with the bounds of its options."""

    class ApplicationConnection(Connection):
        bounds = application.options
        direct = DirectInfer(application)
        budget = application.gate.budget
        threads = body_threads

    return ApplicationConnection
