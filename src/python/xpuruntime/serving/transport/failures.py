# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Errors as clients get them: a status and a message, whatever was raised."""

from __future__ import annotations

import concurrent.futures
import logging

from xpuruntime.errors import (
    EngineUnavailable,
    InputError,
    OutOfMemoryError,
    UnsupportedOperationError,
    XpuRuntimeError,
)
from xpuruntime.serving.status import ServingError, Status, without_folders

__all__ = ["failure_of"]

_logger = logging.getLogger("xpuruntime.serving")

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
    """
    if isinstance(error, ServingError):
        return error
    if isinstance(error, concurrent.futures.CancelledError):
        return ServingError(Status.CANCELLED, "the request was cancelled")
    if isinstance(error, XpuRuntimeError):
        status = next((one for kind, one in _STATUS if isinstance(error, kind)), Status.INTERNAL)
        return ServingError(status, without_folders(str(error)))
    _logger.error("a request failed", exc_info=error)
    return ServingError(
        Status.INTERNAL, f"the server failed: {type(error).__name__}. Fix: see the log of the server, and report it"
    )
