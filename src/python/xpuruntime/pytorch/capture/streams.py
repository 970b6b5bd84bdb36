# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Capture streams, with workspaces of cuBLAS whose memory stays.

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
import threading
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.pytorch.allocator.torch_pools import allocating_from, keep_forever
from xpuruntime.pytorch.dispatch.context import CONTEXT, thread_policy

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["make_workspaces", "release", "take"]

_lock = threading.Lock()
#: Without a lock: a recorder that the garbage collector frees gives back what it had wherever that comes to run.
_free: dict[int, collections.deque[Any]] = {}
_pools: dict[int, Any] = {}


def take(index: int) -> Any:
    """Return a stream of a CUDA device that nobody else has; `release` ends that."""
    with contextlib.suppress(KeyError, IndexError):
        return _free[index].pop()
    stream = _core.Stream(f"cuda:{index}")
    _core.keep_forever(stream)
    return torch.cuda.ExternalStream(stream.handle, device=index)


def release(stream: Any) -> None:
    """Let others have a stream from `take`."""
    _free.setdefault(stream.device.index, collections.deque()).append(stream)


def make_workspaces(stream: Any) -> None:
    """Have the workspaces that work of this thread, and backward passes that it starts, use on a stream from `take`.

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
    """Keep policies, recorders and autocast away from what this thread calls in the block."""
    thread = CONTEXT.thread
    before, thread.measuring = thread.measuring, True
    try:
        with thread_policy(None), torch.no_grad(), torch.autocast("cuda", enabled=False):
            yield
    finally:
        thread.measuring = before
