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


class GraphPool:
    """A pool of PyTorch for the memory of CUDA graphs, on the memory of a scope.

    Keep it for as long as graphs are captured into it; those captured may outlive it.
    """

    def __init__(self, bridge: PoolBridge) -> None:
        self._bridge = bridge
        self._entry = [bridge.make_pool()]
        self.id: tuple[int, int] = tuple(self._entry[0].id)

    def __del__(self) -> None:
        if self._entry:
            retire(self._entry.pop(), self._bridge, captured=True)


class _Watch:
    """What is seen of captures, and how. There is one, since they are methods of a class of PyTorch's."""

    def __init__(self) -> None:
        self.wanted = False
        self.installed = False
        self.begin: Any = None
        self.end: Any = None
        self.find_scope: Callable[[int], AllocatorScope | None] = lambda _index: None
        self.underway: list[tuple[Any, int, AllocatorScope | None]] = []


_watch = _Watch()


def install(find_scope: Callable[[int], AllocatorScope | None]) -> None:
    """See the beginning and end of captures. Idempotent."""
    kind: Any = torch.cuda.CUDAGraph
    with _lock:
        _watch.wanted = True
        if not _watch.installed:
            _watch.find_scope = find_scope
            _watch.begin, _watch.end = kind.capture_begin, kind.capture_end
            kind.capture_begin, kind.capture_end = _begin, _end
            _watch.installed = True


def uninstall() -> None:
    """Leave captures alone again, once those that go on have ended.

    Idempotent; does nothing where another library has since replaced the same methods.
    """
    kind: Any = torch.cuda.CUDAGraph
    with _lock:
        _watch.wanted = False
        if _watch.installed and not _watch.underway and (kind.capture_begin, kind.capture_end) == (_begin, _end):
            kind.capture_begin, kind.capture_end = _watch.begin, _watch.end
            _watch.installed = False


def _begin(graph: Any, pool: Any = None, *args: Any, **options: Any) -> None:
    index = torch.cuda.current_device()
    scope = _watch.find_scope(index)
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
            _watch.begin(graph, pool, *args, **options)
    except BaseException:
        if scope is not None:
            scope.resume()
        raise
    with _lock:
        _watch.underway.append((graph, index, scope))


def _end(graph: Any) -> None:
    try:
        _watch.end(graph)  # where it fails, PyTorch may still allocate from the graph's pool
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
            _watch.underway.remove(entry)
        _resume(scope)
    if not _watch.wanted:
        uninstall()
    sweep()


def _of(graph: Any) -> list[tuple[Any, int, AllocatorScope | None]]:
    with _lock:
        return [one for one in _watch.underway if one[0] is graph]


def _resume(scope: AllocatorScope | None) -> None:
    if scope is not None and not scope.closed and not scope.routed:
        scope.resume()
