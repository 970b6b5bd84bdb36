# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`AllocatorScope`: one thread's CUDA tensors in memory of one pool of xpuruntime, for a while."""

from __future__ import annotations

import atexit
import contextlib
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.pytorch.allocator.torch_pools import (
    allocating_from,
    bridge_of,
    busy,
    keep_forever,
    release,
    retire,
    sweep,
)

if TYPE_CHECKING:
    from xpuruntime._core import MemoryPool
    from xpuruntime.pytorch.allocator.torch_pools import PoolBridge

_lock = threading.Lock()
_open: list[AllocatorScope] = []


class _Stack:
    """The scopes of one thread, the innermost last. When the thread ends, they are closed."""

    def __init__(self) -> None:
        self.scopes: list[AllocatorScope] = []

    def __del__(self) -> None:
        while self.scopes:
            self.scopes.pop()._let_go(same_thread=False)


class _Local(threading.local):
    def __init__(self) -> None:
        self.stack = _Stack()


_local = _Local()


class AllocatorScope:
    """CUDA tensors of one thread in memory of a pool. `set_allocator` makes and opens it.

    Parameters
    ----------
    pool : MemoryPool or None
        None makes a scope that is closed already.
    route_backward : bool
        Run backward passes on this thread, so that their memory comes from the pool too.

    Attributes
    ----------
    pool : MemoryPool or None
    device : str or None
        The CUDA device whose tensors are concerned.
    closed : bool
    last_failure : str or None
        Why the pool last refused PyTorch an allocation.
    """

    def __init__(self, pool: MemoryPool | None, *, route_backward: bool = True) -> None:
        self.pool = pool
        self.device = None if pool is None else pool.device
        self.route_backward = route_backward
        self.closed = True
        self._thread = threading.get_ident()
        self._bridge: PoolBridge | None = None
        self._torch_pool: Any = None
        self._routing: contextlib.AbstractContextManager[None] | None = None
        self._outer: AllocatorScope | None = None
        self._threading: Any = None
        self._gone = False
        if pool is not None:
            self._open(pool)

    @property
    def last_failure(self) -> str | None:
        """Why the pool last refused PyTorch an allocation, or None."""
        if self._bridge is None:
            return None
        self._bridge.take_failure()
        return self._bridge.last_failure

    @property
    def index(self) -> int:
        """Index of the CUDA device."""
        return -1 if self._bridge is None else self._bridge.device

    @property
    def routed(self) -> bool:
        """Whether its thread's tensors come from the pool now."""
        return self._routing is not None

    def lends(self, bridge: PoolBridge) -> bool:
        """Say whether its memory comes from this bridge."""
        return self._bridge is bridge

    # --- opening and closing -------------------------------------------------------------------------------------

    def _open(self, pool: MemoryPool) -> None:
        torch.cuda.init()
        if torch.cuda.is_current_stream_capturing():
            msg = (
                "the allocator cannot change while a CUDA graph is captured, because the graph's memory comes from "
                "where its capture began: call set_allocator() before the capture"
            )
            raise UnsupportedOperationError(msg, device=pool.device)
        sweep()
        self._bridge = bridge_of(pool)
        try:
            self._torch_pool = self._bridge.make_pool()
            self._outer = innermost(self.index)
            if self._outer is not None:
                # PyTorch takes the pool that a thread began with first.
                self._outer.pause()
            self.resume()
            self.closed = False
            _local.stack.scopes.append(self)
            with _lock:
                _open.append(self)
            watch_captures()
            if self.route_backward:
                self._threading = torch.autograd.set_multithreading_enabled(False)
            self._check_that_it_is_used()
        except BaseException:
            if self._torch_pool is not None:
                keep_forever(self._torch_pool)  # this thread may be inside of another library's pool
            self._let_go()
            raise

    def _check_that_it_is_used(self) -> None:
        assert self._bridge is not None
        before = self._bridge.allocator.stats()
        try:
            torch.empty(1, device=f"cuda:{self.index}")
        except torch.OutOfMemoryError as error:
            # Refused by the pool, it is used; the next tensor will say so too.
            if self._bridge.allocator.stats().failures == before.failures:
                raise self._unused(str(error)) from error
        except RuntimeError as error:
            raise self._unused(str(error)) from error
        else:
            if self._bridge.allocator.stats().total_allocations == before.total_allocations:
                raise self._unused("a first tensor got its memory elsewhere")

    def _unused(self, seen: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"PyTorch does not take the memory of {self.device} from pool {self.pool.name!r}: {seen}. That is so with "  # type: ignore[union-attr]
            "PYTORCH_ALLOC_CONF=backend:cudaMallocAsync or expandable_segments:True, with "
            "PYTORCH_NO_CUDA_MEMORY_CACHING, and inside of torch.cuda.use_mem_pool(); this process has allocator "
            f"backend {torch.cuda.memory.get_allocator_backend()!r}. Start it without these, or leave the inner scope",
            device=self.device,
        )

    def pause(self) -> None:
        """Let this thread's tensors come from PyTorch's own pool, until `resume`."""
        routing, self._routing = self._routing, None
        if routing is not None:
            routing.__exit__(None, None, None)

    def resume(self) -> None:
        """Let this thread's tensors come from the pool again."""
        routing = allocating_from(self._torch_pool, self.index)
        routing.__enter__()
        self._routing = routing

    def empty_cache(self) -> int:
        """Give what PyTorch keeps for its next tensors back to the pool. Return the bytes.

        ``torch.cuda.empty_cache()`` leaves this memory alone while the scope is open. What live tensors lie in is given
        back by it after they are gone. To give memory back to the device, call ``pool.empty_cache()`` afterwards. While
        other threads have scopes open on the device, PyTorch gives nothing back until they are closed.

        Raises
        ------
        UnsupportedOperationError
            The scope is closed or another thread's, or a CUDA graph is being captured.
        """
        self._check_usable()
        assert self._bridge is not None
        if torch.cuda.is_current_stream_capturing():
            msg = f"{self!r} cannot give memory back while a CUDA graph is captured: call empty_cache() before or after"
            raise UnsupportedOperationError(msg, device=self.device)
        before = self._bridge.allocator.stats().current
        routed = self.routed
        self.pause()
        # PyTorch gives the memory of a pool back when the pool goes.
        self._torch_pool, entry = self._bridge.make_pool(), [self._torch_pool]
        retire(entry.pop(), bridge_of(self._bridge.pool), captured=False)
        if routed:
            self.resume()
        return before - self._bridge.allocator.stats().current

    def close(self) -> None:
        """Let new tensors come from where they came from before. Idempotent.

        Scopes that were opened inside of this one are closed with it. Tensors stay valid; memory that PyTorch does not
        use any more goes back to the pool now, and that of live tensors when ``torch.cuda.empty_cache()`` is called
        after they are gone.

        Raises
        ------
        UnsupportedOperationError
            Another thread opened it.
        """
        if self.closed:
            return
        if threading.get_ident() != self._thread:
            msg = (
                f"{self!r} was opened by another thread, and PyTorch's allocations are routed by thread: close it there"
            )
            raise UnsupportedOperationError(msg, device=self.device)
        while not self.closed:
            _local.stack.scopes[-1]._let_go()

    def _let_go(self, *, same_thread: bool = True) -> None:
        """Undo whatever of opening was done, once."""
        if self._gone:
            return
        self._gone = True
        if same_thread and self in _local.stack.scopes:
            _local.stack.scopes.remove(self)
        with _lock:
            if self in _open:
                _open.remove(self)
            last = not _open
        if last:
            leave_captures()
        self.closed = True
        if self._threading is not None and same_thread:
            self._threading.__exit__(None, None, None)
        self._threading = None
        self.pause()
        try:
            self._drop_pool()
        finally:  # PyTorch ends the process where a pool goes while another is routed to
            outer, self._outer = self._outer, None
            if outer is not None and same_thread:
                outer.resume()

    def _drop_pool(self) -> None:
        bridge = self._bridge
        if bridge is None:
            return
        bridge.take_failure()
        if self._torch_pool is None:
            release(bridge)
            return
        entry = [self._torch_pool]
        self._torch_pool = None
        retire(entry.pop(), bridge, captured=False)

    # --- a context manager ---------------------------------------------------------------------------------------

    def __enter__(self) -> AllocatorScope:
        if self.pool is not None:
            self._check_usable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError) and self._bridge is not None:
            reason = self._bridge.take_failure()
            if reason is not None:
                error.args = (f"{error}\nThe memory comes from an xpuruntime pool: {reason}",)
        self.close()

    def _check_usable(self) -> None:
        if self.closed or threading.get_ident() != self._thread:
            what = "is closed" if self.closed else "belongs to another thread"
            msg = f"{self!r} {what}: call set_allocator() where it is used, for each use"
            raise UnsupportedOperationError(msg, device=self.device)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        name = None if self.pool is None else self.pool.name
        return f"AllocatorScope(pool={name!r}, device={self.device!r}, {state})"


