# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Application`: the REST protocol as an ASGI application, for any server that runs those."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.argument_types import PAGES, SERVICE, TRANSPORT_OPTIONS, check_types
from xpuruntime.serving.http.bodies import (
    CLOSE,
    JSON,
    ONE_WRITE,
    SEND_LESS,
    Answer,
    WrongMethodError,
    compress,
    decompress,
    failed_answer,
    outputs_answer,
    pieces,
    read_body,
    response_encoding,
)
from xpuruntime.serving.messages import InferRequest, ServingError, Status, failure_of
from xpuruntime.serving.monitoring.pages import pages_of
from xpuruntime.serving.monitoring.records import TRACE_HEADERS
from xpuruntime.serving.protocol.rest import write_response
from xpuruntime.serving.protocol.rest_request import (
    RestRequest,
    check_json,
    header_length,
    read_raw_request,
    read_request,
)
from xpuruntime.serving.transport.gate import (
    ClientGone,
    Gate,
    HeldBytes,
    is_loopback,
    refuse_of,
    respond_of,
    response_of,
)
from xpuruntime.serving.transport.options import TransportOptions, check_model, check_version, options_for

if TYPE_CHECKING:
    from xpuruntime.serving.messages import ModelService
    from xpuruntime.serving.monitoring.pages import Pages

#: Longer responses are compressed in a thread: others are answered meanwhile.
_SHORT_COMPRESSED = 64 << 10
_PAUSE = 0.05
#: What helps where JSON is too long.
_SEND_BINARY = (
    "send tensors as binary data behind the JSON (binary_data_size, with Inference-Header-Content-Length), or raise "
    "http.max_json of the server"
)
#: Bytes of a body that is not for inference.
_LONGEST_CONTROL = 256 << 10
#: Seconds and bytes of a refused body that are still taken.
_LINGER, _LINGERED = 2.0, 64 << 20


class Endpoint(NamedTuple):
    """What a path asks for: its action, and the model and version that it names."""

    action: str
    model: str = ""
    version: str = ""


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


