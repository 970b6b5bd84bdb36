# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Connections of the HTTP listener: uvicorn's, with bounds on heads of requests and on their number."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from xpuruntime.serving.protocol.rest_response import error_body

if TYPE_CHECKING:
    from xpuruntime.serving.transport.options import TransportOptions

__all__ = ["connection_class"]

#: Apart from uvicorn's own, which would log every malformed request; the client gets those as errors.
_logger = logging.getLogger("xpuruntime.serving.connections")
_logger.setLevel(logging.ERROR)


def connection_class(options: TransportOptions) -> type[asyncio.Protocol]:
    """Return the class of connections with these bounds."""

    class Connection(HttpToolsProtocol):
        """A connection whose heads must come in time and be short."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.logger = _logger

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self.head_timer: asyncio.TimerHandle | None = None
            self.head_length = 0
            super().connection_made(transport)
            if len(self.connections) > options.max_connections:
                self._refuse(b"503 Service Unavailable", f"there are {options.max_connections} connections already")
                return
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
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
            self._stop_timer()
            if not self.transport.is_closing():
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self.transport.is_closing():
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.transport.is_closing():
                super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            self._refuse(b"400 Bad Request", msg)

        def _count(self, length: int) -> None:
            self.head_length += length
            if self.head_length > options.max_header:
                reason = f"the head is longer than {options.max_header} bytes"
                self._refuse(b"431 Request Header Fields Too Large", reason)

        def _expect_head(self) -> None:
            self.head_timer = self.loop.call_later(options.header_seconds, self._late)

        def _stop_timer(self) -> None:
            if self.head_timer is not None:
                self.head_timer.cancel()
                self.head_timer = None

        def _late(self) -> None:
            self.head_timer = None
            reason = f"the head of a request did not come within {options.header_seconds:g} s"
            self._refuse(b"408 Request Timeout", reason)

        def _refuse(self, status: bytes, reason: str) -> None:
            if self.transport.is_closing():
                return
            self._stop_timer()
            body = error_body(f"{reason}. Fix: send requests of HTTP/1.1, whole and short")
            head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(body)) + body)
            self.transport.close()

    return Connection
