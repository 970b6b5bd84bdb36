# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ray: `deployment`, a server of the Open Inference Protocol in replicas of Ray Serve, and `Predictor` for Ray Data.

Ray is imported when `deployment` is called, and not by this package. Ray's proxy takes calls of services of gRPC that
are registered with it, and calls the method of the same name in a replica. Its registration needs no generated code:
messages pass as bytes, and what a method returns only has to have ``SerializeToString``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.argument_types import MAPPING, NAMES, PATH, TEXT, ArgumentType, check_types
from xpuruntime.errors import EngineUnavailable, InputError, XpuRuntimeError, warn
from xpuruntime.runtime.packages import install_command
from xpuruntime.serving.models.settings import SCHEMA, ServeSettings, settings_of_source

if TYPE_CHECKING:
    from ray.serve import Deployment

    from xpuruntime.serving.messages import ModelService

_SERVICE = "inference.GRPCInferenceService"
_STREAM = "ModelStreamInfer"


def _unary_names() -> tuple[str, ...]:
    from xpuruntime.serving.protocol.grpc_messages import METHODS

    return tuple(name for name in METHODS if name != _STREAM)


def add_GRPCInferenceServiceServicer_to_server(servicer: Any, server: Any) -> None:  # noqa: N802 - as generated code
    """Register the service with a gRPC server, such as that of Ray's proxies; see ``grpc_servicer_functions``."""
    import grpc

    handlers = {name: grpc.unary_unary_rpc_method_handler(getattr(servicer, name)) for name in _unary_names()}
    handlers[_STREAM] = grpc.stream_stream_rpc_method_handler(getattr(servicer, _STREAM))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


class _Reply:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name that Ray calls
        return self._data


class _Aborted(Exception):  # noqa: N818 - how a call ends
    """A call that ends with a status; Ray takes it from the context, and the text from here."""


class _Context(ExitStack):
    """Ray's context of a call with one message, as the handlers use it. It does not tell the deadline of the client."""

    def __init__(self, context: Any, message: bytes = b"") -> None:
        super().__init__()
        self._context, self._message = context, message

    async def read(self) -> bytes:
        return self._message

    def add_done_callback(self, callback: Callable[[_Context], object]) -> None:
        self.callback(callback, self)

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        metadata: Sequence[tuple[str, str]] = self._context.invocation_metadata()
        return metadata

    def time_remaining(self) -> None:
        """Return ``None``: Ray's proxy alone knows the deadline, and cancels the call."""

    async def abort(self, code: Any, details: str, trailing_metadata: Sequence[tuple[str, str]] = ()) -> None:
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
            from xpuruntime.serving.transport.gate import Gate
            from xpuruntime.serving.transport.grpc_handlers import Handlers
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
        with _Context(grpc_context, request) as context:
            return _Reply(await self._handler(name, context).stream_unary(None, context))

    method.__name__, method.__qualname__ = name, f"GrpcMethods.{name}"
    method.__doc__ = f"Answer a call of ``{name}``."
    return method


for _name in _unary_names():
    setattr(GrpcMethods, _name, _unary(_name))


#: Ray hands a replica 5 requests at a time by default, fewer than a batch may have.
_LEAST_ONGOING = 16


