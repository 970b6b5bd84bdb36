# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inference requests and responses: values between the codecs of the protocol and the models, free of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

__all__ = ["InferRequest", "InferResponse", "InferTensor", "ModelService", "Parameter", "RequestedOutput"]

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
