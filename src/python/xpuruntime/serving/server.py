# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Server`: HTTP and gRPC over the models of one service, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from xpuruntime import _core
from xpuruntime.argument_types import PAGES, SERVICE, TRANSPORT_OPTIONS, ArgumentType, check_types
from xpuruntime.errors import EngineUnavailable, InputError, XpuRuntimeError
from xpuruntime.printable import error_line
from xpuruntime.runtime.interruptible_waits import BackgroundCall, Latch, uninterrupted
from xpuruntime.runtime.packages import install_command
from xpuruntime.serving.http.application import Application
from xpuruntime.serving.http.bodies import BodyThreads, default_threads
from xpuruntime.serving.messages import ServingError
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.serving.monitoring.pages import pages_of
from xpuruntime.serving.transport.gate import Gate
from xpuruntime.serving.transport.options import (
    Tls,
    TransportOptions,
    bind,
    check_apart,
    check_model,
    options_for,
    read_address,
    shown,
    unusable,
)

if TYPE_CHECKING:
    import os
    import socket

    from xpuruntime.inference.session import InferenceSession
    from xpuruntime.serving.messages import ModelService
    from xpuruntime.serving.monitoring.pages import Pages

#: Connections that are accepted in one turn of the event loop: uvloop accepts one for each socket, and turns are long
#: beside a thread that has Python to itself.
_ACCEPTED = 8
_TLS = ArgumentType("a Tls, such as xpuruntime.serving.Tls(certificate, key)", lambda value: isinstance(value, Tls))
_TYPES = {"options": TRANSPORT_OPTIONS, "tls": _TLS, "pages": PAGES}
_SERVED = ArgumentType(f"a mapping of name to InferenceSession, or {SERVICE.words}", SERVICE.fits)