def deployment(
    source: str | os.PathLike[str],
    policy: str | os.PathLike[str] | None = None,
    *,
    lock: str | os.PathLike[str] | None = None,
    name: str | None = None,
    batching: Mapping[str, Any] | None = None,
    **options: Any,
) -> Deployment:
    """Return a deployment of Ray Serve: each replica serves the models over REST and gRPC, with its own batches.

    Parameters
    ----------
    source : str or path
        A model file or artifact, or a ``serve.yaml``. Every node must have it at this path.
    policy, lock : str or path, optional
        Of the model; a ``serve.yaml`` has its own.
    name : str, optional
        Of the model in paths; default: that of its file.
    batching : mapping, optional
        As in ``serve.yaml``, such as ``{"max_batch_size": 32, "max_queue_delay_us": 500}``.
    **options
        Of ``ray.serve.deployment``, such as ``num_replicas`` and ``ray_actor_options``. ``max_ongoing_requests`` is
        twice the largest batch unless it is stated.

    Returns
    -------
    ray.serve.Deployment

    Raises
    ------
    EngineUnavailable
        Ray Serve is not installed.
    InputError
        Options of one model are given beside a ``serve.yaml``, which names no model or opens the repository to clients;
        or a path is empty.
    PolicyError
        A setting is wrong.
    TypeError
        An argument has a wrong type.

    Examples
    --------
    Not run here, since it starts a cluster::

        from ray import serve
        from xpuruntime.serving.ray import deployment

        serve.run(deployment("digits.onnx", batching={"max_batch_size": 32}, num_replicas=2).bind())
    """
    types = {"source": PATH, "policy": PATH, "lock": PATH, "name": TEXT, "batching": MAPPING}
    check_types(types, locals(), optional=("policy", "lock", "name", "batching"))
    for key, path in (("source", source), ("policy", policy), ("lock", lock)):
        if path is not None and not os.fspath(path):
            raise InputError(f"{key} is an empty path. Fix: state the path, or leave it out")
    try:
        from ray import serve
    except ImportError:
        raise EngineUnavailable(f"Ray Serve is not installed. Fix: {install_command('ray')}") from None
    document = _document(source, policy, lock, name, batching)
    settings = ServeSettings.coerce(document)
    check_replica(settings)
    if unused := _unused(settings):
        text = f"{', '.join(unused)}: Ray's proxies listen and bound messages, so that this is not used"
        warn(text)
    largest = max(model.batching.max_batch_size for model in settings.models.values())
    options.setdefault("max_ongoing_requests", max(2 * largest, _LEAST_ONGOING))

    class Served(ServedModels):
        def __init__(self) -> None:
            super().__init__(document)

    Served.__name__ = Served.__qualname__ = next(iter(settings.models))
    return serve.deployment(**options)(serve.ingress(_forwarding)(Served))


def check_replica(settings: ServeSettings) -> None:
    """Refuse settings that a replica cannot have."""
    if not settings.models:
        raise InputError("the file names no model. Fix: state one under models")
    if settings.admin.repository:
        raise InputError(
            "admin.repository: true would load and unload models in one replica, and not in the others. "
            "Fix: leave it out, and deploy again"
        )


def _unused(settings: ServeSettings) -> list[str]:
    sections = {"http": (settings.http, ("listen", "body_threads")), "grpc": (settings.grpc, ("listen", "max_message"))}
    return [
        f"{section}.{key}"
        for section, (stated, keys) in sections.items()
        for key in keys
        if getattr(stated, key) != getattr(type(stated)(), key)
    ]


_COLUMNS = ArgumentType(
    "a mapping of input to the name of a column",
    lambda value: isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values()),
)


