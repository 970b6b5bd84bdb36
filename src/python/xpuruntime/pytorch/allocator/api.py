# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`set_allocator`, `reset_allocator`, `allocator_stats`: CUDA tensors of PyTorch in memory of xpuruntime's pools.

::

    with set_allocator(limit=8 << 30):            # this thread, this device, this block
        train()

    set_allocator(scope="process")                # all threads and devices, until the process ends

The first way puts PyTorch's own caching allocator on top of an xpuruntime pool, so its statistics, snapshots and graphs
work, and it can be left again. The second replaces that allocator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from xpuruntime._core import MemoryManager, MemoryPool
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch.allocator import process
from xpuruntime.pytorch.allocator.scope import AllocatorScope, close_scopes_of_this_thread, open_scopes
from xpuruntime.pytorch.allocator.stats import AllocatorStats, PoolUse
from xpuruntime.pytorch.allocator.torch_pools import all_bridges

if TYPE_CHECKING:
    from xpuruntime.pytorch.allocator.process import ProcessAllocator

__all__ = ["AllocatorScope", "allocator_stats", "reset_allocator", "set_allocator"]

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
        return process.start(pool, limit)
    if process.current() is not None:
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
    active = process.current()
    if active is not None:
        raise active.no_way_back()
    close_scopes_of_this_thread()


def allocator_stats() -> AllocatorStats:
    """Return what PyTorch holds of xpuruntime pools, through every scope of every thread.

    Works without a GPU, and then says that there is nothing. Pools whose scopes are closed are listed for as long as
    tensors or graphs use their memory.
    """
    active = process.current()
    if active is not None:
        return AllocatorStats("process", active.uses())
    scopes = open_scopes()
    uses = []
    for bridge in all_bridges():
        bridge.take_failure()
        count = sum(one.lends(bridge) for one in scopes)
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
        asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(str(device))
    except (RuntimeError, ValueError) as error:
        msg = f"device {device!r} is not one: give 'cuda:0', its index, or a torch.device"
        raise InputError(msg) from error
    if asked.type != "cuda":
        msg = f"device {str(asked)!r} is no CUDA device, and set_allocator() is for their tensors: give 'cuda:0'"
        raise InputError(msg, device=str(asked))
    if pool is not None and asked.index is not None and f"cuda:{asked.index}" != pool.device:
        msg = (
            f"pool {pool.name!r} has memory of {pool.device}, and device is {str(asked)!r}: give one of them, or both "
            "alike"
        )
        raise InputError(msg, device=str(asked))
    return None if asked.index is None else int(asked.index)


def _pool(pool: MemoryPool | None, device: object, limit: int | None) -> MemoryPool:
    if pool is not None:
        return pool
    index = None if device is None else _index(device, None)
    if index is None:
        index = torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        msg = (
            f"device 'cuda:{index}' is not there: PyTorch sees {torch.cuda.device_count()} CUDA device(s), from cuda:0"
        )
        raise InputError(msg, device=f"cuda:{index}")
    name = f"cuda:{index}"
    if limit is None:
        return MemoryManager.instance().default_pool(name)
    return MemoryPool(name, limit=limit, name=f"torch@{name}")
