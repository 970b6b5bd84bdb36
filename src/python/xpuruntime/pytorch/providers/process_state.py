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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime import _core
from xpuruntime.pytorch.attention import sdpa_backends

if TYPE_CHECKING:
    from xpuruntime.ops.torch_kernels import TorchKernel


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


def _stated_precision() -> str:
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # PyTorch says none where each backend has one
        return ""


def _precisions() -> list[Any]:
    backends = torch.backends
    owners = [backends]
    for owner, parts in (
        (backends.cuda, ("matmul",)),
        (backends.cudnn, ("conv", "rnn")),
        (backends.mkldnn, ("matmul",)),
    ):
        owners += [owner, *(getattr(owner, part, None) for part in parts)]
    return [owner for owner in owners if hasattr(owner, "fp32_precision")]


def _precision() -> tuple[str, ...]:
    return _stated_precision(), *(owner.fp32_precision for owner in _precisions())


def _set_precision(stated: tuple[str, ...]) -> None:
    if stated[0] and stated[0] != _stated_precision():
        torch.set_float32_matmul_precision(stated[0])
    for owner, precision in zip(_precisions(), stated[1:], strict=True):
        if owner.fp32_precision != precision:
            owner.fp32_precision = precision


def _attention() -> sdpa_backends.SdpaBackends | None:
    """Return PyTorch's switches for attention, unless this thread holds them while one of its calls runs."""
    return None if _core.in_sdp_backend_scope() else sdpa_backends.read()


def _set_attention(stated: sdpa_backends.SdpaBackends | None) -> None:
    if stated is not None:
        sdpa_backends.write(stated)


def _cuda_seeds() -> tuple[_RandomNumbers, ...]:
    """Return the generators of CUDA devices; none before CUDA is in use, and where a graph is captured."""
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return ()
    generators = torch.cuda.default_generators
    return tuple(_RandomNumbers(generator.initial_seed(), generator.get_state()) for generator in generators)


def _set_cuda_seeds(stated: tuple[_RandomNumbers, ...]) -> None:
    for generator, numbers in zip(torch.cuda.default_generators, stated, strict=False):
        if generator.initial_seed() != numbers.seed:
            generator.set_state(numbers.state)


def _casts() -> tuple[tuple[bool, torch.dtype], ...]:
    kinds = ("cpu", "cuda")
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _set_casts(stated: tuple[tuple[bool, torch.dtype], ...]) -> None:
    for kind, (enabled, dtype) in zip(("cpu", "cuda"), stated, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


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
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (_casts, _set_casts),
    "the seed of the CPU's random numbers": (_random_numbers, lambda stated: torch.set_rng_state(stated.state)),
    "the seeds of CUDA's random numbers": (_cuda_seeds, _set_cuda_seeds),
    "the precision of fp32 products": (_precision, _set_precision),
    "deterministic algorithms": (
        _determinism, lambda stated: torch.use_deterministic_algorithms(stated[0], warn_only=stated[1]),
    ),
    "torch.backends.cudnn": _flags(torch.backends.cudnn, "enabled", "benchmark", "benchmark_limit", "deterministic"),
    "how products are reduced": _flags(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ),
    "the kernels of attention": (_attention, _set_attention),
    "the library of products": (torch.backends.cuda.preferred_blas_library, torch.backends.cuda.preferred_blas_library),
}  # fmt: skip
_lock = threading.Lock()
_changes: weakref.WeakKeyDictionary[TorchKernel, Changes] = weakref.WeakKeyDictionary()


def _is_changed(before: Any, now: Any) -> bool:
    return before not in (None, ()) and now not in (None, ()) and before != now


def changes_of(kernel: TorchKernel) -> Changes:
    """Return what the first use of a kernel changed in this process."""
    return _changes.get(kernel, Changes())


@contextlib.contextmanager
def _warnings_are_no_errors() -> Iterator[None]:
    """Let a package warn when it is imported or compiles, also where a program has warnings raised."""
    if not any(action == "error" for action, *_ in warnings.filters):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        ours = warnings.filters[0]
        try:
            yield
        finally:
            filters = list(warnings.filters)
    added = filters[: filters.index(ours)] if ours in filters else []
    add: Any = warnings.filterwarnings
    for action, message, category, module, line in reversed(added):
        patterns = [str(getattr(text, "pattern", text) or "") for text in (message, module)]
        add(action, patterns[0], category, patterns[1], line)


@contextlib.contextmanager
def watched(kernel: TorchKernel) -> Iterator[None]:
    """Find out what the use of a kernel inside changes, and put back what decides numbers."""
    filters, variables = list(warnings.filters), dict(os.environ)
    before = {name: read() for name, (read, _) in _DECIDES.items()}
    try:
        with _warnings_are_no_errors():
            yield
    finally:
        restored = tuple(name for name, value in before.items() if _is_changed(value, _DECIDES[name][0]()))
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
