# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Handlers of ``inference.GRPCInferenceService``: bytes in, bytes out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

from xpuruntime.serving.messages import InferRequest, ServingError, Status, failure_of
from xpuruntime.serving.monitoring.records import TRACE_HEADERS
from xpuruntime.serving.protocol.grpc_messages import decode, encode
from xpuruntime.serving.protocol.infer_messages import (
    read_infer_request,
    read_names,
    write_infer_response,
    write_stream_response,
)
from xpuruntime.serving.transport.gate import HeldBytes, refuse_of, respond_of, response_of
from xpuruntime.serving.transport.options import check_model, check_version

if TYPE_CHECKING:
    from xpuruntime.serving.messages import ModelService
    from xpuruntime.serving.transport.gate import Gate
    from xpuruntime.serving.transport.options import TransportOptions

    _Call: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]

_SERVICE = "/inference.GRPCInferenceService/"
#: Methods of Triton that are known, and why they are not here.
_NOT_SERVED = {
    f"{kind}SharedMemory{verb}": "shared memory lets a client name memory of the server. Fix: send tensors in messages"
    for kind in ("System", "Cuda")
    for verb in ("Status", "Register", "Unregister")
} | dict.fromkeys(("TraceSetting", "LogSettings"), "it is set where the server is started. Fix: set it there")

