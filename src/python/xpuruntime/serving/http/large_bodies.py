# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`BodyReceiver`: the protocol of a connection while a large body comes, straight into one buffer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import numpy as np

from xpuruntime.serving.http.bodies import seconds_left, too_slow
from xpuruntime.serving.status import ServingError

if TYPE_CHECKING:
    from xpuruntime.serving.http.bodies import HeldBytes
    from xpuruntime.serving.http.direct import Head

__all__ = ["BodyReceiver"]

#: Bytes to which the tensors behind the JSON are aligned, so that engines can take them as they are.
_ALIGNMENT = 64


class _Connection(Protocol):
    """What a receiver calls when the body is there, cannot be taken, or the connection does anything else."""

    def body_received(self, receiver: BodyReceiver) -> None: ...
    def body_failed(self, receiver: BodyReceiver, error: ServingError) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def eof_received(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...


class BodyReceiver(asyncio.BufferedProtocol):
    """Receives the rest of one body. What follows it stays in the socket.

    Parameters
    ----------
    connection : Connection
    head : Head
        Its `length` bytes are received.
    begin : bytes or memoryview
        What has come of the body.
    held : HeldBytes
        Counts the bytes as they come.
    seconds : float
        Within which the body must come, and one more for each 16 KiB that came.

    Attributes
    ----------
    body : memoryview
        Read-only, and complete when `body_received` is called.
    """

    def __init__(
        self, connection: _Connection, head: Head, begin: bytes | memoryview, held: HeldBytes, seconds: float
    ) -> None:
        self._connection, self.head, self.held = connection, head, held
        storage = np.empty(head.length + _ALIGNMENT, np.uint8)  # of which only what has come takes memory
        place = -(storage.__array_interface__["data"][0] + (head.json_length or 0)) % _ALIGNMENT
        self._buffer = storage.data[place : place + head.length]
        self.body = self._buffer.toreadonly()
        self._received = 0
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._look)
        self._buffer[: len(begin)] = begin
        self._received = len(begin)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - of asyncio
        """Return where the rest of the body goes."""
        return self._buffer[self._received :]

    def buffer_updated(self, nbytes: int) -> None:
        """Count what has come."""
        self._received += nbytes
        try:
            self.held.take(nbytes)
        except ServingError as error:
            self._connection.body_failed(self, error)
            return
        if self._received == len(self._buffer):
            self._connection.body_received(self)

    def stop(self) -> None:
        """End the timer."""
        self._timer.cancel()

    def _look(self) -> None:
        elapsed = self._loop.time() - self._start
        left = seconds_left(self._seconds, self._received, elapsed)
        if left > 0.001:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._connection.body_failed(self, too_slow(self._received, elapsed))

    def eof_received(self) -> None:
        """Pass it on."""
        self._connection.eof_received()

    def pause_writing(self) -> None:
        """Pass it on."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on."""
        self._connection.connection_lost(exc)
