# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`check_server`: all checks of one server, over REST and gRPC."""

from __future__ import annotations

import contextlib
import http.client
from typing import TYPE_CHECKING

from xpuruntime.errors import EngineUnavailable, XpuRuntimeError
from xpuruntime.files.paths import reason_of
from xpuruntime.runtime.install_commands import install_command
from xpuruntime.serving.conformance.http_client import HttpClient
from xpuruntime.serving.conformance.rest_checks import RestChecks
from xpuruntime.serving.conformance.result import ConformanceResult, FailedCheck

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.serving.conformance.grpc_checks import GrpcChecks

__all__ = ["check_server"]

_MOST_MODELS = 8


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
        `url` is none, or `grpc` no address.
    XpuRuntimeError
        Nothing answers there.
    EngineUnavailable
        The package grpcio is missing.
    """
    rest = RestChecks(HttpClient(url, token, seconds))
    with contextlib.ExitStack() as stack:
        other = None if grpc is None else stack.enter_context(contextlib.closing(_grpc_checks(grpc, token, seconds)))
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
            more = len(listed) - _MOST_MODELS
            not_seen("models", f"{more} more are listed, and were not checked. Fix: name those to check")
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
    except OSError as error:
        raise XpuRuntimeError(
            f"no server answers at {url}: {reason_of(error)}. Fix: start it, or correct the URL"
        ) from None
    except http.client.HTTPException as error:
        raise XpuRuntimeError(f"what answers at {url} is no HTTP: {error!r}. Fix: correct the URL") from None
    except FailedCheck as error:
        raise XpuRuntimeError(f"{url} has no health of the protocol: {error}. Fix: correct the URL") from None


def _grpc_checks(address: str, token: str | None, seconds: float) -> GrpcChecks:
    try:
        from xpuruntime.serving.conformance.grpc_checks import GrpcChecks

        return GrpcChecks(address, token, seconds)
    except ImportError as error:
        raise EngineUnavailable(
            f"gRPC needs the package grpcio, which cannot be imported: {error}. Fix: {install_command('serve')}"
        ) from error