def innermost(index: int) -> AllocatorScope | None:
    """Return the scope from which this thread's tensors on a CUDA device come, or None."""
    for scope in reversed(_local.stack.scopes):
        if scope.index == index:
            return scope
    return None


def open_scopes() -> list[AllocatorScope]:
    """Return those of all threads."""
    with _lock:
        return list(_open)


def close_scopes_of_this_thread() -> None:
    """Close all of them, the innermost first."""
    while _local.stack.scopes:
        _local.stack.scopes[-1].close()


@atexit.register
def _close_everything() -> None:
    # PyTorch ends the process when a pool that is still routed to is destroyed.
    for scope in reversed(open_scopes()):
        with contextlib.suppress(Exception):
            scope._let_go(same_thread=scope._thread == threading.get_ident())


_watch_lock = threading.Lock()


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
        self.underway: list[tuple[Any, int, AllocatorScope | None]] = []


_watch = _Watch()


def watch_captures() -> None:
    """See the beginning and end of captures, and give each graph a pool of its own on the scope's memory. Idempotent.

    PyTorch gives a thread's allocations to the pool that was begun first. A capture inside of ``use_mem_pool`` would
    therefore put what the graph works on among ordinary tensors, where it is used again while the graph still needs
    it. So the beginning of a capture pauses the scope, unless the caller named a pool.
    """
    kind: Any = torch.cuda.CUDAGraph
    with _watch_lock:
        _watch.wanted = True
        if not _watch.installed:
            _watch.begin, _watch.end = kind.capture_begin, kind.capture_end
            kind.capture_begin, kind.capture_end = _begin, _end
            _watch.installed = True


