# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Compressed bodies, gzip and deflate, which grow neither beyond the limit of a body nor beyond a ratio."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_RATIO", "compress", "decompress", "response_encoding"]

#: How many times longer than its compressed form a body may be. Deflate reaches 1032 at most, with zeros.
MAX_RATIO = 200
_SMALL = 1 << 20
_GZIP = 16 + zlib.MAX_WBITS


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Return a body without its ``Content-Encoding``.

    Parameters
    ----------
    body : bytes
    encoding : str
        ``"gzip"``, ``"deflate"`` (RFC 1950, with zlib's header), ``"identity"`` or nothing.
    limit : int
        Largest length in bytes. A ratio above `MAX_RATIO` is refused as well where the body is over 1 MiB.

    Raises
    ------
    ServingError
        The encoding is another one, the data are corrupt, truncated or followed by more, or grow too much.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in ("gzip", "deflate"):
        raise ServingError(
            Status.INVALID_ARGUMENT, f"the Content-Encoding is {encoding[:40]!r}. Fix: gzip, deflate or identity"
        )
    most = min(limit, max(_SMALL, MAX_RATIO * len(body)))
    reader = zlib.decompressobj(_GZIP if name == "gzip" else zlib.MAX_WBITS)
    try:
        made = reader.decompress(body, most + 1)
    except zlib.error as error:
        raise _corrupt(name, str(error)) from None
    if len(made) > most:
        reason = f"over {limit} bytes" if most == limit else f"over {MAX_RATIO} times as long"
        raise ServingError(
            Status.TOO_LARGE, f"the body grows to {reason} as {name} is undone. Fix: send it in parts, or plain"
        )
    if not reader.eof:
        raise _corrupt(name, "the data are truncated")
    if reader.unused_data:
        raise _corrupt(name, f"{len(reader.unused_data)} bytes follow the data")
    return made


def _corrupt(name: str, reason: str) -> ServingError:
    return ServingError(Status.INVALID_ARGUMENT, f"the body is not {name}: {reason}. Fix: compress all of the body")


def response_encoding(accepted: str) -> str:
    """Return the encoding of a response for an ``Accept-Encoding``.

    Only where it names one of gzip and deflate, and nothing else, is that used: so clients ask for it that want it.
    Lists, such as browsers and curl send them, say what the client could read, and get what costs no time.
    """
    name = accepted.strip().lower()
    return name if name in ("gzip", "deflate") else ""


def compress(chunks: Sequence[bytes | memoryview], encoding: str) -> bytes:
    """Return chunks as one compressed body."""
    writer = zlib.compressobj(wbits=_GZIP if encoding == "gzip" else zlib.MAX_WBITS)
    return b"".join([*map(writer.compress, chunks), writer.flush()])
