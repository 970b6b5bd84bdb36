# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Options of a server: addresses, TLS, limits of connections and requests."""

from __future__ import annotations

import re
import shlex
import socket
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xpuruntime.argument_types import TEXT, check_types
from xpuruntime.errors import InputError, XpuRuntimeError
from xpuruntime.files.paths import reason_of, user_path
from xpuruntime.files.reading import read_regular
from xpuruntime.serving.messages import ServingError, Status
from xpuruntime.serving.transport.gate import Access

if TYPE_CHECKING:
    import os

    from xpuruntime.serving.messages import ModelService
    from xpuruntime.serving.models.settings import ServeSettings

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def read_token(path: str, what: str) -> str:
    """Return the token in a file: its one line, of 16 characters at least."""
    try:
        text = read_regular(user_path(path, what), 64 << 10).decode("latin-1").strip()
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read: {reason_of(error)}. Fix: name a file with a token") from None
    if len(text) < 16 or len(text.split()) != 1 or not text.isascii():
        raise InputError(
            f"{what} {path} has no token, which is one line of 16 characters of ASCII or more. "
            f"Fix: openssl rand -hex 32 > {shlex.quote(path)}"
        )
    return text


def check_model(name: str) -> str:
    """Return the name of a model. Raises for one that no model can have."""
    if _NAME.fullmatch(name) is None or name in (".", ".."):
        raise ServingError(
            Status.INVALID_ARGUMENT,
            f"{name[:80]!r} cannot be the name of a model. Fix: 1 to 128 letters, digits, '.', '_' and '-'",
        )
    return name


def check_version(version: str) -> str:
    """Return a version, or nothing for the newest. Raises for one that no model can have."""
    if version and (_NAME.fullmatch(version) is None or version in (".", "..")):
        raise ServingError(
            Status.INVALID_ARGUMENT, f"{version[:80]!r} cannot be a version. Fix: a number such as 1, or none"
        )
    return version


_LARGEST = 16 << 20


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a server's identity, in PEM.

    Parameters
    ----------
    certificate, key : str or path
        The key without a passphrase.
    client_ca : str or path, optional
        Certificates of authorities; only clients with a certificate of one of them are let in.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    client_ca: str | os.PathLike[str] | None = None

    def check(self) -> None:
        """Raise InputError where a file is missing, is no PEM, or the key is not that of the certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        what = "the certificate and key of TLS"
        try:
            context.load_cert_chain(user_path(self.certificate, what), user_path(self.key, what), password=_refuse)
            if self.client_ca is not None:
                what = "the certificates of client authorities"
                context.load_verify_locations(user_path(self.client_ca, what))
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise InputError(
                f"{what} cannot be used: {reason_of(error)}. Fix: name PEM files that belong together"
            ) from None

    def for_uvicorn(self) -> dict[str, Any]:
        """Return the arguments of uvicorn's configuration."""
        arguments: dict[str, Any] = {"ssl_certfile": self.certificate, "ssl_keyfile": self.key}
        if self.client_ca is not None:
            arguments |= {"ssl_ca_certs": str(self.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return arguments

    def for_grpc(self) -> Any:
        """Return the credentials of a gRPC server."""
        import grpc

        pair = (read_regular(self.key, _LARGEST), read_regular(self.certificate, _LARGEST))
        authorities = None if self.client_ca is None else read_regular(self.client_ca, _LARGEST)
        return grpc.ssl_server_credentials([pair], authorities, authorities is not None)


def read_authorities(path: str | os.PathLike[str], what: str) -> bytes:
    """Return the certificates in a PEM file. Raises InputError for another file; `what` names it."""
    try:
        data = read_regular(user_path(path, what), _LARGEST)
        ssl.create_default_context(cadata=data.decode("latin-1"))
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise InputError(f"{what} {path} cannot be used: {reason_of(error)}. Fix: name a PEM file") from None
    return data


def _refuse() -> str:
    raise ValueError("the key has a passphrase")


_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.*_-]+)):([0-9]{1,5})")
_EVERYWHERE = frozenset({"0.0.0.0", "::"})


def read_address(text: str, option: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, such as ``127.0.0.1:8000`` or ``[::1]:0``."""
    check_types({option: TEXT}, {option: text})
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        raise InputError(f"{option} is {text[:80]!r}. Fix: write HOST:PORT, such as 127.0.0.1:8000, or [::1]:0")
    host = match[1] or match[2]
    return "0.0.0.0" if host == "*" else host, int(match[3])


def check_apart(first: str, second: str) -> None:
    """Refuse two addresses that share one: the second listener would have none of it, or a part of it alone."""
    hosts, ports = zip(*(read_address(text, "address") for text in (first, second)), strict=True)
    if ports[0] != ports[1] or ports[0] == 0:
        return
    try:
        addresses = [{str(address[4][0]) for address in socket.getaddrinfo(host, ports[0])} for host in hosts]
    except OSError:
        return  # said as it is bound
    if addresses[0] & addresses[1] or _EVERYWHERE & (addresses[0] | addresses[1]):
        raise InputError(f"http {first} and grpc {second} are the same address. Fix: give one of them another port")


def bind(text: str, option: str) -> socket.socket:
    """Return a socket that is bound to an address; with port 0, to a free one."""
    host, port = read_address(text, option)
    listener: socket.socket | None = None
    try:
        family, kind, number, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(where)
        listener.listen(2048)  # it is ours from now on: bound alone, another process could take it too
    except OSError as error:
        if listener is not None:
            listener.close()
        raise unusable(text, option, reason_of(error)) from None
    return listener


def unusable(text: str, option: str, reason: str) -> XpuRuntimeError:
    """Return the error of an address that cannot be listened on."""
    return XpuRuntimeError(
        f"{option} {text} cannot be listened on: {reason}. Fix: stop what uses it, or write {option} 127.0.0.1:0, "
        "which takes a free port"
    )


def shown(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Limits of a server. The defaults are those that it is safe to start with.

    Parameters
    ----------
    access : Access
    max_body : int
        Largest body of an HTTP request, compressed and not, in bytes.
    max_json : int
        Largest JSON of an inference request over HTTP, in bytes; tensors behind it, as the binary extension has them,
        are not of it. `max_body` bounds that of a response.
    max_buffered : int
        Bytes that the bodies of HTTP requests, the messages of gRPC calls and their responses together may have at a
        time; one more request or response is refused with 429, or RESOURCE_EXHAUSTED.
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
    max_json: int = 4 << 20
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
            max_json=settings.http.max_json,
            body_threads=settings.http.body_threads,
            max_message=settings.grpc.max_message,
            drain_seconds=drain_seconds,
        )

    def server_metadata(self, service: ModelService) -> dict[str, Any]:
        """Return the metadata of a server: those of its models, with the extensions of its transports."""
        facts = service.server_metadata()
        shut = () if self.access.repository else ("model_repository",)
        extensions = {"binary_tensor_data": None, **dict.fromkeys(facts.get("extensions", ()))}
        return {**facts, "extensions": [extension for extension in extensions if extension not in shut]}


def options_for(service: ModelService) -> TransportOptions:
    """Return the limits of a service: those of the settings of `Models`, else the defaults. Raises `InputError`."""
    from xpuruntime.serving.models.settings import ServeSettings

    settings = getattr(service, "settings", None)
    return TransportOptions.of(settings) if isinstance(settings, ServeSettings) else TransportOptions()
