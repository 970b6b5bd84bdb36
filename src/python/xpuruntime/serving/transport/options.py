# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TransportOptions`: limits of connections and requests, and who may send them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xpuruntime.serving.transport.access import Access, read_token

if TYPE_CHECKING:
    from xpuruntime.serving.messages import ModelService
    from xpuruntime.serving.models.settings import ServeSettings

__all__ = ["TransportOptions", "options_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Limits of a server. The defaults are those that it is safe to start with.

    Parameters
    ----------
    access : Access
    max_body : int
        Largest body of an HTTP request, compressed and not, in bytes.
    max_buffered : int
        Bytes that the bodies of HTTP requests, the messages of gRPC calls and their responses together may have at a
        time; one more request is answered with 429, or RESOURCE_EXHAUSTED.
    max_message : int
        Largest message of a gRPC request, in bytes.
    max_header : int
        Largest head of an HTTP request, in bytes.
    max_connections : int
        HTTP connections, and as many calls of gRPC, at a time; one more is answered with 503, or RESOURCE_EXHAUSTED.
    body_threads : int, optional
        Threads of the core that receive large bodies of HTTP where those come fast, so that the event loop does not: by
        default one for every four processors, at most two. With 0, and with TLS, the event loop receives all.
    header_seconds : float
        Time within which the head of a request must have come.
    body_seconds : float
        Time within which the body must have come; it grows by a second for each 16 KiB that did.
    response_seconds : float
        Time in which a client must take 16 KiB of a response for each second, or answer a ping of gRPC; its connection
        is closed otherwise.
    idle_seconds : float
        How long a connection without a request is kept.
    drain_seconds : float
        How long accepted requests are waited for when the server stops.
    """

    access: Access = field(default_factory=Access)
    max_body: int = 64 << 20
    max_buffered: int = 1 << 30
    max_message: int = 64 << 20
    max_header: int = 64 << 10
    max_connections: int = 4096
    body_threads: int | None = None
    header_seconds: float = 10.0
    body_seconds: float = 10.0
    response_seconds: float = 10.0
    idle_seconds: float = 30.0
    drain_seconds: float = 30.0

    @classmethod
    def of(cls, settings: ServeSettings, token: str | None = None, *, drain_seconds: float = 30.0) -> TransportOptions:
        """Return the limits that a ``serve.yaml`` states.

        Raises
        ------
        InputError
            The file with the key of the administrator cannot be read.
        """
        admin = settings.admin
        key = None if admin.key_file is None else read_token(admin.key_file, "the key file")
        return cls(
            access=Access(token, key, admin.repository),
            max_body=settings.http.max_body,
            body_threads=settings.http.body_threads,
            max_message=settings.grpc.max_message,
            drain_seconds=drain_seconds,
        )

    def server_metadata(self, service: ModelService) -> dict[str, Any]:
        """Return the metadata of a server: those of its models, with the extensions of its transports."""
        facts = service.server_metadata()
        shut = () if self.access.repository else ("model_repository",)
        extensions = {"binary_tensor_data": None, **dict.fromkeys(facts.get("extensions", ()))}
        return {**facts, "extensions": [one for one in extensions if one not in shut]}


def options_for(service: ModelService) -> TransportOptions:
    """Return the limits of a service: those of the settings of `Models`, else the defaults. Raises `InputError`."""
    from xpuruntime.serving.models.settings import ServeSettings

    settings = getattr(service, "settings", None)
    return TransportOptions.of(settings) if isinstance(settings, ServeSettings) else TransportOptions()
