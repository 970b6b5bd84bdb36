# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Bodies of requests: bounded in length, and in how slowly they may come."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from xpuruntime.serving.status import ServingError, Status
from xpuruntime.serving.transport.waiting import ClientGone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from xpuruntime.serving.transport.gate import HeldBytes

__all__ = ["SLOWEST", "read_body", "seconds_left", "too_slow"]

#: Bytes per second that a body must come with, after the first seconds, and that a response must be taken with.
SLOWEST = 16 * 1024


async def read_body(
    receive: Callable[[], Awaitable[Any]], length: int | None, limit: int, patience: float, held: HeldBytes
) -> bytes:
    """Return the body of a request.

    Parameters
    ----------
    receive : callable
        Of ASGI.
    length : int, optional
        What ``Content-Length`` states.
    limit : int
        Largest length in bytes.
    patience : float
        Seconds within which the body must come, and one more for each 16 KiB that came.
    held : HeldBytes

    Raises
    ------
    ServingError
        It is too long or too slow, or too much is held already.
    ClientGone
        The connection was closed before its end.
    """
    if length is not None and length > limit:
        raise _too_large(limit)
    with _Patience(patience) as watch:
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            body: bytes = message.get("body", b"")
            if len(body) > limit:
                raise _too_large(limit)
            held.take(len(body))
            return body
        parts: list[bytes] = []
        while True:
            if message["type"] != "http.request":
                raise ClientGone
            parts.append(message.get("body", b""))
            watch.received += len(parts[-1])
            if watch.received > limit:
                raise _too_large(limit)
            held.take(len(parts[-1]))
            if not message.get("more_body", False):
                return b"".join(parts)
            message = await receive()


def _too_large(limit: int) -> ServingError:
    return ServingError(
        Status.TOO_LARGE,
        f"the body is longer than {limit} bytes. Fix: send less, or raise max_body of the server for inference",
    )


def seconds_left(seconds: float, received: int, elapsed: float) -> float:
    """Return how much longer a body may take: `seconds`, and one more for each 16 KiB that came."""
    return seconds + received / SLOWEST - elapsed


def too_slow(received: int, seconds: float) -> ServingError:
    """Return the error for a body of which so many bytes came in so many seconds."""
    return ServingError(
        Status.REQUEST_TIMEOUT,
        f"the body came too slowly: {received} bytes after {seconds:.1f} s. Fix: send it at once",
    )


class _Patience:
    """Cancels the task that reads a body which comes too slowly, and turns that into the error."""

    def __init__(self, seconds: float) -> None:
        self.received = 0
        self._seconds = seconds
        self._late = False

    def __enter__(self) -> _Patience:
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    def _look(self) -> None:
        left = seconds_left(self._seconds, self.received, self._loop.time() - self._start)
        if left > 0.001:
            self._timer = self._loop.call_later(left, self._look)
        elif self._task is not None:
            self._late = True
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._timer.cancel()
        if self._late and kind is not None and issubclass(kind, asyncio.CancelledError):
            if (uncancel := getattr(self._task, "uncancel", None)) is not None:
                uncancel()
            raise too_slow(self.received, self._loop.time() - self._start) from None
