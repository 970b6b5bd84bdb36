# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Allocators of PyTorch on xpuruntime's pools, for a block or the process, and what is taken of each pool."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch

from xpuruntime._core import MemoryManager, MemoryPool, TorchAllocator
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.allocator.scope import AllocatorScope, close_scopes_of_this_thread, open_scopes
from xpuruntime.pytorch.allocator.torch_pools import all_bridges, pluggable

if TYPE_CHECKING:
    from xpuruntime._core import TorchAllocatorStats

_SCOPES = ("block", "process")


def set_allocator(
    enabled: bool = True,
    *,
    pool: MemoryPool | None = None,
    device: object = None,
    scope: Literal["block", "process"] = "block",
    limit: int | None = None,
    route_backward: bool = True,
) -> AllocatorScope | ProcessAllocator:
    """Let PyTorch's CUDA tensors come from a memory pool of xpuruntime.

    Use it as a context manager, or call it and later `reset_allocator`.

    With ``scope="block"``, PyTorch's caching allocator asks the xpuruntime pool for segments (of 2 MiB for tensors up
    to 1 MiB, of 20 MiB up to 10 MiB, above that of the size rounded to 2 MiB) and cuts tensors from them. It concerns
    **the calling thread and one device**: tensors that other threads make, such as those of a data loader, come from
    where they came from before. PyTorch runs backward passes on threads of its own; with `route_backward` those that
    this thread starts run on this thread, so that their memory comes from the pool too.

    Scopes nest; the innermost one of a device counts. A CUDA graph that is captured inside gets a pool of its own on
    the same memory, which stays with it after the scope, unless the capture names a pool. Tensors may outlive the
    scope.

    With ``scope="process"``, every tensor of every thread and device comes straight from xpuruntime pools. PyTorch
    accepts that only before its first use of CUDA, and not back. PyTorch's own memory statistics, snapshots, IPC of
    tensors, ``cudnn.benchmark`` and ``torch.compile(mode="reduce-overhead")`` then raise its errors; `allocator_stats`
    and `memory_report` have the numbers. A CUDA graph holds what it captured until it is gone and has run. A refused
    allocation is a RuntimeError there, whose text is the pool's, as PyTorch lets no allocator of others raise its
    OutOfMemoryError.

    Parameters
    ----------
    enabled : bool
        False is `reset_allocator`, and returns a closed scope.
    pool : MemoryPool, optional
        Where memory comes from; kind ``"caching"``, ``"direct"`` or, without CUDA graphs, ``"driver"``. Default: the
        device's shared pool, or one of its own where there is a `limit`.
    device : torch.device, str or int, optional
        The CUDA device. Default: that of `pool`, or the current one. Not with ``scope="process"``, which concerns all.
    scope : {"block", "process"}
    limit : int, optional
        Most bytes to hold, including what PyTorch keeps for reuse; with ``scope="process"`` on each device. What passes
        it is a ``torch.OutOfMemoryError``, whose text has the reason when it leaves the ``with`` block.
    route_backward : bool
        Run backward passes of this thread on this thread.

    Returns
    -------
    AllocatorScope or ProcessAllocator

    Raises
    ------
    InputError
        An argument is wrong, or two of them do not go together.
    UnsupportedOperationError
        There is no CUDA device; PyTorch uses its memory already and ``scope="process"`` is asked; a graph is being
        captured; or PyTorch runs with a setting under which it ignores the pool.
    """
    _check_arguments(enabled, pool, device, scope, limit, route_backward)
    if not enabled:
        reset_allocator()
        return AllocatorScope(None)
    if not torch.cuda.is_available():
        why = "was built without CUDA" if torch.version.cuda is None else "finds no CUDA device"
        msg = (
            f"set_allocator() gives memory for CUDA tensors, and torch {torch.__version__} {why}. Install a CUDA build "
            "of PyTorch on a machine with an NVIDIA GPU, or leave set_allocator() out: CPU tensors do not use it"
        )
        raise UnsupportedOperationError(msg, device="cuda")
    if scope == "process":
        return start_process_allocator(pool, limit)
    if process_allocator() is not None:
        msg = (
            "every tensor of this process comes from xpuruntime's pools already, by set_allocator(scope='process'), "
            "and PyTorch has no second allocator for a block: leave one of the two out"
        )
        raise UnsupportedOperationError(msg)
    return AllocatorScope(_pool(pool, device, limit), route_backward=route_backward)


def reset_allocator() -> None:
    """Let CUDA tensors of this thread come from where they came from before `set_allocator`.

    Closes every scope that this thread opened. Without one it does nothing.

    Raises
    ------
    UnsupportedOperationError
        The allocator was set for the process: PyTorch cannot go back from that.
    """
    active = process_allocator()
    if active is not None:
        raise active.no_way_back()
    close_scopes_of_this_thread()


def allocator_stats() -> AllocatorStats:
    """Return what PyTorch holds of xpuruntime pools, through every scope of every thread.

    Works without a GPU, and then says that there is nothing. Pools whose scopes are closed are listed for as long as
    tensors or graphs use their memory.
    """
    active = process_allocator()
    if active is not None:
        return AllocatorStats("process", active.uses())
    scopes = open_scopes()
    uses = []
    for bridge in all_bridges():
        bridge.take_failure()
        count = sum(scope.lends(bridge) for scope in scopes)
        uses.append(PoolUse.of(bridge.pool, bridge.allocator.stats(), count, bridge.last_failure))
    return AllocatorStats("block" if uses else "none", tuple(uses))


