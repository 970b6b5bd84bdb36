# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Routes of the REST protocol: a path and a method to what is asked for."""

from __future__ import annotations

from typing import NamedTuple

from xpuruntime.serving.status import ServingError, Status
from xpuruntime.serving.transport.access import check_model, check_version

__all__ = ["Endpoint", "WrongMethodError", "route_of"]


class Endpoint(NamedTuple):
    """What a path asks for: its action, and the model and version that it names."""

    action: str
    model: str = ""
    version: str = ""


class WrongMethodError(ServingError):
    """The path is there, and takes another method."""

    def __init__(self, path: str, allowed: str) -> None:
        super().__init__(Status.INVALID_ARGUMENT, f"{path[:80]} takes {allowed}. Fix: use that method")
        self.allowed = allowed


_FIXED = {
    (): "server",
    ("health", "live"): "live",
    ("health", "ready"): "ready",
    ("models", "stats"): "statistics",
    ("repository", "index"): "index",
}
_OF_MODEL = {"", "ready", "infer", "config", "stats", "plan", "evidence", "lock"}
_POSTS = {"infer", "index", "load", "unload"}


def route_of(method: str, path: str) -> Endpoint:
    """Return what a path asks for; a slash at its end changes nothing.

    Raises
    ------
    WrongMethodError
    ServingError
        There is no such path, or it names a model that cannot be.
    """
    parts = path.split("/")
    if parts[-1] == "" and len(parts) > 2:
        parts.pop()
    if len(parts) < 2 or parts[0] or parts[1] != "v2":
        raise _not_found(path)
    route = _route(tuple(parts[2:]), path)
    allowed = ("POST",) if route.action in _POSTS else ("GET", "HEAD")
    if method not in allowed:
        raise WrongMethodError(path, ", ".join(allowed))
    return route


def _route(parts: tuple[str, ...], path: str) -> Endpoint:
    fixed = _FIXED.get(parts)
    if fixed is not None:
        return Endpoint(fixed)
    if parts[0] == "models" and len(parts) > 1:
        model, rest = parts[1], parts[2:]
        version = ""
        if len(rest) > 1 and rest[0] == "versions":
            version, rest = rest[1], rest[2:]
            if not version:
                raise _not_found(path)
        if model and len(rest) < 2 and "".join(rest) in _OF_MODEL and "" not in rest:
            return Endpoint(rest[0] if rest else "model", check_model(model), check_version(version))
    if parts[:2] == ("repository", "models") and len(parts) == 4 and parts[3] in ("load", "unload"):
        return Endpoint(parts[3], check_model(parts[2]))
    if parts[0] in ("systemsharedmemory", "cudasharedmemory", "trace", "logging"):
        raise ServingError(
            Status.UNIMPLEMENTED, f"this server does not have the extension of {path[:80]}. Fix: send tensors in bodies"
        )
    raise _not_found(path)


def _not_found(path: str) -> ServingError:
    return ServingError(
        Status.NOT_FOUND, f"there is nothing at {path[:80]!r}. Fix: paths begin with /v2, such as /v2/models/NAME/infer"
    )
