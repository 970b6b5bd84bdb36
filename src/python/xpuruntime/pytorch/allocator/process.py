# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ProcessAllocator`: xpuruntime's pools in place of PyTorch's caching allocator, for the whole process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from xpuruntime._core import MemoryManager, MemoryPool, TorchAllocator
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.allocator.stats import PoolUse
from xpuruntime.pytorch.allocator.torch_pools import pluggable

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ProcessAllocator", "current", "judge", "start"]

_lock = threading.Lock()
#: A global of this module, since it is one of the process: once set, it holds until that ends.
_current: ProcessAllocator | None = None


def judge(*, initialised: bool, backend: str, active: bool) -> str | None:
    """Say why the allocator of the process cannot be set, or None where it can."""
    if active:
        return "it is set already, and holds until the process ends: call it once, at the start of the program"
    if initialised:
        return (
            f"PyTorch has begun to use CUDA with its own allocator ({backend}), and cannot change that any more: its "
            "tensors would be freed by an allocator that never gave them. Call it before the first CUDA tensor, "
            "torch.cuda.init() or set_device(), at the start of the program; or take set_allocator() for a block"
        )
    return None


class ProcessAllocator:
    """What ``set_allocator(scope="process")`` returns. As a context manager it cannot be left."""

    def __init__(self, allocator: TorchAllocator) -> None:
        self._allocator = allocator
        self.pools = tuple(allocator.pools)
        self._failure: str | None = None

    def uses(self) -> tuple[PoolUse, ...]:
        """Return what PyTorch holds of each pool."""
        self._failure = self._allocator.take_failure() or self._failure
        return tuple(
            PoolUse.of(pool, self._allocator.stats(index), 1, self._failure) for index, pool in enumerate(self.pools)
        )

    def no_way_back(self) -> UnsupportedOperationError:
        """Return the error for leaving it."""
        return UnsupportedOperationError(
            "set_allocator(scope='process') holds until the process ends, because PyTorch cannot change an allocator "
            "that has given memory: run what needs PyTorch's own allocator in another process, or take "
            "set_allocator() for a block instead"
        )

    def __enter__(self) -> ProcessAllocator:
        raise UnsupportedOperationError(
            "'with set_allocator(scope=\"process\")' promises an end that it cannot have: call it without 'with', or "
            "take set_allocator() for a block"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Never reached, as entering raises."""

    def __repr__(self) -> str:
        return f"ProcessAllocator(pools={[pool.name for pool in self.pools]!r})"


def current() -> ProcessAllocator | None:
    """Return the one of this process, or None."""
    return _current


def start(pool: MemoryPool | None, limit: int | None) -> ProcessAllocator:
    """Replace PyTorch's allocator.

    Parameters
    ----------
    pool : MemoryPool, optional
        For its device; the others have their shared ones.
    limit : int, optional
        Bytes on each device.

    Raises
    ------
    UnsupportedOperationError
        It is too late, or this PyTorch cannot.
    """
    global _current
    with _lock:
        backend = torch.cuda.memory.get_allocator_backend()
        reason = judge(initialised=torch.cuda.is_initialized(), backend=backend, active=_current is not None)
        if reason is not None:
            msg = f"set_allocator(scope='process') is not possible: {reason}"
            raise UnsupportedOperationError(msg)
        allocator = TorchAllocator(
            [_pool_of(f"cuda:{index}", pool, limit) for index in range(torch.cuda.device_count())], throws=True
        )
        pluggable_allocator = pluggable(allocator)
        try:
            pluggable_allocator.set_record_stream_fn(allocator.record_stream_address)
            pluggable_allocator.set_reset_fn(allocator.empty_cache_address)
            pluggable_allocator.set_memory_fraction_fn(allocator.memory_fraction_address)
        except AttributeError as error:
            msg = (
                f"set_allocator(scope='process') is not possible: torch {torch.__version__} does not pass an allocator "
                f"the streams that use its memory ({error}). Take set_allocator() for a block instead"
            )
            raise UnsupportedOperationError(msg) from error
        try:
            torch.cuda.memory.change_current_allocator(_private_api.cuda_allocator(pluggable_allocator))
        except RuntimeError as error:
            why = judge(initialised=True, backend=backend, active=False)
            msg = f"set_allocator(scope='process') is not possible: {why} ({error})"
            raise UnsupportedOperationError(msg) from error
        _current = ProcessAllocator(allocator)
        return _current


def _pool_of(device: str, pool: MemoryPool | None, limit: int | None) -> MemoryPool:
    if pool is not None and pool.device == device:
        return pool
    if limit is not None:
        return MemoryPool(device, limit=limit, name=f"torch@{device}")
    return MemoryManager.instance().default_pool(device)
