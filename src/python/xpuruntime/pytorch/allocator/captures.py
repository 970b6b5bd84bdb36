# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""CUDA graphs captured inside of an allocator scope: their memory comes from the scope's pool, and belongs to them.

PyTorch gives a thread's allocations to the pool that was begun first. A capture inside of ``use_mem_pool`` would
therefore put what the graph works on among ordinary tensors, where it is used again while the graph still needs it.
So while a scope is open, the beginning of a capture pauses it and gives the graph a pool of its own on the same
memory, unless the caller named one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch.allocator.torch_pools import bridge_of, busy, retire, sweep

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.pytorch.allocator.scope import AllocatorScope
    from xpuruntime.pytorch.allocator.torch_pools import PoolBridge

__all__ = ["GraphPool", "ended", "install", "uninstall"]

_lock = threading.Lock()
_installed = False
_wanted = False
_original_begin: Any = None
_original_end: Any = None
_find_scope: Callable[[int], AllocatorScope | None] | None = None


class GraphPool:
    """A pool of PyTorch for the memory of CUDA graphs, on the memory of a scope.

    Keep it for as long as graphs are captured into it; those captured may outlive it.

    Attributes
    ----------
    id : tuple of int
        What ``torch.cuda.graph(pool=)`` takes.
    """

    def __init__(self, bridge: PoolBridge) -> None:
        self._bridge = bridge
        self._entry = [bridge.make_pool()]
        self.id: tuple[int, int] = tuple(self._entry[0].id)

    def __del__(self) -> None:
        if self._entry:
            retire(self._entry.pop(), self._bridge, captured=True)


#: Captures that go on: the graph, its device, and the scope of its thread that is paused for it.
_underway: list[tuple[Any, int, AllocatorScope | None]] = []


def install(find_scope: Callable[[int], AllocatorScope | None]) -> None:
    """See the beginning and end of captures. Idempotent.

    Parameters
    ----------
    find_scope : callable
        Returns the scope from which this thread's tensors on a CUDA device come, given its index.
    """
    global _installed, _wanted, _original_begin, _original_end, _find_scope
    kind: Any = torch.cuda.CUDAGraph
    with _lock:
        _wanted = True
        if not _installed:
            _find_scope = find_scope
            _original_begin, _original_end = kind.capture_begin, kind.capture_end
            kind.capture_begin, kind.capture_end = _begin, _end
            _installed = True


def uninstall() -> None:
    """Leave captures alone again, once those that go on have ended.

    Idempotent; does nothing where another library has since replaced the same methods.
    """
    global _installed, _wanted
    kind: Any = torch.cuda.CUDAGraph
    with _lock:
        _wanted = False
        if _installed and not _underway and (kind.capture_begin, kind.capture_end) == (_begin, _end):
            kind.capture_begin, kind.capture_end = _original_begin, _original_end
            _installed = False


def _begin(graph: Any, pool: Any = None, *args: Any, **options: Any) -> None:
    index = torch.cuda.current_device()
    scope = None if _find_scope is None else _find_scope(index)
    own = None
    if scope is not None and scope.pool is not None:
        if pool is None:
            own = GraphPool(bridge_of(scope.pool))
            pool = own.id
        scope.pause()
    else:
        scope = None
    try:
        with busy(index, 1):
            _original_begin(graph, pool, *args, **options)
    except BaseException:
        if scope is not None:
            scope.resume()
        raise
    with _lock:
        _underway.append((graph, index, scope))


def _end(graph: Any) -> None:
    try:
        _original_end(graph)  # where it fails, PyTorch may still allocate from the graph's pool
    except BaseException:
        for _, _, scope in _of(graph):
            _resume(scope)
        raise
    ended(graph)


def ended(graph: Any) -> None:
    """Know that a capture has ended: by itself, or by hand after a failure. Idempotent."""
    for entry in _of(graph):
        _, index, scope = entry
        with busy(index, -1), _lock:
            _underway.remove(entry)
        _resume(scope)
    if not _wanted:
        uninstall()
    sweep()


def _of(graph: Any) -> list[tuple[Any, int, AllocatorScope | None]]:
    with _lock:
        return [one for one in _underway if one[0] is graph]


def _resume(scope: AllocatorScope | None) -> None:
    if scope is not None and not scope.closed and not scope.routed:
        scope.resume()
