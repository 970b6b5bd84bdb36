# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`check_server`: all checks of one server, over REST and gRPC."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING

from xpuruntime.errors import EngineUnavailable, XpuRuntimeError
from xpuruntime.files.paths import reason_of
from xpuruntime.runtime.install_commands import install_command
from xpuruntime.serving.conformance.rest_checks import RestChecks
from xpuruntime.serving.conformance.result import Check, ConformanceResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["check_server"]


def check_server(
    url: str,
    grpc: str | None = None,
    *,
    models: Sequence[str] = (),
    shapes: Mapping[str, Sequence[int]] | None = None,
    token: str | None = None,
    seconds: float = 30.0,
) -> ConformanceResult:
    """Check a server of the Open Inference Protocol; the requests change nothing in it.

    Parameters
    ----------
    url : str
        Of REST, such as ``"http://127.0.0.1:8000"``.
    grpc : str, optional
        Address of gRPC, ``HOST:PORT``.
    models : sequence of str, optional
        Models to check inference with; default: those that the server lists, eight at most.
    shapes : mapping of str to sequence of int, optional
        Shapes of inputs by name; other free dimensions are 1.
    token : str, optional
    seconds : float
        Time within which each answer must come.

    Raises
    ------
    InputError
        `url` is none.
    XpuRuntimeError
        Nothing answers there.
    EngineUnavailable
        The package grpcio is missing.
    """
    rest = RestChecks(url, token, seconds)
    try:
        rest.ask("GET", "/v2/health/live")
    except OSError as error:
        raise XpuRuntimeError(
            f"no server answers at {url}: {reason_of(error)}. Fix: start it, or correct the URL"
        ) from None
    except http.client.HTTPException as error:
        raise XpuRuntimeError(f"what answers at {url} is no HTTP: {error!r}. Fix: correct the URL") from None
    rest.run_server()
    chosen = tuple(models) or tuple(rest.models()[:8])
    for model in chosen:
        rest.run_model(model, shapes or {})
    checks = rest.checker.checks
    if not chosen:
        reason = "the server lists no model. Fix: name one"
        checks.append(Check(transport="rest", name="infer", outcome="unobservable", detail=reason))
    if grpc is not None:
        try:
            from xpuruntime.serving.conformance.grpc_checks import GrpcChecks

            other = GrpcChecks(grpc, token, seconds)
        except ImportError as error:
            raise EngineUnavailable(
                f"gRPC needs the package grpcio, which cannot be imported: {error}. Fix: {install_command('serve')}"
            ) from error
        try:
            other.run_server()
            for model in chosen:
                other.run_model(model, shapes or {}, rest.answers.get(model))
        finally:
            other.close()
        checks = checks + other.checker.checks
    server = f"{rest.server.get('name', '')} {rest.server.get('version', '')}".strip()
    return ConformanceResult(url=url, grpc=grpc or "", server=server, models=chosen, checks=tuple(checks))
