# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Bodies: bounded, compressed ones, responses before they are sent, and large ones that threads of the core receive."""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from xpuruntime import _core
from xpuruntime.errors import XpuRuntimeError
from xpuruntime.runtime.cpu_and_memory import cpu_cores
from xpuruntime.serving.messages import ServingError, Status
from xpuruntime.serving.protocol.rest import error_body
from xpuruntime.serving.transport.gate import ClientGone

if TYPE_CHECKING:
    from xpuruntime.serving.http.direct import Head
    from xpuruntime.serving.protocol.rest import RestResponse
    from xpuruntime.serving.transport.gate import HeldBytes

#: How many times longer than its compressed form a body may be. Deflate reaches 1032 at most, with zeros.
MAX_RATIO = 200
_SMALL = 1 << 20
_GZIP = 16 + zlib.MAX_WBITS


#: What helps where a body is too long.
SEND_LESS = "send less, or raise max_body of the server for inference"


def decompress(body: bytes, encoding: str, limit: int, fix: str = SEND_LESS) -> bytes:
    """Return a body without its ``Content-Encoding``."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in ("gzip", "deflate"):
        raise ServingError(
            Status.INVALID_ARGUMENT, f"the Content-Encoding is {encoding[:40]!r}. Fix: gzip, deflate or identity"
        )
    most = min(limit, max(_SMALL, MAX_RATIO * len(body)))
    reader = zlib.decompressobj(_GZIP if name == "gzip" else zlib.MAX_WBITS)
    try:
        decompressed = reader.decompress(body, most + 1)
    except zlib.error as error:
        raise _corrupt(name, str(error)) from None
    if len(decompressed) > most:
        reason = f"over {limit} bytes" if most == limit else f"over {MAX_RATIO} times as long"
        fix = fix if most == limit else "send it plain"
        raise ServingError(Status.TOO_LARGE, f"the body grows to {reason} as {name} is undone. Fix: {fix}")
    if not reader.eof:
        raise _corrupt(name, "the data are truncated")
    if reader.unused_data:
        raise _corrupt(name, f"{len(reader.unused_data)} bytes follow the data")
    return decompressed


def _corrupt(name: str, reason: str) -> ServingError:
    return ServingError(Status.INVALID_ARGUMENT, f"the body is not {name}: {reason}. Fix: compress all of the body")


def response_encoding(accepted: str) -> str:
    """Return the encoding of a response for an ``Accept-Encoding``.

    Only where it names one of gzip and deflate, and nothing else, is that used: so clients ask for it that want it.
    Lists, such as browsers and curl send them, say what the client could read, and get what costs no time.
    """
    name = accepted.strip().lower()
    return name if name in ("gzip", "deflate") else ""


def compress(chunks: Sequence[bytes | memoryview], encoding: str) -> bytes:
    """Return chunks as one compressed body."""
    writer = zlib.compressobj(wbits=_GZIP if encoding == "gzip" else zlib.MAX_WBITS)
    return b"".join([*map(writer.compress, chunks), writer.flush()])


#: Bytes per second that a body must come with, after the first seconds, and that a response must be taken with.
SLOWEST = 16 * 1024


async def read_body(
    receive: Callable[[], Awaitable[Any]],
    length: int | None,
    limit: int,
    patience: float,
    held: HeldBytes,
    fix: str = SEND_LESS,
) -> bytes:
    """Return the body of a request."""
    too_large = ServingError(Status.TOO_LARGE, f"the body is longer than {limit} bytes. Fix: {fix}")
    if length is not None and length > limit:
        raise too_large
    start, received = time.monotonic(), 0
    try:
        async with asyncio.timeout(patience) as watch:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                body: bytes = message.get("body", b"")
                if len(body) > limit:
                    raise too_large
                held.take(len(body))
                return body
            parts: list[bytes] = []
            while True:
                if message["type"] != "http.request":
                    raise ClientGone
                parts.append(message.get("body", b""))
                received += len(parts[-1])
                if received > limit:
                    raise too_large
                held.take(len(parts[-1]))
                if not message.get("more_body", False):
                    return b"".join(parts)
                left = seconds_left(patience, received, time.monotonic() - start)
                watch.reschedule(asyncio.get_running_loop().time() + left)
                message = await receive()
    except TimeoutError:
        raise too_slow(received, time.monotonic() - start) from None


def seconds_left(seconds: float, received: int, elapsed: float) -> float:
    """Return how much longer a body may take: `seconds`, and one more for each 16 KiB that came."""
    return seconds + received / SLOWEST - elapsed


def too_slow(received: int, seconds: float) -> ServingError:
    """Return the error for a body of which so many bytes came in so many seconds."""
    return ServingError(
        Status.REQUEST_TIMEOUT,
        f"the body came too slowly: {received} bytes after {seconds:.1f} s. Fix: send it at once",
    )


class WrongMethodError(ServingError):
    """The path is there, and takes another method."""

    def __init__(self, path: str, allowed: str) -> None:
        super().__init__(Status.INVALID_ARGUMENT, f"{path[:80]} takes {allowed}. Fix: use that method")
        self.allowed = allowed


JSON = (b"content-type", b"application/json")
CLOSE = (b"connection", b"close")
_BINARY = (b"content-type", b"application/octet-stream")
#: Errors that may come before all of a body was read.
_UNREAD = (Status.TOO_LARGE, Status.REQUEST_TIMEOUT, Status.UNAUTHENTICATED, Status.RESOURCE_EXHAUSTED)
#: Chunks of a response that is not longer are joined into one write.
ONE_WRITE = 256 << 10


@dataclass(slots=True)
class Answer:
    """A response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    chunks: Sequence[bytes | memoryview]

    @property
    def length(self) -> int:
        """Length of the body in bytes."""
        return sum(map(len, self.chunks))


def pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield a body in pieces of at most `ONE_WRITE` bytes, between which others have their turn."""
    parts: list[bytes | memoryview] = []
    size = 0
    for chunk in chunks:
        view = memoryview(chunk)
        for at in range(0, len(view), ONE_WRITE):
            part = view[at : at + ONE_WRITE]
            if size + len(part) > ONE_WRITE:
                yield parts[0] if len(parts) == 1 else b"".join(parts)
                parts, size = [], 0
            parts.append(part)
            size += len(part)
    if parts:
        yield parts[0] if len(parts) == 1 else b"".join(parts)


def outputs_answer(written: RestResponse) -> Answer:
    """Return the response of outputs."""
    if written.json_length is None:
        return Answer(200, [JSON], written.chunks)
    stated = (b"inference-header-content-length", b"%d" % written.json_length)
    return Answer(200, [_BINARY, stated], written.chunks)


def failed_answer(error: ServingError, *, closing: bool) -> Answer:
    """Return the response of an error."""
    headers = [JSON]
    status = error.code.http
    if isinstance(error, WrongMethodError):
        status = 405
        headers.append((b"allow", error.allowed.encode()))
    if error.code is Status.UNAUTHENTICATED:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after)))
    if closing or error.code in _UNREAD:
        headers.append(CLOSE)  # what is left of the body is not read
    return Answer(status, headers, [error_body(str(error))])


#: Bytes to which the tensors behind the JSON are aligned, so that engines can take them as they are.
_ALIGNMENT = 64
#: Threads by default, at most; one for so many processors.
_MOST_THREADS, _PROCESSORS = 4, 4
#: Seconds after which the event loop receives what threads have not; the bodies that threads are given are longer, and
#: what is left of them is not: it counts as received meanwhile.
_QUICK, _LARGE, _LONGEST = 0.1, 64 << 10, 4 << 20
#: Bytes of a body that the event loop receives at a time: a socket may have 6 MB of it, and there are many sockets.
_AT_A_TIME = 256 << 10


class _Connection(Protocol):
    """What the protocols call when a body is there, cannot be taken, or the connection does anything else."""

    def data_received(self, data: bytes) -> None: ...
    def give_way(self) -> None: ...
    def body_handed_back(self, receiver: BodyReceiver, size: int) -> None: ...
    def body_received(self, receiver: BodyReceiver) -> None: ...
    def body_failed(self, receiver: BodyReceiver, error: ServingError) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def eof_received(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...


class Forwarding(asyncio.BufferedProtocol):
    """A protocol that passes on what it does not treat itself."""

    def __init__(self, connection: _Connection) -> None:
        self.connection = connection
        for name in ("eof_received", "pause_writing", "resume_writing", "connection_lost"):
            setattr(self, name, getattr(connection, name))


class BodyReceiver(Forwarding):
    """Receives the rest of one body. What follows it stays in the socket."""

    def __init__(
        self, connection: _Connection, head: Head, begin: bytes | memoryview, held: HeldBytes, seconds: float
    ) -> None:
        super().__init__(connection)
        self.head, self.held = head, held
        storage = np.empty(head.length + _ALIGNMENT, np.uint8)  # of which only what has come takes memory
        offset = -(storage.__array_interface__["data"][0] + (head.json_length or 0)) % _ALIGNMENT
        self._buffer = storage.data[offset : offset + head.length]
        self.body = self._buffer.toreadonly()
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._start = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._buffer[: len(begin)] = begin
        self._received = len(begin)

    def watch(self) -> None:
        """Have the rest come in time, from now on."""
        self._start = self._loop.time()
        self._timer = self._loop.call_later(self._seconds, self._look)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - of asyncio
        """Return where the rest of the body goes."""
        return self._buffer[self._received : self._received + _AT_A_TIME]

    def buffer_updated(self, nbytes: int) -> None:
        """Count what has come."""
        self._received += nbytes
        try:
            self.held.take(nbytes)
        except ServingError as error:
            self.connection.body_failed(self, error)
            return
        if self._received == len(self._buffer):
            self.connection.body_received(self)
        elif nbytes == _AT_A_TIME:
            self.connection.give_way()

    def hand_over(self, receiver: _core.SocketReceiver, socket: int) -> None:
        """Have threads receive the rest, which counts as received meanwhile."""
        rest = len(self._buffer) - self._received
        self.held.take(rest)
        try:
            receiver.receive(self, socket, self._buffer[self._received :], _QUICK)
        except BaseException:
            self.held.give_back(rest)
            raise

    def handed_back(self, size: int) -> bool:
        """Take that threads have received so many bytes, and return whether the body is whole."""
        self._received += size
        left = len(self._buffer) - self._received
        self.held.give_back(left)
        return not left

    @property
    def for_threads(self) -> bool:
        """Whether threads may receive the rest."""
        return len(self._buffer) > _LARGE and len(self._buffer) - self._received <= _LONGEST

    @property
    def begun(self) -> memoryview:
        """What has come of the body."""
        return self.body[: self._received]

    def stop(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        elapsed = self._loop.time() - self._start
        left = seconds_left(self._seconds, self._received, elapsed)
        if left > 0.001:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self.connection.body_failed(self, too_slow(self._received, elapsed))


class BodyThreads:
    """Threads of the core that receive bodies, for the connections of one event loop."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._receiver: _core.SocketReceiver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, body: BodyReceiver, socket: int) -> bool:
        """Have the rest of a body received and `body_handed_back` called; return whether that is so."""
        if not self.count or not body.for_threads:
            return False
        try:
            if self._receiver is None:
                self._receiver, self._loop = _core.SocketReceiver(self.count), asyncio.get_running_loop()
                self._loop.add_reader(self._receiver.fileno(), self._take, self._receiver)
            body.hand_over(self._receiver, socket)
        except XpuRuntimeError:  # no file descriptor is left, or no room for all of it: it is taken as it comes
            return False
        return True

    def _take(self, receiver: _core.SocketReceiver) -> None:
        for body, size in receiver.received():
            body.connection.body_handed_back(body, size)

    def close(self) -> None:
        """End the threads."""
        receiver, self._receiver, self.count = self._receiver, None, 0
        if receiver is not None and self._loop is not None:
            self._loop.remove_reader(receiver.fileno())
            receiver.close()


def default_threads() -> int:
    """Return how many threads the processors of this process are enough for."""
    return min(_MOST_THREADS, cpu_cores().logical // _PROCESSORS)
