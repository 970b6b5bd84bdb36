# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Decisions as records of Python's `logging`, and operations as spans of OpenTelemetry where the program has set it up.

Both have the same fields, such as ``xpuruntime.engine``: a record as attributes, which formatters for JSON write.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from logging import Logger

#: How many operations go on in this context, one inside of another: runs that they make have no spans of their own.
_WITHIN: ContextVar[int] = ContextVar("xpuruntime_operation", default=0)
P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def named_logger(name: str) -> Logger:
    """Return a logger of this package, which prints nothing unless the program configures logging."""
    import logging

    if name != "xpuruntime":
        named_logger("xpuruntime")
        return logging.getLogger(name)
    logger = logging.getLogger(name)
    logger.addHandler(logging.NullHandler())
    return logger


def log_decision(operation: str, level: str, event: str, text: str, **fields: Any) -> None:
    """Log one decision of an operation, such as ``"plan"``, with the event and its facts as fields.

    `level` is the name of one. Where nobody has imported `logging`, nobody listens, and it is not imported here.
    """
    if (logging := sys.modules.get("logging")) is None:
        return
    logger = named_logger(f"xpuruntime.{operation}")
    if logger.isEnabledFor(number := getattr(logging, level)):
        logger.log(number, "%s", printable(text), extra=_named({"event": event, **fields}), stacklevel=2)


def log_step(step: str, number: int, of: int, seconds: float | None = None) -> None:
    """Log that a step of a long operation begins, and about how many seconds are left of it all where that is known.

    Steps of an operation inside of another are not logged: they are parts of a step of that.
    """
    if _WITHIN.get() > 1:
        return
    left = "" if seconds is None else f", about {seconds:.0f} s left"
    text = f"{step} ({number} of {of}{left})"
    log_decision("steps", "INFO", "step", text, step=step, number=number, of=of, seconds=seconds)


def span_tracer(name: str) -> Any:
    """Return the tracer of the program's OpenTelemetry; ``None`` where it has set up no provider. Imports nothing."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    from xpuruntime import __version__

    return provider.get_tracer(name, __version__)


def traced(operation: str, describe: Callable[[R], Mapping[str, Any]]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes a span of each call, described by its result, and logs refusals as warnings."""

    def decorator(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            tracer, outer = span_tracer("xpuruntime"), _WITHIN.set(_WITHIN.get() + 1)
            try:
                if tracer is None:
                    return function(*args, **options)
                with tracer.start_as_current_span(f"xpuruntime.{operation}") as span:
                    result = function(*args, **options)
                    span.set_attributes(_named(describe(result)))
                    return result
            except XpuRuntimeError as error:
                log_refusal(operation, error)
                raise
            finally:
                _WITHIN.reset(outer)

        return call

    return decorator


def traced_run(run: Callable[..., dict[str, Any]], fields: Mapping[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return a `run` that makes spans; the same one for an operation's own session, and without OpenTelemetry."""
    tracer = None if _WITHIN.get() else span_tracer("xpuruntime")
    if tracer is None:
        return run
    attributes = _named(fields)

    def traced(*args: Any, **options: Any) -> dict[str, Any]:
        with tracer.start_as_current_span("xpuruntime.run", attributes=attributes):
            return run(*args, **options)

    return traced


def log_refusal(operation: str, error: XpuRuntimeError) -> None:
    """Log an error as it is raised first: an operation inside of another one, such as a plan, logs it already."""
    if not getattr(error, "logged", False):
        error.logged = True  # type: ignore[attr-defined]
        text = f"{operation} refused: {error}"
        log_decision(operation, "WARNING", "refusal", text, error=type(error).__name__)


def _named(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"xpuruntime.{name}": _plain(value) for name, value in fields.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [printable(str(part)) for part in value]
    return printable(os.fspath(value) if isinstance(value, os.PathLike) else str(value))
