# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Status codes of requests, their errors, and what a client gets of any other error."""

from __future__ import annotations

import concurrent.futures
import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import (
    EngineUnavailable,
    InputError,
    OutOfMemoryError,
    UnsupportedOperationError,
    XpuRuntimeError,
)
from xpuruntime.runtime.telemetry import named_logger

if TYPE_CHECKING:
    pass

__all__ = ["ServingError", "Status", "failure_of", "without_folders"]

#: Characters of a message that are kept of its beginning and of its end: a client's long name is not sent back whole.
_BEGINNING, _END = 1200, 400


class Status(enum.Enum):
    """Why a request failed.

    Each has the HTTP status and the number of the gRPC code that tell the client so.
    """

    INVALID_ARGUMENT = (400, 3)
    UNAUTHENTICATED = (401, 16)
    PERMISSION_DENIED = (403, 7)
    NOT_FOUND = (404, 5)
    REQUEST_TIMEOUT = (408, 4)
    TOO_LARGE = (413, 8)
    RESOURCE_EXHAUSTED = (429, 8)
    CANCELLED = (499, 1)
    INTERNAL = (500, 13)
    UNIMPLEMENTED = (501, 12)
    UNAVAILABLE = (503, 14)
    DEADLINE_EXCEEDED = (504, 4)

    @property
    def http(self) -> int:
        """The HTTP status."""
        return self.value[0]

    @property
    def grpc(self) -> int:
        """The number of the gRPC code."""
        return self.value[1]


class ServingError(XpuRuntimeError):
    """A request that is not answered with outputs.

    Parameters
    ----------
    status : Status
    message : str
        What is wrong, why, and how to fix it; clients get it as it is, but for the middle of a very long one.
    retry_after : float, optional
        Seconds after which the same request may succeed, for a full queue and for a model that is being loaded.
    """

    def __init__(self, status: Status, message: str, *, retry_after: float | None = None) -> None:
        if len(message) > _BEGINNING + _END:
            message = f"{message[:_BEGINNING]} […] {message[-_END:]}"
        super().__init__(message)
        self.code = status
        self.retry_after = retry_after


_FOLDER = re.compile(r"(?<![\w.:/])/(?:[^/\s'\",;:()\[\]]+/)+")


def without_folders(value: Any) -> Any:
    """Return text, or JSON with texts in it, in which paths of this machine are names alone: clients get no folders.

    Names that only look like a path, such as those of nodes, stay as they are.
    """
    if isinstance(value, str):
        return _FOLDER.sub(lambda match: "" if Path(match[0]).is_dir() else match[0], value)
    if isinstance(value, Mapping):
        return {key: without_folders(item) for key, item in value.items()}
    return [without_folders(item) for item in value] if isinstance(value, (list, tuple)) else value


_logger = named_logger("xpuruntime.serving")

#: The first class that fits decides.
_STATUS: tuple[tuple[type[BaseException], Status], ...] = (
    (InputError, Status.INVALID_ARGUMENT),
    (OutOfMemoryError, Status.RESOURCE_EXHAUSTED),
    (EngineUnavailable, Status.UNAVAILABLE),
    (UnsupportedOperationError, Status.UNIMPLEMENTED),
)


def failure_of(error: BaseException) -> ServingError:
    """Return the error that a client gets.

    What is not an error of this package is a fault: it is logged with its traceback, and the client gets its type only.
    The error that is returned has no traceback, and no other error beside it: frames hold the body of the request, and
    one of them the error.
    """
    if isinstance(error, ServingError):
        error.__context__ = None
        return error.with_traceback(None)
    if isinstance(error, concurrent.futures.CancelledError):
        return ServingError(Status.CANCELLED, "the request was cancelled")
    if isinstance(error, XpuRuntimeError):
        status = next((status_ for kind, status_ in _STATUS if isinstance(error, kind)), Status.INTERNAL)
        return ServingError(status, without_folders(str(error)))
    _logger.error("a request failed", exc_info=error)
    return ServingError(
        Status.INTERNAL, f"the server failed: {type(error).__name__}. Fix: see the log of the server, and report it"
    )
