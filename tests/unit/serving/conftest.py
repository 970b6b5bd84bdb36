# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fixtures of the tests of serving: models on disk, services that are closed at the end, and servers."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from served_models import Service
from serving_clients import Client, Served

from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    """Return a model with `x` float32 [N, 64] and `y` of the same shape."""
    return models.save(models.mlp(), tmp_path, "mlp.onnx")


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the certificate of this machine and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout", str(key), "-out", str(certificate),
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("needs openssl, to make a certificate")
    return certificate, key


@pytest.fixture
def serve() -> Iterator[Callable[..., Models]]:
    """Return a function that serves models of ``serve.yaml``, by name."""
    made: list[Models] = []

    def start(given: dict[str, Any], *, memory: Any = None, **more: Any) -> Models:
        document: dict[str, Any] = {"schema": "xpuruntime.serve/1", "models": given}
        if memory is not None:
            document["memory"] = memory
        service = Models(ServeSettings.coerce(document), **more)
        made.append(service)
        service.start()
        return service

    yield start
    for service in made:
        service.close(drain=1.0)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(service: Service) -> Iterator[Served]:
    for package in ("uvicorn", "httptools", "grpc"):
        pytest.importorskip(package, reason=f"needs {package}, of the extra serve")
    from xpuruntime.serving.server import Server
    from xpuruntime.serving.transport.gate import Access
    from xpuruntime.serving.transport.options import TransportOptions

    options = TransportOptions(
        access=Access(repository=True), max_body=4 << 20, max_message=4 << 20, header_seconds=1.5, body_seconds=1.5
    )

    def metrics(accept: str) -> tuple[bytes, str]:
        return f"# for {accept}\nup 1\n".encode(), "text/plain; version=0.0.4; charset=utf-8"

    server = Server(service, http="127.0.0.1:0", grpc="127.0.0.1:0", options=options, pages={"/metrics": metrics})
    with server:
        yield Served(service, server, Client(server.http_address))