_HEALTH = "/grpc.health.v1.Health/Check"
_INFER, _STREAM = f"{_SERVICE}ModelInfer", f"{_SERVICE}ModelStreamInfer"
#: Methods that need no token.
_OPEN = {_HEALTH, f"{_SERVICE}ServerLive", f"{_SERVICE}ServerReady"}
#: Requests of one stream that are being answered at a time; its responses come in the order of its requests.
_IN_FLIGHT = 64
#: Calls whose message is read at a time, and seconds after which a call leaves its turn to others and reads on.
_AT_A_TIME, _TURN = 2, 0.05
#: Calls that read on so, at most.
_MOST_LATE = 64
#: Bytes of a response from which on it is sent in a turn of the event loop of its own, which copies it.
_LARGE = 1 << 20
#: Longer messages do not fit into the trailers of a response.
_LONGEST = 4000
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class _Turns(asyncio.Semaphore):
    """Turns of calls to have their message read, and how many read on without one."""

    late = 0


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers the methods of a service; see `Application` for the parameters."""

    def __init__(self, service: ModelService, options: TransportOptions, gate: Gate) -> None:
        self._service = service
        self._ask, self._refuse = respond_of(service), refuse_of(service)
        self._access = options.access
        self._options = options
        self._gate = gate
        self._turns, self._open_turns = _Turns(_AT_A_TIME), _Turns(1)
        self._sending = asyncio.Lock()
        self._traced = getattr(service, "traced", False)
        self._handlers: dict[str, Any] = {
            f"{_SERVICE}{name}": self._unary(name, method) for name, method in self._methods().items()
        }
        self._handlers |= {
            f"{_SERVICE}{name}": _unread(name, method) for name, method in self._health_methods().items()
        }
        self._handlers[_INFER] = _handler(self._infer)
        self._handlers[_STREAM] = grpc.stream_stream_rpc_method_handler(self._stream)
        self._handlers[_HEALTH] = _handler(self._health)
        for name, reason in _NOT_SERVED.items():
            error = ServingError(Status.UNIMPLEMENTED, f"{name} is not served: {reason}")
            self._handlers[f"{_SERVICE}{name}"] = _ending(error)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method, or `None` for a method that there is not.

        That of a call without the right token ends it before its message is read, which may be long and compressed.
        """
        method = handler_call_details.method
        handler = self._handlers.get(method)
        if handler is None or method in _OPEN:
            return handler
        changes = method.startswith(f"{_SERVICE}Repository")
        try:
            self._access.check(_authorization(handler_call_details.invocation_metadata), admin=changes)
            if changes:
                self._access.check_repository()
        except ServingError as error:
            if method in (_INFER, _STREAM):
                self._refuse(InferRequest("", ()), error)
            return _ending(error)
        return handler

    def _health_methods(self) -> dict[str, Callable[[], Mapping[str, Any]]]:
        service = self._service
        return {
            "ServerLive": lambda: {"live": service.live()},
            "ServerReady": lambda: {"ready": service.ready()[0] and not self._gate.closed},
        }

    def _methods(self) -> dict[str, Callable[[dict[str, Any]], Mapping[str, Any]]]:
        service = self._service
        return {
            "ModelReady": lambda fields: {"ready": service.model_ready(*_model(fields))[0]},
            "ServerMetadata": lambda _: self._options.server_metadata(service),
            "ModelMetadata": lambda fields: service.model_metadata(*_model(fields)),
            "ModelConfig": lambda fields: {"config": service.model_config(*_model(fields))},
            "ModelStatistics": lambda fields: service.statistics(*_model(fields, optional=True)),
            "RepositoryIndex": lambda fields: {"models": service.index(fields.get("ready", False))},
            "RepositoryModelLoad": lambda fields: self._change(service.load, fields),
            "RepositoryModelUnload": lambda fields: self._change(service.unload, fields),
        }

    def _change(self, call: Callable[..., None], fields: dict[str, Any]) -> Mapping[str, Any]:
        parameters = {name: next(iter(value.values()), "") for name, value in fields.get("parameters", {}).items()}
        call(check_model(fields.get("model_name", "")), parameters)
        return {}

    def _unary(self, name: str, method: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Any:
        async def respond(context: _Call) -> bytes:
            fields = decode(f"{name}Request", await self._received(context))
            if name.startswith("Repository"):
                return encode(f"{name}Response", await asyncio.get_running_loop().run_in_executor(None, method, fields))
            return encode(f"{name}Response", method(fields))

        return _handler(respond)

    async def _received(self, context: _Call, turns: _Turns | None = None) -> bytes:
        """Return the one message of a call, which comes once it is asked for, and count it until the call has ended."""
        turns = turns or self._turns
        async with turns:  # a message that has come is copied in the event loop, so few are asked for at a time
            reading = asyncio.ensure_future(context.read())
            try:
                await asyncio.wait((reading,), timeout=_TURN)
            except asyncio.CancelledError:
                reading.cancel()
                raise
        if not reading.done() and turns.late >= _MOST_LATE:
            reading.cancel()
            raise ServingError(
                Status.RESOURCE_EXHAUSTED,
                f"the messages of {_MOST_LATE} calls are slow to come. Fix: send fewer at a time, or less in each",
                retry_after=1.0,
            )
        turns.late += 1
        try:
            message = await reading
        finally:
            turns.late -= 1
        if not isinstance(message, bytes):
            raise ServingError(Status.INVALID_ARGUMENT, "the call has no message. Fix: send one")
        self._hold(message, context)
        return message

    def _hold(self, message: bytes, context: _Call) -> HeldBytes:
        held = HeldBytes(self._gate.budget)
        held.take(len(message))
        context.add_done_callback(held.__exit__)
        return held

    async def _infer(self, context: _Call) -> bytes:
        message = b""
        request: InferRequest | None = None
        try:
            message = await self._received(context)
            with self._gate:
                request = await self._read(message)
                response = await self._respond(request, context)
            self._hold(response, context)
            return response
        except Exception as error:
            failed = failure_of(error)
            if request is None:
                self._refuse(read_names(message), failed)
            raise failed from None

    async def _read(self, message: bytes) -> InferRequest:
        request = await self._gate.decoded(read_infer_request, message, time.monotonic())
        check_model(request.model)
        check_version(request.version)
        return request

    async def _respond(self, request: InferRequest, context: _Call) -> bytes:
        left = context.time_remaining()
        if left is not None:
            deadline = time.monotonic() + max(left, 0.0)
            request.deadline = deadline if request.deadline is None else min(request.deadline, deadline)
        if self._traced:
            request.trace = {key: value for key, value in context.invocation_metadata() or () if key in TRACE_HEADERS}
        request.write = self._gate.encoder(write_infer_response)
        response = await response_of(self._ask(request))
        written: bytes = response.written or write_infer_response(response)
        if len(written) > _LARGE:
            async with self._sending:
                await asyncio.sleep(0)
        return written

    async def _stream(self, messages: AsyncIterator[bytes], context: _Call) -> AsyncIterator[bytes]:
        """Answer requests of a stream in their order. One that fails does not end it."""
        pending: asyncio.Queue[asyncio.Task[tuple[bytes, int]] | None] = asyncio.Queue(_IN_FLIGHT)
        held = self._hold(b"", context)

        async def read() -> None:
            async for message in messages:
                await pending.put(asyncio.ensure_future(self._stream_answer(message, context, held)))
            await pending.put(None)

        reader = asyncio.ensure_future(read())
        task: asyncio.Task[tuple[bytes, int]] | None = None
        try:
            while (task := await pending.get()) is not None:
                answer, size = await task
                yield answer
                held.give_back(size)
        finally:
            reader.cancel()
            while task is not None:
                task.cancel()
                task = None if pending.empty() else pending.get_nowait()

    async def _stream_answer(self, message: bytes, context: _Call, held: HeldBytes) -> tuple[bytes, int]:
        request: InferRequest | None = None
        size = 0
        try:
            held.take(len(message))
            size = len(message)
            with self._gate:
                request = await self._read(message)
                answer = write_stream_response(await self._respond(request, context))
        except Exception as error:
            failed = failure_of(error)
            if request is None:
                request = read_names(message)
                self._refuse(request, failed)
            answer = write_stream_response(error=str(failed), id=request.id)
        held.keep(len(answer))
        return answer, size + len(answer)

    async def _health(self, context: _Call) -> bytes:
        message = await self._received(context, self._open_turns)  # no others wait for who has no token
        service = decode("HealthCheckRequest", message).get("service", "")
        if service in ("", _SERVICE.strip("/")):
            ready = self._service.ready()[0] and not self._gate.closed
        else:
            ready = self._service.model_ready(check_model(service))[0]
        return encode("HealthCheckResponse", {"status": "SERVING" if ready else "NOT_SERVING"})


def _model(fields: dict[str, Any], *, optional: bool = False) -> tuple[str, str]:
    name = fields.get("name", "")
    return name if optional and not name else check_model(name), check_version(fields.get("version", ""))


def _authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    for key, value in metadata or ():
        if key == "authorization":
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""


def _unread(name: str, method: Callable[[], Mapping[str, Any]]) -> Any:
    """Return the handler of a method that says nothing in its message, which is not read: it needs no token."""

    async def respond(_: _Call) -> bytes:
        return encode(f"{name}Response", method())

    return _handler(respond)


def _ending(error: ServingError) -> Any:
    async def respond(_: _Call) -> bytes:
        raise error

    return _handler(respond)


def _handler(respond: Callable[[_Call], Awaitable[bytes]]) -> Any:
    """Return a handler of grpcio that ends a call with what is raised; messages are read from the context."""

    async def handler(_: AsyncIterator[bytes], context: _Call) -> bytes:
        try:
            return await respond(context)
        except Exception as error:
            failed = failure_of(error)
        return await _abort(context, failed)  # the call keeps what this raises, and so this frame

    return grpc.stream_unary_rpc_method_handler(handler)


async def _abort(context: _Call, error: ServingError) -> bytes:
    text = str(error)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    trailers = () if error.retry_after is None else (("retry-after", f"{error.retry_after:g}"),)
    await context.abort(_CODES[error.code.grpc], text, trailers)
    raise AssertionError  # `abort` raises