class Application:
    """The REST protocol over the models of a service."""

    def __init__(
        self,
        service: ModelService,
        options: TransportOptions | None = None,
        *,
        pages: Pages | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._service = service
        self.respond = respond_of(service)
        self._refuse = refuse_of(service)
        self.options = options or TransportOptions()
        self._pages = pages or {}
        self.gate = gate or Gate(self.options.max_buffered)

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # which refuses the handshake
            return
        if scope["type"] != "http":
            raise NotImplementedError(f"this application has no {scope['type']}")
        headers = _Headers(scope["headers"])
        try:
            answer = await self._answer(scope, headers, receive)
        except ClientGone:
            return
        except Exception as error:
            answer = failed_answer(failure_of(error), closing=self.gate.closed)
        with HeldBytes(self.gate.budget) as held:
            try:
                held.take(answer.length)
            except ServingError as error:
                answer = failed_answer(error, closing=self.gate.closed)
            if CLOSE in answer.headers and b"expect" not in headers:
                await _send(send, answer, functools.partial(_discard, receive))
            else:
                await _send(send, answer)

    async def _answer(
        self, scope: Mapping[str, Any], headers: _Headers, receive: Callable[[], Awaitable[Any]]
    ) -> Answer:
        path = _path_of(scope)
        page = self._pages.get(path)
        if page is not None:
            self.options.access.check(headers.get(b"authorization"))
            if scope["method"] not in ("GET", "HEAD"):
                raise WrongMethodError(path, "GET, HEAD")
            loop = asyncio.get_running_loop()
            body, content_type = await loop.run_in_executor(None, page, headers.get(b"accept"))
            return Answer(200, [(b"content-type", content_type.encode())], [body])
        route = route_of(scope["method"], path)
        if scope["method"] == "POST":
            local = is_loopback((scope.get("server") or ("",))[0])
            names = (b"origin", b"sec-fetch-site", b"host")
            self.options.access.check_site(*map(headers.get, names), local=local, admin=route.action != "infer")
        if route.action == "live" or (route.action == "ready" and not route.model):
            return self._health(route)
        if route.action == "infer":
            return await self._infer(route, headers, receive)
        self.options.access.check(headers.get(b"authorization"), admin=route.action in ("index", "load", "unload"))
        if route.action in ("index", "load", "unload"):
            with HeldBytes(self.gate.budget) as held:
                return await self._repository(route, headers, receive, held)
        return self._facts(route)

    def _health(self, route: Endpoint) -> Answer:
        """Health is open to those without a token, and then says no reason."""
        if route.action == "live":
            live = self._service.live()
            return _json({"live": live}, 200 if live else 503)
        ready, reason = self._service.ready()
        if self.gate.closed:
            ready, reason = False, "the server is stopping"
        return _readiness({}, ready, "not ready" if self.options.access.token else reason)

    def _facts(self, route: Endpoint) -> Answer:
        service, (action, model, version) = self._service, route
        if action == "ready":
            ready, reason = service.model_ready(model, version)
            return _readiness({"name": model}, ready, reason)
        if action == "server":
            return _json(self.options.server_metadata(service))
        if action == "model":
            return _json(service.model_metadata(model, version))
        if action == "config":
            return _json(service.model_config(model, version))
        if action in ("stats", "statistics"):
            return _json(service.statistics(model, version))
        return _json(service.evidence(model, action, version))

    async def _repository(
        self, route: Endpoint, headers: _Headers, receive: Callable[[], Awaitable[Any]], held: HeldBytes
    ) -> Answer:
        self.options.access.check_repository()
        body = await self._body(headers, receive, held, min(self.options.max_body, _LONGEST_CONTROL))
        try:
            document = msgspec.json.decode(body, type=dict[str, Any]) if body.strip() else {}
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise ServingError(
                Status.INVALID_ARGUMENT, f"the body is not a JSON object: {error}. Fix: send one, or nothing"
            ) from None
        if route.action == "index":
            return _json(self._service.index(document.get("ready") is True))
        call = self._service.load if route.action == "load" else self._service.unload
        parameters = document.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise ServingError(Status.INVALID_ARGUMENT, "parameters is no JSON object. Fix: send one, or nothing")
        await asyncio.get_running_loop().run_in_executor(None, call, route.model, parameters)
        return _json({})

    async def _infer(self, route: Endpoint, headers: _Headers, receive: Callable[[], Awaitable[Any]]) -> Answer:
        rest_request: RestRequest | None = None
        try:
            self.options.access.check(headers.get(b"authorization"))
            with self.gate, HeldBytes(self.gate.budget) as held:
                rest_request = await self._read(route, headers, receive, held)
                return await self._respond(rest_request, headers, receive)
        except ClientGone:
            raise
        except Exception as error:
            failed = failure_of(error)
            if rest_request is None:
                self.refused(route.model, route.version, failed, headers.trace())
            raise failed from None

    def refused(self, model: str, version: str, error: ServingError, trace: Mapping[str, str] | None = None) -> None:
        """Have a request counted and logged that is refused before the models see it."""
        self._refuse(InferRequest(model, (), version, trace=trace), error)

    async def _read(
        self, route: Endpoint, headers: _Headers, receive: Callable[[], Awaitable[Any]], held: HeldBytes
    ) -> RestRequest:
        arrived = time.monotonic()
        options, stated = self.options, headers.find(b"inference-header-content-length")
        if stated is None and options.max_json < options.max_body:
            body = await self._body(headers, receive, held, options.max_json, _SEND_BINARY)
        else:
            check_json(stated, options.max_json, _SEND_BINARY)
            body = await self._body(headers, receive, held, options.max_body)
        length = header_length(stated, len(body))
        if length == 0:
            rest_request = self._raw(route, body)
        else:
            rest_request = await self.gate.decoded(read_request, body, route.model, route.version, length, arrived)
        rest_request.most = options.max_body
        rest_request.request.trace = headers.trace()
        return rest_request

    async def _respond(
        self, rest_request: RestRequest, headers: _Headers, receive: Callable[[], Awaitable[Any]]
    ) -> Answer:
        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                await asyncio.sleep(_PAUSE)  # a server may say again that the body has ended

        rest_request.request.write = self.gate.encoder(functools.partial(write_response, rest_request=rest_request))
        try:
            response = await response_of(self.respond(rest_request.request), gone)
        finally:
            rest_request.request.write = None  # which holds the request that holds it
        written = response.written or write_response(response, rest_request)
        answer = outputs_answer(written)
        encoding = response_encoding(headers.get(b"accept-encoding"))
        if encoding:
            answer.headers.append((b"content-encoding", encoding.encode()))
            if written.length > _SHORT_COMPRESSED:
                answer.chunks = [await self.gate.compressed(compress, written.chunks, encoding)]
            else:
                answer.chunks = [compress(written.chunks, encoding)]
        return answer

    def _raw(self, route: Endpoint, body: bytes) -> RestRequest:
        model, version = route.model, route.version
        batched = int(self._service.model_config(model, version).get("max_batch_size", 0)) > 0
        return read_raw_request(body, self._service.model_metadata(model, version), model, version, batched=batched)

    async def _body(
        self,
        headers: _Headers,
        receive: Callable[[], Awaitable[Any]],
        held: HeldBytes,
        limit: int,
        fix: str = SEND_LESS,
    ) -> bytes:
        stated = headers.find(b"content-length")
        length = int(stated) if stated is not None and stated.isascii() and stated.isdecimal() else None
        body = await read_body(receive, length, limit, self.options.body_seconds, held, fix)
        encoding = headers.get(b"content-encoding")
        if not encoding:
            return body
        if len(body) < _SHORT_COMPRESSED // 16:
            plain = decompress(body, encoding, limit, fix)
        else:
            plain = await self.gate.compressed(decompress, body, encoding, limit, fix)
        held.take(len(plain))
        return plain


def asgi_app(
    service: ModelService, options: TransportOptions | None = None, *, pages: Pages | None = None
) -> Application:
    """Return the REST protocol over a service as an ASGI 3 application, for a server of yours.

    Parameters
    ----------
    service : ModelService
        Such as `Models`, which must have been started.
    options : TransportOptions, optional
        Default: what the settings of `Models` state. Those of connections, such as `header_seconds`, are your server's.
    pages : mapping, optional
        Path to a function of the header ``Accept`` that returns a body and its content type. Without it the metrics
        and the status page of `Models`.
    """
    types = {"service": SERVICE, "options": TRANSPORT_OPTIONS, "pages": PAGES}
    check_types(types, {"service": service, "options": options, "pages": pages}, optional=("options", "pages"))
    if options is None:
        options = options_for(service)
    return Application(service, options, pages=pages_of(service) if pages is None else pages)


def _path_of(scope: Mapping[str, Any]) -> str:
    """Return the path below that at which a host has mounted the application: ASGI states the whole one."""
    path: str = scope["path"]
    mount = scope.get("root_path", "").rstrip("/")
    return path[len(mount) :] or "/" if mount and f"{path}/".startswith(f"{mount}/") else path


class _Headers:
    """Headers of a request by name; of one that comes twice, the first."""

    __slots__ = ("_found",)

    def __init__(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._found: dict[bytes, bytes] = {}
        for name, value in headers:
            self._found.setdefault(name, value)

    def __contains__(self, name: bytes) -> bool:
        return name in self._found

    def find(self, name: bytes) -> str | None:
        value = self._found.get(name)
        return None if value is None else value.decode("latin-1")

    def get(self, name: bytes) -> str:
        return self._found.get(name, b"").decode("latin-1")

    def trace(self) -> dict[str, str] | None:
        if b"traceparent" not in self._found:
            return None
        return {name: self.get(name.encode()) for name in TRACE_HEADERS}


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(status, [JSON], [msgspec.json.encode(value)])


def _readiness(facts: dict[str, Any], ready: bool, reason: str) -> Answer:
    if ready:
        return _json({**facts, "ready": True})
    return _json({**facts, "ready": False, "error": reason}, Status.UNAVAILABLE.http)


async def _send(
    send: Callable[[dict[str, Any]], Awaitable[None]],
    answer: Answer,
    discard: Callable[[], Awaitable[None]] | None = None,
) -> None:
    headers = [*answer.headers, (b"content-length", b"%d" % answer.length)]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    last = b""
    if answer.length <= ONE_WRITE and discard is None:
        last = b"".join(answer.chunks)
    else:
        for piece in pieces(answer.chunks):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # a server that need not wait for the client lets others have their turn
    if discard is not None:  # before the connection is closed: data that nobody reads would reset it
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(discard(), _LINGER)
    await send({"type": "http.response.body", "body": last})


async def _discard(receive: Callable[[], Awaitable[Any]]) -> None:
    """Take what is left of a body, so that a client that sends all of it first gets its response."""
    left = _LINGERED
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if not message.get("more_body", False):
            return


async def _lifespan(receive: Callable[[], Awaitable[Any]], send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        else:
            await send({"type": "lifespan.shutdown.complete"})
            return
