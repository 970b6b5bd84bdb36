# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What the first use of a kernel of another package changes in the process, its import included.

What decides numbers is put back. Environment variables and filters of warnings stay, as packages may rely on these.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from xpuruntime.ops.torch_kernels import TorchKernel

__all__ = ["Changes", "changes_of", "watched"]


class Changes(NamedTuple):
    """Names of what was changed: what was put back, and what stays."""

    restored: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = [f"changed {', '.join(self.restored)}, which xpuruntime restored"] if self.restored else []
        said += [f"changed {', '.join(self.kept)}"] if self.kept else []
        return f"its first use {' and '.join(said)}" if said else ""


def _flags(owner: Any, *names: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    def read() -> Any:
        return tuple(getattr(owner, name) for name in names)

    def write(values: Any) -> None:
        for name, value in zip(names, values, strict=True):
            if getattr(owner, name) != value:
                setattr(owner, name, value)

    return read, write


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _precision() -> str:
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # PyTorch says none where each backend has one
        return ""


@dataclass(frozen=True, slots=True)
class _RandomNumbers:
    """The generator of the CPU. Draws are no change: dropout draws, and other threads may meanwhile."""

    seed: int
    state: torch.Tensor = field(compare=False)


def _random_numbers() -> _RandomNumbers:
    return _RandomNumbers(torch.initial_seed(), torch.get_rng_state())


#: What decides numbers, with what reads and what writes it.
_DECIDES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the seed of the CPU's random numbers": (_random_numbers, lambda stated: torch.set_rng_state(stated.state)),
    "the precision of fp32 products": (
        _precision, lambda stated: torch.set_float32_matmul_precision(stated) if stated else None,
    ),
    "deterministic algorithms": (
        _determinism, lambda stated: torch.use_deterministic_algorithms(stated[0], warn_only=stated[1]),
    ),
    "torch.backends.cudnn": _flags(torch.backends.cudnn, "enabled", "benchmark", "deterministic"),
}  # fmt: skip
_lock = threading.Lock()
_changes: weakref.WeakKeyDictionary[TorchKernel, Changes] = weakref.WeakKeyDictionary()


def changes_of(kernel: TorchKernel) -> Changes:
    """Return what the first use of a kernel changed in this process."""
    return _changes.get(kernel, Changes())


@contextlib.contextmanager
def watched(kernel: TorchKernel) -> Iterator[None]:
    """Find out what the use of a kernel inside changes, and put back what decides numbers."""
    filters, variables = list(warnings.filters), dict(os.environ)
    before = {name: read() for name, (read, _) in _DECIDES.items()}
    try:
        yield
    finally:
        restored = tuple(name for name, value in before.items() if _DECIDES[name][0]() != value)
        for name in restored:
            _DECIDES[name][1](before[name])
        named = {name for name in variables.keys() | os.environ.keys() if variables.get(name) != os.environ.get(name)}
        kept = (*sorted(named), *["the filters of warnings"] * (list(warnings.filters) != filters))
        if restored or kept:
            with _lock:
                known = _changes.get(kernel, Changes())
                _changes[kernel] = Changes(
                    *(tuple(dict.fromkeys((*a, *b))) for a, b in zip(known, (restored, kept), strict=True))
                )