class ServedModels(GrpcMethods):
    """The models of one replica, behind `asgi_app`, and with the methods of the gRPC service."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        from xpuruntime.serving.http.application import asgi_app
        from xpuruntime.serving.models.service import Models

        settings = ServeSettings.coerce(document)
        check_replica(settings)
        self.models = Models(settings)
        self.models.start()
        ready, reason = self.models.ready()
        if not ready:
            self.models.close(drain=0.0)
            node = _node_of_actor()
            raise XpuRuntimeError(reason if node is None else f"on the node {node}: {reason}")
        self.application = asgi_app(self.models)

    def check_health(self) -> None:
        """Raise where a model makes no progress, so that Ray replaces the replica."""
        ready, reason = self.models.ready()
        if not ready:
            raise XpuRuntimeError(reason)

    def __del__(self) -> None:
        """Answer what was accepted, and release the models."""
        models = getattr(self, "models", None)
        if models is not None:
            models.close()


class Predictor:
    """A session as a class for ``ray.data.Dataset.map_batches``, opened once in each actor.

    Parameters
    ----------
    model : str or path
    policy : Policy, path or mapping, optional
    lock : str or path, optional
    columns : mapping of str to str, optional
        Input of the model to the column that it is read from; default: the column of its name.
    keep : sequence of str
        Columns that are passed on beside the outputs.
    **options
        As `InferenceSession` takes them.

    Notes
    -----
    Use ``batch_format="numpy"``. Arrays of Ray are read-only views of shared memory, which a session takes as they are.

    Examples
    --------
    >>> import numpy as np, xpuruntime as xrt
    >>> from xpuruntime.serving.ray import Predictor
    >>> predict = Predictor(xrt.demo_model_path(), {"execution": {"device": "cpu"}}, keep=["id"])
    >>> batch = {"id": np.arange(2), "image": np.zeros((2, 1, 8, 8), np.float32)}
    >>> {name: array.shape for name, array in predict(batch).items()}
    {'id': (2,), 'logits': (2, 10)}
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        policy: Any = None,
        *,
        lock: str | os.PathLike[str] | None = None,
        columns: Mapping[str, str] | None = None,
        keep: Sequence[str] = (),
        **options: Any,
    ) -> None:
        #: What opening the session raised in an actor of Ray; `__call__` raises it.
        self._failure: XpuRuntimeError | None = None
        check_types({"columns": _COLUMNS, "keep": NAMES}, locals(), optional=("columns",))
        try:
            self._open(model, policy, lock, columns, keep, options)
        except XpuRuntimeError as error:
            # Ray takes an actor that fails to start for a node that died: it shows its own stack, and tries again.
            if (node := _node_of_actor()) is None:
                raise
            self._failure = type(error)(f"on the node {node}: {error}")

    def _open(
        self,
        model: str | os.PathLike[str],
        policy: Any,
        lock: str | os.PathLike[str] | None,
        columns: Mapping[str, str] | None,
        keep: Sequence[str],
        options: Mapping[str, Any],
    ) -> None:
        from xpuruntime.inference import InferenceSession

        self.session = InferenceSession(model, policy=policy, lock=lock, **options)
        known = [tensor.name for tensor in self.session.inputs]
        for name in columns or ():
            if name not in known:
                raise InputError(f"columns: the model has no input {name!r}; its inputs are {', '.join(known)}")
        self._columns = {name: (columns or {}).get(name, name) for name in known}
        outputs = {tensor.name for tensor in self.session.outputs}
        if both := outputs.intersection(keep):
            raise InputError(f"keep: the column {min(both)!r} is an output of the model. Fix: leave it out")
        self._keep = tuple(keep)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of a batch by name, with the columns that are kept."""
        if self._failure is not None:
            raise self._failure
        if not isinstance(batch, Mapping):
            raise InputError(f'the batch is a {type(batch).__name__}, and no mapping. Fix: batch_format="numpy"')
        missing = [name for name in (*self._columns.values(), *self._keep) if name not in batch]
        if missing:
            there = ", ".join(map(str, batch)) or "none"
            raise InputError(
                f"the batch has no column {missing[0]!r}; it has {there}. Fix: name the columns with "
                "columns={input: column}"
            )
        outputs = self.session.run({name: batch[column] for name, column in self._columns.items()})
        return {**{name: batch[name] for name in self._keep}, **outputs}


def _node_of_actor() -> str | None:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None
    return f"{ray.util.get_node_ip_address()}/{ray.get_runtime_context().get_node_id()[:8]}"


def _document(
    source: str | os.PathLike[str],
    policy: str | os.PathLike[str] | None,
    lock: str | os.PathLike[str] | None,
    name: str | None,
    batching: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return what ``serve.yaml`` would say, with absolute paths: a replica has another folder."""
    arguments = {"policy": policy, "lock": lock, "name": name, "batching": batching}
    paths = {
        key: None if path is None else str(Path(path).absolute()) for key, path in (("policy", policy), ("lock", lock))
    }
    settings = settings_of_source(
        Path(source).absolute(),
        {**paths, "batching": None if batching is None else dict(batching)},
        name=name,
        given=[key for key, value in arguments.items() if value is not None],
    )
    return {**settings.to_plain(), "schema": SCHEMA}


def _forwarding() -> Callable[..., Any]:
    return _Forwarding()


class _Forwarding:
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":  # before the replica reports itself ready; the models are loaded by then
            for word in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{word}.complete"})
            return
        from ray import serve

        await serve.get_replica_context().servable_object.application(scope, receive, send)
