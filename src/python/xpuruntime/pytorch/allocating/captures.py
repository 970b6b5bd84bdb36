# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""CUDA graphs that are captured while a scope of ours is open: their memory comes from the scope's pool, but is theirs.

PyTorch gives a thread's allocations to the pool that was begun first. A capture inside of ``use_mem_pool`` would
therefore put what the graph works on among ordinary tensors, where it is used again while the graph still needs it.
So while a scope is open, the beginning of a capture pauses it and gives the graph a pool of its own on the same
memory, unless the caller named one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch.allocating.pools import lender_of, retire

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.pytorch.allocating.pools import Lender
    from xpuruntime.pytorch.allocating.scope import AllocatorScope

__all__ = ["GraphPool", "graph_pool", "install", "uninstall"]

_lock = threading.Lock()
_installed = False
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

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self._entry = [lender.make_pool()]
        self.id: tuple[int, int] = tuple(self._entry[0].id)

    def __del__(self) -> None:
        if self._entry:
            retire(self._entry.pop(), self._lender, captured=True)


def graph_pool(index: int) -> GraphPool | None:
    """Return a new pool for graphs on the memory that this thread's tensors have, or None where that is PyTorch's own.

    Parameters
    ----------
    index : int
        Of the CUDA device.
    """
    scope = None if _find_scope is None else _find_scope(index)
    return None if scope is None or scope.pool is None else GraphPool(lender_of(scope.pool))


class _Paused(threading.local):
    """What this thread's captures paused: the graph and the scope."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, AllocatorScope]] = []


_paused = _Paused()


def install(find_scope: Callable[[int], AllocatorScope | None]) -> None:
    """See the beginning and end of captures. Idempotent.

    Parameters
    ----------
    find_scope : callable
        Returns the scope from which this thread's tensors on a CUDA device come, given its index.
    """
    global _installed, _original_begin, _original_end, _find_scope
    kind: Any = torch.cuda.CUDAGraph
    with _lock:
        if not _installed:
            _find_scope = find_scope
            _original_begin, _original_end = kind.capture_begin, kind.capture_end
            kind.capture_begin, kind.capture_end = _begin, _end
            _installed = True


def uninstall() -> None:
    """Leave captures alone again. Idempotent; does nothing where somebody else has since put theirs over ours."""
    global _installed
    kind: Any = torch.cuda.CUDAGraph
    with _lock:
        if _installed and (kind.capture_begin, kind.capture_end) == (_begin, _end):
            kind.capture_begin, kind.capture_end = _original_begin, _original_end
            _installed = False


def _begin(graph: Any, pool: Any = None, *args: Any, **options: Any) -> None:
    scope = None if _find_scope is None else _find_scope(torch.cuda.current_device())
    if scope is None or scope.pool is None:
        _original_begin(graph, pool, *args, **options)
        return
    own = None
    if pool is None:
        own = GraphPool(lender_of(scope.pool))
        pool = own.id
    scope.pause()
    try:
        _original_begin(graph, pool, *args, **options)
    except BaseException:
        scope.resume()
        raise
    _paused.entries.append((graph, scope))


def _end(graph: Any) -> None:
    try:
        _original_end(graph)
    finally:
        for entry in [one for one in _paused.entries if one[0] is graph]:
            _paused.entries.remove(entry)
            if not entry[1].closed:
                entry[1].resume()
