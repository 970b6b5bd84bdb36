# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Status codes of requests: one word for each kind of failure, with its HTTP status and its gRPC code."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xpuruntime.errors import XpuRuntimeError

__all__ = ["ServingError", "Status", "without_folders"]

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
        return {key: without_folders(one) for key, one in value.items()}
    return [without_folders(one) for one in value] if isinstance(value, (list, tuple)) else value
