# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``init_method=``: where ranks meet, and what the environment says of this one."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from xpuruntime.distributed.rendezvous.file import FileRendezvous
from xpuruntime.distributed.rendezvous.store import StoreRendezvous
from xpuruntime.distributed.rendezvous.tcp import TcpRendezvous
from xpuruntime.errors import EngineError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.distributed.rendezvous.member import Rendezvous

__all__ = ["environment_number", "local_rank", "rendezvous"]

_KINDS = "'env://', 'tcp://host:port', 'file:///path', or a torch.distributed.Store"
_TORCHRUN = "start the program with torchrun, set it, or name rank, world_size and init_method in Communicator.init"


def rendezvous(init_method: Any, timeout: float, environ: Mapping[str, str] | None = None) -> Rendezvous:
    """Return where ranks meet."""
    env = os.environ if environ is None else environ
    if not isinstance(init_method, str):
        if all(callable(getattr(init_method, name, None)) for name in ("add", "set", "get", "check")):
            return StoreRendezvous(init_method)
        raise InputError(f"init_method is {init_method!r}; expected {_KINDS}")
    parts = urlsplit(init_method)
    if parts.scheme == "env" and init_method == "env://":
        return _from_environment(env, timeout)
    if parts.scheme == "tcp":
        try:
            port = parts.port
        except ValueError:
            port = None
        if not parts.hostname or not port or parts.path.strip("/") or parts.query:
            raise InputError(f"init_method is {init_method!r}; expected 'tcp://host:port' with a port from 1 to 65535")
        return TcpRendezvous(parts.hostname, port)
    if parts.scheme == "file":
        path = unquote(parts.path)
        if parts.netloc or not path.startswith("/") or path.endswith("/"):
            raise InputError(f"init_method is {init_method!r}; expected 'file:///folder/name', an absolute path")
        return FileRendezvous(path)
    raise InputError(f"init_method is {init_method!r}; expected {_KINDS}")


def environment_number(name: str, environ: Mapping[str, str] | None = None) -> int:
    """Return a variable that is a whole number from 0. Raises `InputError` naming it and the fix."""
    env = os.environ if environ is None else environ
    text = env.get(name)
    if text is None:
        raise InputError(f"the environment has no {name}. Fix: {_TORCHRUN}")
    if not text.isascii() or not text.isdigit():
        raise InputError(f"{name} is {text!r} in the environment; expected a whole number from 0. Fix: {_TORCHRUN}")
    return int(text)


def local_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """Return LOCAL_RANK; ``None`` where it is not set."""
    env = os.environ if environ is None else environ
    return environment_number("LOCAL_RANK", env) if "LOCAL_RANK" in env else None


def _from_environment(env: Mapping[str, str], timeout: float) -> Rendezvous:
    host = env.get("MASTER_ADDR")
    if not host:
        raise InputError(f"the environment has no MASTER_ADDR. Fix: {_TORCHRUN}")
    port = environment_number("MASTER_PORT", env)
    if not 0 < port < 65536:
        raise InputError(f"MASTER_PORT is {port} in the environment; expected 1 to 65535. Fix: {_TORCHRUN}")
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun itself listens on MASTER_PORT, and keeps this store there.
        run, restart = env.get("TORCHELASTIC_RUN_ID", "none"), env.get("TORCHELASTIC_RESTART_COUNT", "0")
        return StoreRendezvous(_agent_store(host, port, timeout), f"xpuruntime/nccl/{run}/{restart}")
    return TcpRendezvous(host, port)


def _agent_store(host: str, port: int, timeout: float) -> Any:
    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        raise EngineError(
            f"torchrun keeps its store at {host}:{port}, and reading it needs PyTorch: {error}. Fix: install torch, or "
            "pass init_method='tcp://host:port' with another port",
            engine="nccl",
        ) from None
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=max(1.0, timeout)))
    except Exception as error:
        raise EngineError(
            f"torchrun's store at {host}:{port} cannot be reached within {timeout:g} s: {error}. Fix: see whether "
            "torchrun still runs",
            engine="nccl",
        ) from error
