# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CudaRecorder`: records work into CUDA graphs that share one pool and one stream, and cleans up after a failure."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.allocator.scope import capture_ended
from xpuruntime.pytorch.capture import streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CapturedGraph", "CudaRecorder", "GraphRecorder", "Replayable"]

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
        self.stream = streams.take(device.index)
        self._keeps_stream = weakref.finalize(self, streams.release, self.stream)
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
                streams.make_workspaces(self.stream)
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
            streams.make_workspaces(self.stream)
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
    """Say whether one device, which may be without its index, is another."""
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
