# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Requests and responses of inference, their status codes and errors, free of codecs and of models."""

from __future__ import annotations

import concurrent.futures
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from xpuruntime.errors import (
    EngineUnavailable,
    InputError,
    OutOfMemoryError,
    UnsupportedOperationError,
    XpuRuntimeError,
)
from xpuruntime.runtime.telemetry import named_logger

if TYPE_CHECKING:
    from concurrent.futures import Future


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


#: What the protocol allows as a parameter of a request, a tensor or a response.
Parameter: TypeAlias = "bool | int | float | str"


@dataclass(slots=True, eq=False)
class InferTensor:
    """A named tensor."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(slots=True)
class RequestedOutput:
    """An output that a request names, with its parameters."""

    name: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class InferRequest:
    """One request to a model."""

    model: str
    inputs: Sequence[InferTensor]
    version: str = ""
    id: str = ""
    outputs: Sequence[RequestedOutput] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    deadline: float | None = None
    priority: int = 0
    trace: Mapping[str, str] | None = None
    #: Writes the response in its transport's form, before it is counted; it may raise `ServingError`.
    write: Callable[[InferResponse], Any] | None = None


@dataclass(slots=True, eq=False)
class InferResponse:
    """The outputs of one request."""

    model: str
    version: str
    outputs: Sequence[InferTensor]
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    #: What `InferRequest.write` returned.
    written: Any = None


class ModelService(Protocol):
    """What the transports need of the models that are served; `serving.models` implements it.

    All but `infer` and `load` return at once and may be called in an event loop. Dictionaries are JSON objects as the
    protocol writes them. An unknown model or version raises `ServingError` with ``NOT_FOUND``.
    """

    def infer(self, request: InferRequest) -> Future[InferResponse]:
        """Queue a request; its future has the response or a `ServingError`, and `cancel` takes it out of the queue.

        A full queue, a wrong name, datatype or shape raise at once, before anything is queued.
        """
        ...

    def live(self) -> bool:
        """Return whether the process answers."""
        ...

    def ready(self) -> tuple[bool, str]:
        """Return whether all required models make progress, else why not."""
        ...

    def model_ready(self, model: str, version: str = "") -> tuple[bool, str]:
        """Return whether one model makes progress, else why not."""
        ...

    def failure(self, model: str) -> BaseException | None:
        """Return why the last load of a model failed; ``None`` where it did not, or nothing was loaded yet."""
        ...

    def server_metadata(self) -> Mapping[str, Any]:
        """Return ``name``, ``version``, ``extensions``."""
        ...

    def model_metadata(self, model: str, version: str = "") -> Mapping[str, Any]:
        """Return ``name``, ``versions``, ``platform``, ``inputs``, ``outputs``, with -1 for free dimensions."""
        ...

    def model_config(self, model: str, version: str = "") -> Mapping[str, Any]:
        """Return the configuration, in Triton's words."""
        ...

    def statistics(self, model: str = "", version: str = "") -> Mapping[str, Any]:
        """Return ``model_stats`` of the statistics extension, of all models where none is named."""
        ...

    def evidence(self, model: str, kind: str, version: str = "") -> Mapping[str, Any]:
        """Return the ``plan``, ``evidence`` or ``lock`` of a model, as its JSON form."""
        ...

    def index(self, ready_only: bool = False) -> Sequence[Mapping[str, Any]]:
        """Return ``name``, ``version``, ``state``, ``reason`` of each model of the repository."""
        ...

    def load(self, model: str, parameters: Mapping[str, Parameter]) -> None:
        """Load or reload a model; requests that were accepted are answered by the one that accepted them."""
        ...

    def unload(self, model: str, parameters: Mapping[str, Parameter]) -> None:
        """Refuse new requests of a model, answer those that were accepted, then free it."""
        ...
