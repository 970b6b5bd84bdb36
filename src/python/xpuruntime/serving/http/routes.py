# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Routes of the REST protocol, and its responses before they are sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.serving.options import check_model, check_version
from xpuruntime.serving.protocol.rest import error_body
from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.serving.protocol.rest import RestResponse

__all__ = [
    "CLOSE",
    "JSON",
    "ONE_WRITE",
    "Answer",
    "Endpoint",
    "WrongMethodError",
    "failed_answer",
    "outputs_answer",
    "route_of",
]


class Endpoint(NamedTuple):
    """What a path asks for: its action, and the model and version that it names."""

    action: str
    model: str = ""
    version: str = ""


class WrongMethodError(ServingError):
    """The path is there, and takes another method."""

    def __init__(self, path: str, allowed: str) -> None:
        super().__init__(Status.INVALID_ARGUMENT, f"{path[:80]} takes {allowed}. Fix: use that method")
        self.allowed = allowed


_FIXED = {
    (): "server",
    ("health", "live"): "live",
    ("health", "ready"): "ready",
    ("models", "stats"): "statistics",
    ("repository", "index"): "index",
}
_OF_MODEL = {"", "ready", "infer", "config", "stats", "plan", "evidence", "lock"}
_POSTS = {"infer", "index", "load", "unload"}


def route_of(method: str, path: str) -> Endpoint:
    """Return what a path asks for; a slash at its end changes nothing."""
    parts = path.split("/")
    if parts[-1] == "" and len(parts) > 2:
        parts.pop()
    if len(parts) < 2 or parts[0] or parts[1] != "v2":
        raise _not_found(path)
    route = _route(tuple(parts[2:]), path)
    allowed = ("POST",) if route.action in _POSTS else ("GET", "HEAD")
    if method not in allowed:
        raise WrongMethodError(path, ", ".join(allowed))
    return route


def _route(parts: tuple[str, ...], path: str) -> Endpoint:
    fixed = _FIXED.get(parts)
    if fixed is not None:
        return Endpoint(fixed)
    if parts[0] == "models" and len(parts) > 1:
        model, rest = parts[1], parts[2:]
        version = ""
        if len(rest) > 1 and rest[0] == "versions":
            version, rest = rest[1], rest[2:]
            if not version:
                raise _not_found(path)
        if model and len(rest) < 2 and "".join(rest) in _OF_MODEL and "" not in rest:
            return Endpoint(rest[0] if rest else "model", check_model(model), check_version(version))
    if parts[:2] == ("repository", "models") and len(parts) == 4 and parts[3] in ("load", "unload"):
        return Endpoint(parts[3], check_model(parts[2]))
    if parts[0] in ("systemsharedmemory", "cudasharedmemory", "trace", "logging"):
        raise ServingError(
            Status.UNIMPLEMENTED, f"this server does not have the extension of {path[:80]}. Fix: send tensors in bodies"
        )
    raise _not_found(path)


def _not_found(path: str) -> ServingError:
    return ServingError(
        Status.NOT_FOUND, f"there is nothing at {path[:80]!r}. Fix: paths begin with /v2, such as /v2/models/NAME/infer"
    )


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