class Server:
    """A server of the Open Inference Protocol, in a thread; a context manager.

    Parameters
    ----------
    models : mapping of str to InferenceSession, or ModelService
        Sessions by the name that they are served under, without batches; they stay open. A service is not closed with
        the server. For batches, versions and files see `from_settings`.
    http, grpc : str, optional
        Addresses to listen on, such as ``"127.0.0.1:8000"``; port 0 takes a free one. `None` for no listener.
    options : TransportOptions, optional
        Default: what the settings of `Models` state.
    tls : Tls, optional
        Certificate and key of both listeners.
    pages : mapping, optional
        Further paths of HTTP; see `asgi_app`.

    Attributes
    ----------
    http_address, grpc_address : str
        ``HOST:PORT`` as it is bound, once the server was started; empty without a listener.
    drained : bool
        False once the server was closed while requests were not answered within `drain_seconds`.

    Raises
    ------
    InputError
        An address or a file of `tls` is wrong.
    EngineUnavailable
        A package of the extra ``serve`` is missing.
    XpuRuntimeError
        An address cannot be listened on.

    Examples
    --------
    >>> import xpuruntime as xrt
    >>> with xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session:
    ...     with xrt.serving.Server({"digits": session}, http="127.0.0.1:0") as server:
    ...         server.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(
        self,
        models: Mapping[str, InferenceSession] | ModelService,
        *,
        http: str | None = "127.0.0.1:8000",
        grpc: str | None = None,
        options: TransportOptions | None = None,
        tls: Tls | None = None,
        pages: Pages | None = None,
    ) -> None:
        if not isinstance(models, Mapping):
            check_types({"models": _SERVED}, {"models": models})
        check_types(_TYPES, locals(), optional=_TYPES)
        for option, address in (("http", http), ("grpc", grpc)):
            if address is not None:
                read_address(address, option)
        if http is not None and grpc is not None:
            check_apart(http, grpc)
        self.http_address = self.grpc_address = ""
        self.drained = True
        self._own = Models(sessions=_checked_names(models)) if isinstance(models, Mapping) else None
        self._service: ModelService = models if self._own is None else self._own  # type: ignore[assignment]
        self._http, self._grpc = http, grpc
        self._options = options or options_for(self._service)
        self._tls = tls
        self._pages = pages_of(self._service) if pages is None else pages
        self._gate = Gate(self._options.max_buffered)
        self._serving: BackgroundCall[None] | None = None
        self._closing: BackgroundCall[None] | None = None
        self._closing_lock, self._to_close = threading.Lock(), False
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    @classmethod
    def from_settings(
        cls,
        settings: ServeSettings | str | os.PathLike[str],
        *,
        token: str | None = None,
        tls: Tls | None = None,
        drain_seconds: float = 30.0,
        gc_freeze: bool = False,
    ) -> Self:
        """Return a server of a ``serve.yaml``. It loads the models when it starts, and releases them when it closes.

        Parameters
        ----------
        settings : ServeSettings or path
        token : str, optional
            What all routes but those of health ask for.
        tls : Tls, optional
        drain_seconds : float
            How long accepted requests are waited for when the server closes.
        gc_freeze : bool
            As for `Models`: for a process that does nothing but serve.

        Raises
        ------
        PolicyError
            The file has an unknown key or a bad value.
        InputError
            The file with the key of the administrator cannot be read.
        """
        stated = settings if isinstance(settings, ServeSettings) else ServeSettings.load(settings)
        options = TransportOptions.of(stated, token, drain_seconds=drain_seconds)
        models = Models(stated, gc_freeze=gc_freeze)
        server = cls(models, http=stated.http.listen, grpc=stated.grpc.listen, options=options, tls=tls)
        server._own = models
        return server

    @property
    def models(self) -> ModelService:
        """The service whose models are served."""
        return self._service

    @property
    def url(self) -> str:
        """``http://HOST:PORT``, or ``https``; empty without an HTTP listener."""
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{self.http_address}" if self.http_address else ""

    @property
    def grpc_url(self) -> str:
        """``grpc://HOST:PORT``, or ``grpcs``; empty without a gRPC listener."""
        scheme = "grpc" if self._tls is None else "grpcs"
        return f"{scheme}://{self.grpc_address}" if self.grpc_address else ""

    def start(self) -> Self:
        """Listen, load the models, and return then.

        Meanwhile the server is live and not ready. A model of a ``serve.yaml`` that does not load is not served, and
        the others are: `models` says which.
        """
        if self._serving is not None:
            raise XpuRuntimeError("the server was started before. Fix: make a new one")
        _require("uvicorn", "httptools", *(("grpc",) if self._grpc is not None else ()))
        if self._tls is not None:
            self._tls.check()
        listener = None if self._http is None else bind(self._http, "http")
        self._listen(listener)
        return self

    def _serve(self, listener: socket.socket | None) -> None:
        started = Latch()
        uninterrupted(self._launch, listener, started)
        assert self._serving is not None
        started.wait()
        if self._failure is not None:
            raise self._failure
        if self._to_close:  # before it was started, so nobody else waits
            self._serving.thread.join()
        elif self._own is not None:
            self._own.start()

    def _launch(self, listener: socket.socket | None, started: Latch) -> None:
        self._serving = BackgroundCall(functools.partial(self._run, listener, started), "xrt-serve")

    def close(self) -> None:
        """Refuse new requests, answer those that were accepted, and stop; again does nothing.

        Where the wait is interrupted, that goes on in a thread; to close again waits for the rest.
        """
        if self._serving is not None and self._serving.thread is threading.current_thread():
            raise XpuRuntimeError("a server cannot be closed by a request that it answers. Fix: close it elsewhere")
        uninterrupted(self._begin_to_close).result()

    def _begin_to_close(self) -> BackgroundCall[None]:
        with self._closing_lock:
            if self._closing is None:
                self._closing = BackgroundCall(self._close, "xrt-serve-close")
            return self._closing

    def _close(self) -> None:
        self._to_close = True
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended, or does meanwhile
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._serving is not None:
            self._serving.thread.join()
        if self._own is not None:
            self._own.close(drain=0.0)

    #: Closes the server where it cannot start, or is interrupted meanwhile.
    _listen = _core.guarded(_serve, close)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, listener: socket.socket | None, started: Latch) -> None:
        loop = _new_loop()
        try:
            asyncio.set_event_loop(loop)
            self._loop = loop
            loop.run_until_complete(self._main(listener, started))
        except BaseException as error:
            self._failure = error
        finally:
            if listener is not None:
                listener.close()
            started.set()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            asyncio.set_event_loop(None)
            loop.close()

    async def _main(self, listener: socket.socket | None, started: Latch) -> None:
        self._stop = asyncio.Event()
        if self._to_close:
            return
        http_server, grpc_server = None, None
        serving: asyncio.Task[None] | None = None
        closing_stuck: asyncio.Task[None] | None = None
        if self._grpc is not None:
            grpc_server = await self._start_grpc(self._grpc)
        count = self._options.body_threads
        threads = BodyThreads(default_threads() if count is None else count)
        if listener is not None:
            from xpuruntime.serving.http.connections import close_stuck

            http_server = self._uvicorn(threads)
            sockets = [listener, *(listener.dup() for _ in range(_ACCEPTED - 1))]
            serving = asyncio.ensure_future(http_server.serve(sockets=sockets))
            while not http_server.started and not serving.done():
                await asyncio.sleep(0.001)
            if serving.done():
                await serving
            self.http_address = shown(*listener.getsockname()[:2])
            connections, seconds = http_server.server_state.connections, self._options.response_seconds
            closing_stuck = asyncio.ensure_future(close_stuck(connections, seconds))
        started.set()
        await self._stop.wait()
        seconds = self._options.drain_seconds
        self.drained = await self._gate.drain(seconds)
        if grpc_server is not None:
            await grpc_server.stop(1.0)
        if http_server is not None and serving is not None:
            http_server.should_exit = True
            await serving
        if closing_stuck is not None:
            closing_stuck.cancel()
        threads.close()

    def _uvicorn(self, threads: BodyThreads) -> Any:
        import uvicorn

        from xpuruntime.serving.http.connections import connection_class

        application = Application(self._service, self._options, pages=self._pages, gate=self._gate)
        tls = {} if self._tls is None else self._tls.for_uvicorn()
        config = uvicorn.Config(
            application,
            http=connection_class(application, threads),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(self._options.idle_seconds)),
            timeout_graceful_shutdown=1,
            **tls,
        )
        return uvicorn.Server(config)

    async def _start_grpc(self, address: str) -> Any:
        import grpc

        from xpuruntime.serving.transport.grpc_handlers import Handlers

        patience = round(self._options.response_seconds * 1000)
        limits = [
            ("grpc.keepalive_time_ms", patience),  # a client that takes nothing of what it is sent answers no ping
            ("grpc.keepalive_timeout_ms", patience),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_receive_message_length", self._options.max_message),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
        server = grpc.aio.server(options=limits, maximum_concurrent_rpcs=self._options.max_connections)
        server.add_generic_rpc_handlers((Handlers(self._service, self._options, self._gate),))
        host, port = read_address(address, "grpc")
        try:
            if self._tls is None:
                got = server.add_insecure_port(shown(host, port))
            else:
                got = server.add_secure_port(shown(host, port), self._tls.for_grpc())
        except RuntimeError as error:
            await server.stop(None)
            raise unusable(address, "grpc", error_line(error).rstrip(".")) from None
        await server.start()
        self.grpc_address = shown(host, got)
        return server


def _checked_names(sessions: Mapping[str, InferenceSession]) -> Mapping[str, InferenceSession]:
    for name in sessions:
        try:
            check_model(name)
        except ServingError as error:
            raise InputError(str(error)) from None
    return sessions


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _require(*packages: str) -> None:
    import importlib

    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise EngineUnavailable(
                f"a server needs the package {package}, which cannot be imported: {error}. "
                f"Fix: {install_command('serve')}"
            ) from error
