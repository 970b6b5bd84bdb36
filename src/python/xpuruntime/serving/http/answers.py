# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Answer`: an HTTP response before it is sent, of outputs and of errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xpuruntime.serving.http.routes import WrongMethodError
from xpuruntime.serving.protocol.rest_response import error_body
from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.serving.protocol.rest_response import RestResponse

__all__ = ["CLOSE", "JSON", "ONE_WRITE", "Answer", "failed_answer", "outputs_answer"]

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


def outputs_answer(written: RestResponse) -> Answer:
    """Return the response of outputs."""
    if written.json_length is None:
        return Answer(200, [JSON], written.chunks)
    stated = (b"inference-header-content-length", b"%d" % written.json_length)
    return Answer(200, [_BINARY, stated], written.chunks)


def failed_answer(error: ServingError, *, closing: bool) -> Answer:
    """Return the response of an error.

    Parameters
    ----------
    error : ServingError
    closing : bool
        Whether the connection is closed behind it in any case, because the server stops.
    """
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
