# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`PoolBridge`: one pool of xpuruntime as PyTorch sees it, and the memory pools of PyTorch that are made on it."""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import torch

from xpuruntime._core import MemoryPool, TorchAllocator
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.pytorch import _private_api

#: PyTorch's allocator objects by slot. Kept for ever: its pools refer to them without holding them.
_PLUGGABLE: dict[int, Any] = {}
_lock = threading.RLock()
_bridges: list[PoolBridge] = []
#: Pools of PyTorch that something else still uses: a graph, or a capture that goes on.
_retired: list[tuple[Any, PoolBridge, bool]] = []
#: Devices to how many threads allocate from one pool alone there, by a scope or for a capture.
_busy: collections.Counter[int] = collections.Counter()
#: Whether the interpreter ends: a global as those above, which `atexit` sets and finalizers read.
_ending = False


def pluggable(allocator: TorchAllocator) -> Any:
    """Return PyTorch's object for the functions of an allocator."""
    make = _private_api.custom_allocator
    if make is None:
        msg = (
            f"torch {torch.__version__} takes no allocation functions: it was built without CUDA, or its interface "
            "for them has changed. Install a CUDA build of PyTorch 2.11 or a later release that this version knows"
        )
        raise UnsupportedOperationError(msg)
    with _lock:
        known = _PLUGGABLE.get(allocator.slot)
        if known is None:
            known = _PLUGGABLE[allocator.slot] = make(allocator.alloc_address, allocator.free_address)
        return known


class PoolBridge:
    """Gives memory of an xpuruntime pool to pools of PyTorch. Several scopes over the same pool share one."""

    def __init__(self, pool: MemoryPool) -> None:
        self.pool = pool
        self.allocator = TorchAllocator([pool])
        self.device = int(pool.device.rpartition(":")[2])
        self.users = 0
        self.last_failure: str | None = None
        self.pool_ids: set[tuple[int, int]] = set()

    def make_pool(self) -> Any:
        """Return a new ``torch.cuda.MemPool`` that gets its memory here."""
        with torch.cuda.device(self.device):
            pool = torch.cuda.MemPool(pluggable(self.allocator))
        self.pool_ids.add(tuple(pool.id))
        return pool

    def take_failure(self) -> str | None:
        """Return why the last allocation since the last call was refused, and keep it in `last_failure`."""
        reason = None if self.allocator.closed else self.allocator.take_failure()
        if reason is not None:
            self.last_failure = reason
        return reason

    def idle(self) -> bool:
        """Say whether nobody uses it and PyTorch holds none of its memory."""
        if self.users:
            return False
        stats = self.allocator.stats()
        return stats.allocations == 0 and stats.in_graphs == 0


def bridge_of(pool: MemoryPool) -> PoolBridge:
    """Return the bridge of a pool, with one user more."""
    bridge = PoolBridge(pool)
    with _lock:
        for known in _bridges:
            if known.allocator.slot == bridge.allocator.slot:
                bridge.allocator.close()
                bridge = known
                break
        else:
            _bridges.append(bridge)
        bridge.users += 1
        return bridge


def all_bridges() -> list[PoolBridge]:
    """Return those in use, and those whose memory PyTorch still holds."""
    sweep()
    with _lock:
        return list(_bridges)


def release(bridge: PoolBridge) -> None:
    """Take one user off."""
    with _lock:
        bridge.users -= 1


def retire(pool: Any, bridge: PoolBridge, *, captured: bool) -> None:
    """Take over a pool of PyTorch, and one user of its bridge, and let go of both when nothing uses the pool."""
    if _ending:
        keep_forever(pool)
        return
    with _lock:
        _retired.append((pool, bridge, captured))
    del pool
    sweep()


@contextlib.contextmanager
def busy(index: int, change: int) -> Iterator[None]:
    """Count threads that allocate from one pool alone on a device: 1 around the beginning of it, -1 around its end.

    PyTorch ends the process when one of its pools goes meanwhile, whichever thread lets go of it: `sweep` leaves all of
    that device for later.
    """
    with _lock:
        yield
        _busy[index] += change


@contextlib.contextmanager
def allocating_from(pool: Any, index: int) -> Iterator[None]:
    """Let this thread's tensors on a device come from a pool of PyTorch, in the block."""
    routing = torch.cuda.use_mem_pool(pool, index)
    with busy(index, 1):
        routing.__enter__()
    try:
        yield
    finally:
        with busy(index, -1):
            routing.__exit__(None, None, None)


def sweep() -> None:
    """Let go of pools of PyTorch that nothing uses any more, and of lenders without users and tensors."""
    with _lock:
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            unused = [entry for entry in _retired if entry[0].use_count() == 1 and not _busy[entry[1].device]]
            _retired[:] = [entry for entry in _retired if entry not in unused]
            while unused:
                pool, bridge, captured = unused.pop()
                if captured:
                    _wait_for(bridge.device)
                del pool
                release(bridge)
        for bridge in [bridge for bridge in _bridges if bridge.idle()]:
            _bridges.remove(bridge)
            bridge.allocator.close()


def _wait_for(index: int) -> None:
    # The last replay of a graph that is gone may still run, on whatever stream. Giving memory back to the device waits
    # for all of its work and, other than torch.cuda.synchronize(), does not break a capture on another thread.
    MemoryPool(f"cuda:{index}", "direct", name="wait for graphs").allocate(1)


def keep_forever(pool: Any) -> None:
    """Have a pool of PyTorch never destroyed: PyTorch ends the process when one goes that a graph still uses."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


@atexit.register
def _leave_to_the_process() -> None:
    global _ending
    with contextlib.suppress(Exception):
        sweep()
    _ending = True
    for pool, _, _ in _retired:
        keep_forever(pool)