def _check_arguments(
    enabled: object, pool: object, device: object, scope: object, limit: object, route_backward: object
) -> None:
    for name, flag in (("enabled", enabled), ("route_backward", route_backward)):
        if not isinstance(flag, bool):
            msg = f"{name} is {flag!r}: give True or False"
            raise InputError(msg)
    if not isinstance(scope, str) or scope not in _SCOPES:
        known = "take 'block' (this thread, reversible) or 'process' (all threads, permanently)"
        msg = f"scope {scope!r} is not known: {known}"
        raise InputError(msg)
    if pool is not None and not isinstance(pool, MemoryPool):
        msg = f"pool is of type {type(pool).__name__}: give a xpuruntime MemoryPool on a CUDA device, or leave it out"
        raise InputError(msg)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        msg = f"limit {limit!r} is no number of bytes: give a positive integer, or None for no limit"
        raise InputError(msg)
    if pool is not None and limit is not None:
        msg = (
            f"pool {pool.name!r} and limit={limit} do not go together: set the limit of the pool, pool.limit = {limit}"
        )
        raise InputError(msg)
    if pool is not None and (not pool.device.startswith("cuda") or pool.kind == "pinned"):
        msg = (
            f"pool {pool.name!r} ({pool.kind} on {pool.device}) gives host memory, and CUDA tensors need memory of "
            "their device: take MemoryPool('cuda:0'), or leave pool out"
        )
        raise InputError(msg, device=pool.device)
    if not enabled and (pool, device, limit) != (None, None, None):
        msg = "enabled=False goes back to PyTorch's own memory and takes no pool, device or limit: leave them out"
        raise InputError(msg)
    if scope == "process":
        if device is not None:
            msg = f"scope='process' concerns every CUDA device of the process: leave device={device!r} out"
            raise InputError(msg)
        if not route_backward:
            msg = "scope='process' concerns every thread, also those of backward passes: leave route_backward=False out"
            raise InputError(msg)
        if not enabled:
            msg = "scope='process' cannot be disabled: PyTorch has no way back to its own allocator in one process"
            raise InputError(msg)
    if device is not None:
        _index(device, pool)


def _index(device: object, pool: MemoryPool | None) -> int | None:
    """Return the index that was asked for; None leaves it open."""
    try:
        if isinstance(device, bool):
            raise RuntimeError
        named = torch.device("cuda", device) if isinstance(device, int) else torch.device(str(device))
    except (RuntimeError, ValueError) as error:
        msg = f"device {device!r} is not one: give 'cuda:0', its index, or a torch.device"
        raise InputError(msg) from error
    if named.type != "cuda":
        msg = f"device {str(named)!r} is no CUDA device, and set_allocator() is for their tensors: give 'cuda:0'"
        raise InputError(msg, device=str(named))
    if pool is not None and named.index is not None and f"cuda:{named.index}" != pool.device:
        msg = (
            f"pool {pool.name!r} has memory of {pool.device}, and device is {str(named)!r}: give one of them, or both "
            "alike"
        )
        raise InputError(msg, device=str(named))
    return None if named.index is None else int(named.index)


def _pool(pool: MemoryPool | None, device: object, limit: int | None) -> MemoryPool:
    if pool is not None:
        return pool
    index = None if device is None else _index(device, None)
    if index is None:
        index = torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        msg = (
            f"device 'cuda:{index}' was not found: PyTorch sees {torch.cuda.device_count()} CUDA device(s), from cuda:0"
        )
        raise InputError(msg, device=f"cuda:{index}")
    name = f"cuda:{index}"
    if limit is None:
        return MemoryManager.instance().default_pool(name)
    return MemoryPool(name, limit=limit, name=f"torch@{name}")


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


def process_allocator() -> ProcessAllocator | None:
    """Return the one of this process, or None."""
    return _current


def start_process_allocator(pool: MemoryPool | None, limit: int | None) -> ProcessAllocator:
    """Replace PyTorch's allocator."""
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


@dataclass(frozen=True)
class PoolUse:
    """What PyTorch holds of one pool. Sizes are bytes."""

    pool: str
    kind: str
    device: str
    limit: int | None
    scopes: int
    current: int
    peak: int
    in_graphs: int
    allocations: int
    total_allocations: int
    failures: int
    last_failure: str | None
    pool_current: int
    pool_reserved: int

    @classmethod
    def of(cls, pool: MemoryPool, stats: TorchAllocatorStats, scopes: int, last_failure: str | None) -> PoolUse:
        """Return the numbers of one pool now."""
        whole_pool = pool.stats()
        return cls(
            pool=pool.name,
            kind=pool.kind,
            device=pool.device,
            limit=pool.limit,
            scopes=scopes,
            current=stats.current,
            peak=stats.peak,
            in_graphs=stats.in_graphs,
            allocations=stats.allocations,
            total_allocations=stats.total_allocations,
            failures=stats.failures,
            last_failure=last_failure,
            pool_current=whole_pool.current,
            pool_reserved=whole_pool.reserved,
        )


@dataclass(frozen=True)
class AllocatorStats:
    """What PyTorch holds of xpuruntime pools."""

    scope: str
    uses: tuple[PoolUse, ...]

    @property
    def current(self) -> int:
        """Bytes over all pools."""
        return sum(use.current for use in self.uses)

    @property
    def allocations(self) -> int:
        """Live allocations over all pools."""
        return sum(use.allocations for use in self.uses)

    @property
    def failures(self) -> int:
        """Refused allocations over all pools."""
        return sum(use.failures for use in self.uses)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {"scope": self.scope, "uses": [asdict(use) for use in self.uses]}
