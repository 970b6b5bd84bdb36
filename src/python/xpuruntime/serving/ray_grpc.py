# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""gRPC through Ray Serve: the methods of ``inference.GRPCInferenceService`` in a replica, and their registration.

Ray's proxy takes calls of services that are registered with it, and calls the method of the same name in a replica. Its
registration needs no generated code: messages pass as bytes, and what a method returns only has to have
``SerializeToString``.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from xpuruntime.serving.messages import ModelService

__all__ = ["GrpcMethods", "add_GRPCInferenceServiceServicer_to_server"]

_SERVICE = "inference.GRPCInferenceService"
_STREAM = "ModelStreamInfer"


def _unary_names() -> tuple[str, ...]:
    from xpuruntime.serving.protocol.grpc_messages import METHODS

    return tuple(name for name in METHODS if name != _STREAM)


def add_GRPCInferenceServiceServicer_to_server(servicer: Any, server: Any) -> None:  # noqa: N802 - as generated code
    """Register the service with a gRPC server, such as that of Ray's proxies; see ``grpc_servicer_functions``.

    Parameters
    ----------
    servicer : object
        With a method for each of the service's. Ray gives one that it never calls.
    server : grpc.Server
    """
    import grpc

    handlers = {name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name)) for name in _unary_names()}
    handlers[_STREAM] = grpc.stream_stream_rpc_method_handler(getattr(servicer, _STREAM))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


class _Reply:
    """A message as Ray sends it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name that Ray calls
        """Return the bytes of the message."""
        return self._data


class _Aborted(Exception):  # noqa: N818 - how a call ends
    """A call that ends with a status; Ray takes it from the context, and the text from here."""


class _Context(ExitStack):
    """Ray's context of a call, as the handlers use one. It does not tell the deadline of the client."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        self._context = context

    def add_done_callback(self, callback: Callable[[_Context], object]) -> None:
        """Have a function called when the call has ended here."""
        self.callback(callback, self)

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """Return the metadata that the client sent."""
        found: Sequence[tuple[str, str]] = self._context.invocation_metadata()
        return found

    def time_remaining(self) -> None:
        """Return ``None``: Ray's proxy alone knows the deadline, and cancels the call."""

    async def abort(self, code: Any, details: str, trailing_metadata: Sequence[tuple[str, str]] = ()) -> None:
        """End the call with a status."""
        self._context.set_code(code)
        self._context.set_details(details)
        if trailing_metadata:
            self._context.set_trailing_metadata(list(trailing_metadata))
        raise _Aborted(details)


class GrpcMethods:
    """The methods of the service in a replica, on its attribute `models`; Ray finds them by their names."""

    models: ModelService
    _handlers: Any = None

    def _handler(self, name: str, context: _Context) -> Any:
        from types import SimpleNamespace

        if self._handlers is None:
            from xpuruntime.serving.grpc.handlers import Handlers
            from xpuruntime.serving.transport.gate import Gate
            from xpuruntime.serving.transport.options import TransportOptions

            options = TransportOptions()
            self._handlers = Handlers(self.models, options, Gate(options.max_buffered))
        details = SimpleNamespace(method=f"/{_SERVICE}/{name}", invocation_metadata=context.invocation_metadata())
        return self._handlers.service(details)

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], grpc_context: Any) -> AsyncIterator[_Reply]:  # noqa: N802
        """Answer the requests of a stream in their order."""
        with _Context(grpc_context) as context:
            async for answer in self._handler(_STREAM, context).stream_stream(requests, context):
                yield _Reply(answer)


def _unary(name: str) -> Any:
    async def method(self: GrpcMethods, request: bytes, grpc_context: Any) -> _Reply:
        with _Context(grpc_context) as context:
            handler = self._handler(name, context)
            return _Reply(await (handler.unary_unary or handler.stream_unary)(request, context))

    method.__name__, method.__qualname__ = name, f"GrpcMethods.{name}"
    method.__doc__ = f"Answer a call of ``{name}``."
    return method


for _name in _unary_names():
    setattr(GrpcMethods, _name, _unary(_name))
