# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Requests over HTTP to a server that is not trusted: the time and the length of each answer are bounded."""

from __future__ import annotations

import http.client
import io
import ssl
import time
import urllib.parse
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.serving.conformance.result import FailedCheck

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from _typeshed import WriteableBuffer

__all__ = ["Answer", "HttpClient"]

#: Bytes that are read of an answer: with tensors, and with facts alone, which take many times as much once decoded.
_MOST_OF_TENSORS, _MOST_OF_FACTS = 128 << 20, 8 << 20


class Answer(NamedTuple):
    """A response; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self, kind: Any = Any) -> Any:
        """Return the body as JSON of a type; raise FailedCheck where it is none."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except msgspec.ValidationError as error:
            raise FailedCheck(f"the answer is none of the protocol: {error}") from None
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise FailedCheck(f"status {self.status} with a body that is no JSON: {error}") from None


class HttpClient:
    """Requests to one server.

    Parameters
    ----------
    url : str
        ``http://HOST:PORT``, or ``https``, with a path where the server has one.
    token : str or None
    seconds : float
        Time within which an answer must have come.
    authorities : bytes, optional
        Certificates that are trusted, in PEM; default: those of the system.

    Raises
    ------
    InputError
        `url` is none.
    """

    def __init__(self, url: str, token: str | None, seconds: float, authorities: bytes | None = None) -> None:
        self._authorities = None if authorities is None else authorities.decode("latin-1")
        self._scheme, self._host, self._port, self._path = _parts_of(url)
        self._seconds = seconds
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """Send one request on a connection of its own.

        Raises
        ------
        OSError
            Nothing answers, or not in time.
        http.client.HTTPException
            What answers is no HTTP.
        FailedCheck
            The answer is too long.
        """
        kind: Any = http.client.HTTPConnection
        more: dict[str, Any] = {}
        if self._scheme == "https":
            kind, more = http.client.HTTPSConnection, {"context": ssl.create_default_context(cadata=self._authorities)}
        deadline = time.monotonic() + self._seconds
        most = _MOST_OF_TENSORS if path.endswith("/infer") else _MOST_OF_FACTS
        connection = kind(self._host, self._port, timeout=self._seconds, **more)
        connection.connect()
        connected = connection.sock
        connection.sock = _Bounded(connected, deadline, most)
        try:
            connection.request(method, self._path + path, body, {**self._headers, **headers})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        except (ValueError, OverflowError) as error:  # such as the length of a chunk
            raise http.client.HTTPException(str(error)) from None
        except MemoryError:
            raise FailedCheck("the answer states a length that no memory holds") from None
        finally:
            connected.close()


def _parts_of(url: str) -> tuple[str, str, int | None, str]:
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise _no_url(url, f": {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable() or " " in url:
        raise _no_url(url, "")
    if port == 0:
        raise _no_url(url, ": no server has port 0")
    if parts.username is not None or parts.password is not None:
        raise InputError("the URL has a user or password, which is not sent. Fix: leave it out, and use --token-file")
    if parts.query or parts.fragment:
        raise _no_url(url, ": it has a query or fragment")
    return parts.scheme, parts.hostname, port, urllib.parse.quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")


def _no_url(url: str, why: str) -> InputError:
    return InputError(f"{url[:80]!r} is no URL of a server{why}. Fix: write http://HOST:PORT")


class _Bounded(io.RawIOBase):
    """A socket as `http.client` uses one, which reads until a deadline and a count of bytes."""

    def __init__(self, connected: socket.socket, deadline: float, most: int) -> None:
        self._socket, self._deadline, self._most, self._left = connected, deadline, most, most
        self.sendall = connected.sendall

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return the file of the answer."""
        return io.BufferedReader(self, 1 << 16)

    def readable(self) -> bool:
        """Answers are read."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read what there is."""
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(seconds)
        count = self._socket.recv_into(buffer)
        self._left -= count
        if self._left < 0:
            raise FailedCheck(f"the answer is longer than {self._most >> 20} MiB, and was not read to its end")
        return count

    def close(self) -> None:
        """Leave the socket open: the answer may still be read when `http.client` ends the connection."""
