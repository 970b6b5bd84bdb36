# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Compressed bodies: read where they are whole, and refused where they are bombs, truncated or something else."""

from __future__ import annotations

import gzip
import os
import zlib

import pytest

from xpuruntime.serving.http.bodies import compress, decompress, response_encoding
from xpuruntime.serving.status import ServingError, Status

LIMIT = 64 << 20


@pytest.mark.parametrize(
    ("encoding", "make"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP ", gzip.compress)]
)
def test_bodies_come_back(encoding, make):
    body = os.urandom(1000) + b"a" * 1000
    assert decompress(make(body), encoding, LIMIT) == body
    assert decompress(make(b""), encoding, LIMIT) == b""


@pytest.mark.parametrize("encoding", ["", "identity"])
def test_plain_bodies_are_left_alone(encoding):
    body = b"plain"
    assert decompress(body, encoding, LIMIT) is body


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_what_the_server_compresses_can_be_read(encoding):
    chunks = [b"abc", memoryview(bytes(1000))]
    assert decompress(compress(chunks, encoding), encoding, LIMIT) == b"abc" + bytes(1000)


@pytest.mark.parametrize(("encoding", "make"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_bombs_are_refused_at_the_limit(encoding, make):
    bomb = make(bytes(32 << 20))
    with pytest.raises(ServingError, match="over 200 times as long") as caught:
        decompress(bomb, encoding, LIMIT)
    assert caught.value.code is Status.TOO_LARGE
    with pytest.raises(ServingError, match=f"over {1 << 20} bytes"):
        decompress(bomb, encoding, 1 << 20)


def test_a_small_body_may_compress_well():
    assert len(decompress(gzip.compress(bytes(1 << 20)), "gzip", LIMIT)) == 1 << 20


@pytest.mark.parametrize(
    ("body", "encoding", "match"),
    [
        (b"not compressed", "gzip", "is not gzip"),
        (b"not compressed", "deflate", "is not deflate"),
        (b"", "gzip", "truncated"),
        (gzip.compress(b"abc", mtime=0)[:-1], "gzip", "truncated"),
        (gzip.compress(b"abc", mtime=0) + b"!", "gzip", "1 bytes follow"),
        (gzip.compress(b"abc", mtime=0)[:-8] + b"\0" * 8, "gzip", "is not gzip"),
        (gzip.compress(b"abc", mtime=0), "deflate", "is not deflate"),
        (b"abc", "br", "the Content-Encoding is 'br'"),
        (b"abc", "gzip, gzip", "the Content-Encoding is 'gzip, gzip'"),
    ],
)
def test_corrupt_bodies_are_refused(body, encoding, match):
    with pytest.raises(ServingError, match=match) as caught:
        decompress(body, encoding, LIMIT)
    assert caught.value.code is Status.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        ("gzip", "gzip"),
        ("Deflate", "deflate"),
        ("gzip, deflate", ""),
        ("gzip;q=0", ""),
        ("*", ""),
        ("", ""),
        ("br", ""),
    ],
)
def test_a_response_is_compressed_where_one_encoding_is_asked_for(accepted, expected):
    assert response_encoding(accepted) == expected
