# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`check_server`: all checks of one server, over REST and gRPC."""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from xpuruntime.errors import EngineUnavailable, XpuRuntimeError
from xpuruntime.files.paths import reason_of
from xpuruntime.runtime.packages import install_command
from xpuruntime.serving.conformance.rest_checks import HttpClient, RestChecks
from xpuruntime.serving.conformance.result import ConformanceResult, FailedCheck
from xpuruntime.serving.transport.options import read_authorities

if TYPE_CHECKING:
    import os

    from xpuruntime.serving.conformance.grpc_checks import GrpcChecks

_MOST_MODELS = 8


def check_server(
    url: str,
    grpc: str | None = None,
    *,
    models: Sequence[str] = (),
    shapes: Mapping[str, Sequence[int]] | None = None,
    token: str | None = None,
    seconds: float = 30.0,
    tls_ca: str | os.PathLike[str] | None = None,
) -> ConformanceResult:
    """Check a server of the Open Inference Protocol; the requests change nothing in it."""
    authorities = None if tls_ca is None else read_authorities(tls_ca, "tls_ca")
    rest = RestChecks(HttpClient(url, token, seconds, authorities))
    with contextlib.ExitStack() as stack:
        other: GrpcChecks | None = None
        if grpc is not None:
            encrypted = url.startswith("https://")
            other = _grpc_checks(grpc, token, seconds, authorities, encrypted=encrypted)
            stack.enter_context(contextlib.closing(other))
        _find_server(rest, url)
        rest.run_server()
        listed = () if models else rest.models()
        chosen = tuple(models) or tuple(listed[:_MOST_MODELS])
        for model in chosen:
            rest.run_model(model, shapes or {})
        not_seen = rest.checker.not_seen
        if not chosen:
            not_seen("infer", "the server lists no model. Fix: name one")
        if listed[_MOST_MODELS:]:
            unchecked_count = len(listed) - _MOST_MODELS
            not_seen("models", f"{unchecked_count} more are listed, and were not checked. Fix: name those to check")
        for name in sorted((shapes or {}).keys() - rest.inputs):
            not_seen(f"shape of {name}", "no model that was checked has this input. Fix: correct the name")
        checks = rest.checker.checks
        if other is not None:
            other.run_server()
            for model in chosen:
                other.run_model(model, shapes or {}, rest.answers.get(model))
            checks = checks + other.checker.checks
    server = f"{rest.server.get('name', '')} {rest.server.get('version', '')}".strip()[:200]
    return ConformanceResult(url=url, grpc=grpc or "", server=server, models=chosen, checks=tuple(checks))


def _find_server(rest: RestChecks, url: str) -> None:
    try:
        rest.ask("GET", "/v2/health/live")
    except ssl.SSLError as error:
        raise XpuRuntimeError(
            f"no encrypted connection to {url}: {reason_of(error)}. Fix: state the certificate of its authority "
            "(--tls-ca), or correct the URL"
        ) from None
    except OSError as error:
        raise XpuRuntimeError(
            f"no server answers at {url}: {reason_of(error)}. Fix: start it, or correct the URL"
        ) from None
    except http.client.HTTPException as error:
        raise XpuRuntimeError(f"what answers at {url} is no HTTP: {error!r}. Fix: correct the URL") from None
    except FailedCheck as error:
        raise XpuRuntimeError(f"{url} has no health of the protocol: {error}. Fix: correct the URL") from None


def _grpc_checks(
    address: str, token: str | None, seconds: float, authorities: bytes | None, *, encrypted: bool
) -> GrpcChecks:
    try:
        from xpuruntime.serving.conformance.grpc_checks import GrpcChecks

        return GrpcChecks(address, token, seconds, authorities, encrypted=encrypted)
    except ImportError as error:
        raise EngineUnavailable(
            f"gRPC needs the package grpcio, which cannot be imported: {error}. Fix: {install_command('serve')}"
        ) from error
