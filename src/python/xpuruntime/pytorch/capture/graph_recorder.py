# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CudaRecorder`: records work into CUDA graphs that share one pool and one stream, and cleans up after a failure.

PyTorch keeps workspaces of cuBLAS and cuBLASLt for each stream and thread that calls them, and a graph captured there
goes on using them.
Whatever frees all of them, as each capture of ``torch.compile(mode="reduce-overhead")`` does, lets tensors have that
memory, or gives it back to the device, while graphs still write to it. So streams here are used for captures alone and
never destroyed, and their workspaces lie in a pool of PyTorch that is never destroyed either: freed or not, nothing but
another workspace comes to lie there. That holds at the end of the process, too: where a tensor is freed, PyTorch
records an event on each stream that has worked with it, and a process group frees its own after Python's modules went.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from xpuruntime import _core
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.allocator.scope import capture_ended
from xpuruntime.pytorch.allocator.torch_pools import allocating_from, keep_forever
from xpuruntime.pytorch.dispatch.context import CONTEXT, thread_policy

#: Graphs whose capture failed are never freed: PyTorch's allocator of pinned memory may still ask them.
_SPOILED: list[Any] = []


class Replayable(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Put the work on the current stream."""

    def reset(self) -> None:
        """Give its memory back."""


@dataclass(frozen=True)
class CapturedGraph:
    """What was captured: the graph, what its function returned, and how far the pool grew, in bytes."""

    graph: Replayable
    outputs: Any
    bytes: int


class GraphRecorder(Protocol):
    """Captures work on one device."""

    device: torch.device

    def warming(self) -> contextlib.AbstractContextManager[None]:
        """Let the work of the block run where captures are made, ordered after and before the caller's."""

    def record(self, run: Callable[[], Any], generators: list[Any]) -> CapturedGraph:
        """Capture `run`, which is called once and whose work on the device does not run."""

    def released(self, count: int) -> None:
        """Say that so many graphs made here are gone."""

    def order(self) -> None:
        """Let the current stream wait for the last replay, when that was on another one."""


class CudaRecorder:
    """Captures on one stream of a CUDA device into one pool of memory.

    Graphs share memory, so no two of them may run at once: `order` sees to it.
    """

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self.device = device
        self.stream = take_stream(device.index)
        self._keeps_stream = weakref.finalize(self, release_stream, self.stream)
        self._given = _handle(pool)
        self._pool: Any = None
        self._live = 0
        self._graph: Any = None
        self._last: Any = None
        self._outer: contextlib.ExitStack | None = None
        #: Whether a failed capture has cut the generator of random numbers loose from the graphs captured before.
        self.cut_loose = False

    @property
    def pool(self) -> Any:
        """The handle of the pool, which other captures can be given."""
        if self._pool is None or (self._live == 0 and self._graph is None):
            # A pool that no graph holds any more cannot be used again.
            self._pool = self._given or torch.cuda.graph_pool_handle()
        return self._pool

    def released(self, count: int) -> None:
        """Say that so many graphs made here are gone."""
        self._live -= count

    def order(self) -> None:
        """Let the current stream wait for the last replay, when that was on another one."""
        stream, last = torch.cuda.current_stream(self.device), self._last
        # PyTorch calls a stream neither equal to None nor other than it.
        if last is not None and stream != last:
            stream.wait_stream(last)
        self._last = stream

    @contextlib.contextmanager
    def warming(self) -> Iterator[None]:
        """Let the work of the block run on the stream of captures, ordered after and before the caller's."""
        with torch.cuda.device(self.device):
            outer = torch.cuda.current_stream(self.device)
            # Graphs of a recorder that is gone may still run, and write to the workspaces of this stream.
            torch.cuda.synchronize(self.device)
            self.stream.wait_stream(outer)
            try:
                make_workspaces(self.stream)
                with torch.cuda.stream(self.stream):
                    yield
            finally:  # where the work failed, too: what it has changed is given back on the caller's stream
                outer.wait_stream(self.stream)

    def record(self, run: Callable[[], Any], generators: list[Any]) -> CapturedGraph:
        """Capture `run`, which is called once and whose work on the device does not run."""
        before = self.begin(generators)
        try:
            outputs = run()
        except BaseException:
            self.abandon()
            raise
        return CapturedGraph(*self.end(before, outputs))

    def begin(self, generators: list[Any]) -> int:
        """Begin a capture on this thread. Returns the memory that PyTorch holds before it."""
        self._outer = contextlib.ExitStack()
        try:
            self._outer.enter_context(torch.cuda.device(self.device))
            torch.cuda.synchronize(self.device)  # what was freed on this stream may be read on others until here
            make_workspaces(self.stream)
            torch.cuda.synchronize(self.device)
            gc.collect()
            torch.cuda.empty_cache()
            held = int(torch.cuda.memory_reserved(self.device))
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                if _is_on(generator.device, self.device):
                    graph.register_generator_state(generator)
            pool = self.pool
            # A graph or an event that the collector frees during a capture spoils it.
            self._outer.enter_context(_UNCOLLECTED)
            self._outer.enter_context(torch.cuda.stream(self.stream))
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        except BaseException:
            self._leave()
            raise
        self._graph = graph
        return held

    def end(self, memory_before: int, outputs: Any = None) -> tuple[Any, Any, int]:
        """End the capture. Returns graph, outputs and the growth of the pool in bytes; raises what CUDA says."""
        graph = self._graph
        try:
            graph.capture_end()
        except BaseException:
            self._mend(graph)
            raise
        self._live += 1
        self._graph = None
        self._leave()
        return graph, outputs, max(0, int(torch.cuda.memory_reserved(self.device)) - memory_before)

    def abandon(self) -> None:
        """End a capture that is not wanted any more, whatever state it is in. Raises nothing."""
        graph = self._graph
        if graph is None:
            return
        try:
            graph.capture_end()
        except Exception:  # CUDA repeats what spoiled the capture
            self._mend(graph)
        else:
            graph.reset()
            self._graph = None
            self._leave()

    def _mend(self, graph: Any) -> None:
        """Undo what PyTorch leaves behind when a capture cannot be ended."""
        _SPOILED.append(graph)
        self._keeps_stream.detach()
        self._graph = None
        index, pool = self.device.index, self._pool
        with contextlib.suppress(Exception):  # this PyTorch has done it
            _private_api.end_allocating_to_pool(index, pool)
            _private_api.release_pool(index, pool)
        self._leave()
        torch.cuda.synchronize(self.device)
        capture_ended(graph)
        generator = torch.cuda.default_generators[index]
        state = generator.get_state()
        try:
            torch.empty(1, device=self.device).uniform_()
            generator.set_state(state)
        except RuntimeError:  # it takes itself to be captured still
            generator.graphsafe_set_state(generator.clone_state())
            self.cut_loose = True

    def _leave(self) -> None:
        if self._outer is not None:
            self._outer.close()
            self._outer = None


def _is_on(device: torch.device, other: torch.device) -> bool:
    return device.type == other.type and device.index in (None, other.index)


class _Uncollected:
    """A block in which Python collects no garbage, in any thread, while somebody is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._was_on:
                gc.enable()


_UNCOLLECTED = _Uncollected()


def _handle(pool: Any) -> Any:
    if pool is None or isinstance(pool, tuple):
        return pool
    if isinstance(pool, torch.cuda.CUDAGraph):
        return pool.pool()
    return getattr(pool, "id", pool)


_lock = threading.Lock()
#: Without a lock: a recorder that the garbage collector frees gives back what it had wherever that comes to run.
_free: dict[int, collections.deque[Any]] = {}
_pools: dict[int, Any] = {}


def take_stream(index: int) -> Any:
    """Return a stream of a CUDA device that nobody else has; `release_stream` ends that."""
    with contextlib.suppress(KeyError, IndexError):
        return _free[index].pop()
    stream = _core.Stream(f"cuda:{index}")
    _core.keep_forever(stream)
    return torch.cuda.ExternalStream(stream.handle, device=index)


def release_stream(stream: Any) -> None:
    """Let others have a stream from `take_stream`."""
    _free.setdefault(stream.device.index, collections.deque()).append(stream)


def make_workspaces(stream: Any) -> None:
    """Have the workspaces of this thread, and of backward passes that it starts, on a stream from `take_stream`.

    To be called before any other work on the stream: workspaces that are there already stay where they are. With an
    allocator of PyTorch that has no pools, they lie where others do.
    """
    if torch.cuda.memory.get_allocator_backend() != "native":
        return
    index = stream.device.index
    with torch.cuda.stream(stream), torch.inference_mode(False), torch.enable_grad():
        # A thread's first work on the device gives it the context that cuBLAS asks for: here, and below.
        seed = torch.zeros(1, device=stream.device, requires_grad=True)
        _make(index)
        torch.autograd.grad(_InBackward.apply(seed), seed)


class _InBackward(torch.autograd.Function):  # type: ignore[misc]
    """Does nothing but run on the thread of backward passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        del ctx
        grad = grad.clone()
        _make(grad.device.index)
        return grad


def _make(index: int) -> None:
    with _lock:
        if index not in _pools:
            _pools[index] = torch.cuda.MemPool()
            keep_forever(_pools[index])
    with allocating_from(_pools[index], index), _no_call_of_the_program():
        torch.cuda.current_blas_handle()
        ones = torch.ones(16, 16, device=f"cuda:{index}")
        # Deterministic algorithms without CUBLAS_WORKSPACE_CONFIG refuse it, as they do the program's own products.
        with contextlib.suppress(RuntimeError):
            torch.addmm(ones[0], ones, ones)  # by cuBLASLt, whose workspace may be another one


@contextlib.contextmanager
def _no_call_of_the_program() -> Iterator[None]:
    thread = CONTEXT.thread
    before, thread.measuring = thread.measuring, True
    try:
        with thread_policy(None), torch.no_grad(), torch.autocast("cuda", enabled=False):
            yield
    finally:
        thread.measuring = before