def leave_captures() -> None:
    """Leave captures alone again, once those that go on have ended.

    Idempotent; does nothing where another library has since replaced the same methods.
    """
    kind: Any = torch.cuda.CUDAGraph
    with _watch_lock:
        _watch.wanted = False
        if _watch.installed and not _watch.underway and (kind.capture_begin, kind.capture_end) == (_begin, _end):
            kind.capture_begin, kind.capture_end = _watch.begin, _watch.end
            _watch.installed = False


def _begin(graph: Any, pool: Any = None, *args: Any, **options: Any) -> None:
    index = torch.cuda.current_device()
    scope = innermost(index)
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
    with _watch_lock:
        _watch.underway.append((graph, index, scope))


def _end(graph: Any) -> None:
    try:
        _watch.end(graph)  # where it fails, PyTorch may still allocate from the graph's pool
    except BaseException:
        for _, _, scope in _of(graph):
            _resume(scope)
        raise
    capture_ended(graph)


def capture_ended(graph: Any) -> None:
    """Know that a capture has ended: by itself, or by hand after a failure. Idempotent."""
    for entry in _of(graph):
        _, index, scope = entry
        with busy(index, -1), _watch_lock:
            _watch.underway.remove(entry)
        _resume(scope)
    if not _watch.wanted:
        leave_captures()
    sweep()


def _of(graph: Any) -> list[tuple[Any, int, AllocatorScope | None]]:
    with _watch_lock:
        return [entry for entry in _watch.underway if entry[0] is graph]


def _resume(scope: AllocatorScope | None) -> None:
    if scope is not None and not scope.closed and not scope.routed:
        scope.resume()
