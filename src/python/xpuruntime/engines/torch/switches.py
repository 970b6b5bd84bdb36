# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch's process-wide switches, held by the sessions that need them."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.engines.torch.settings import Settings

__all__ = ["Switches", "hold"]

_lock = threading.Lock()
#: Switch to (value held, value before, sessions that hold it).
_held: dict[str, tuple[Any, Any, int]] = {}


class Switches:
    """The switches that one session holds. They go back to what they were with the last session that asked for them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def values(self) -> dict[str, Any]:
        """Return the present value of each."""
        return {name: _ACCESS[name][0]() for name in self._names}

    def release(self) -> None:
        """Give them back. Idempotent."""
        names, self._names = self._names, ()
        with _lock:
            for name in names:
                _give_back(name)


def hold(settings: Settings) -> Switches:
    """Set the switches that `settings` ask for.

    Raises
    ------
    EngineError
        Another open session holds one of them at another value, or deterministic cuBLAS needs an environment variable
        that is not set.
    """
    wanted: dict[str, Any] = {}
    if settings.tf32 is not None:
        wanted |= {"matmul.allow_tf32": settings.tf32, "cudnn.allow_tf32": settings.tf32}
    if settings.deterministic:
        if "CUBLAS_WORKSPACE_CONFIG" not in os.environ and _cuda_started():
            msg = (
                "execution.determinism: run_to_run on CUDA needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment "
                "before the first CUDA call of the process; set it and start again"
            )
            raise EngineError(msg, engine="torch")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        wanted |= {"deterministic_algorithms": True, "cudnn.benchmark": False}
    if settings.threads is not None:
        wanted["num_threads"] = settings.threads
    taken: list[str] = []
    with _lock:
        for name, value in wanted.items():
            held = _held.get(name)
            if held is not None and held[0] != value:
                for other in taken:
                    _give_back(other)
                msg = (
                    f"torch's switch {name} is one for the whole process, and an open session holds it at {held[0]}, "
                    f"while this one asks for {value}; close that session, or use a process of its own"
                )
                raise EngineError(msg, engine="torch")
            read, write = _ACCESS[name]
            if held is None:
                _held[name] = (value, read(), 1)
                write(value)
            else:
                _held[name] = (held[0], held[1], held[2] + 1)
            taken.append(name)
    return Switches(tuple(taken))


def _give_back(name: str) -> None:
    value, before, count = _held.pop(name)
    if count > 1:
        _held[name] = (value, before, count - 1)
    else:
        _ACCESS[name][1](before)


def _cuda_started() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())


def _get_matmul() -> bool:
    import torch

    return bool(torch.backends.cuda.matmul.allow_tf32)


def _set_matmul(value: bool) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = value


def _get_cudnn() -> bool:
    import torch

    return bool(torch.backends.cudnn.allow_tf32)


def _set_cudnn(value: bool) -> None:
    import torch

    torch.backends.cudnn.allow_tf32 = value


def _get_benchmark() -> bool:
    import torch

    return bool(torch.backends.cudnn.benchmark)


def _set_benchmark(value: bool) -> None:
    import torch

    torch.backends.cudnn.benchmark = value


def _get_deterministic() -> bool:
    import torch

    return bool(torch.are_deterministic_algorithms_enabled())


def _set_deterministic(value: bool) -> None:
    import torch

    torch.use_deterministic_algorithms(value)


def _get_threads() -> int:
    import torch

    return int(torch.get_num_threads())


def _set_threads(value: int) -> None:
    import torch

    torch.set_num_threads(value)


_ACCESS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "matmul.allow_tf32": (_get_matmul, _set_matmul),
    "cudnn.allow_tf32": (_get_cudnn, _set_cudnn),
    "cudnn.benchmark": (_get_benchmark, _set_benchmark),
    "deterministic_algorithms": (_get_deterministic, _set_deterministic),
    "num_threads": (_get_threads, _set_threads),
}
