# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`GraphBlock`: the work of one ``with`` block as a CUDA graph."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any, Self

import torch

from xpuruntime.errors import InputError, UnsupportedOperationError, warn
from xpuruntime.printable import error_line
from xpuruntime.pytorch._private_api import lookup
from xpuruntime.pytorch.capture.captured_state import RandomState
from xpuruntime.pytorch.capture.graph_recorder import CudaRecorder
from xpuruntime.pytorch.capture.step_program import forget_accumulators, leaves_on, uncached_autocast
from xpuruntime.pytorch.dispatch import context


class GraphBlock:
    """The work of one ``with`` block as a CUDA graph. Made by `capture_graph`.

    The block runs once and is captured: what it puts on the device runs at each `replay`, and not before. Without a
    CUDA device the block runs eagerly, after a warning, and cannot be replayed.

    Attributes
    ----------
    graph : torch.cuda.CUDAGraph or None
        After the block.
    bytes : int
        By how much the pool grew.
    """

    def __init__(self, pool: Any, *, strict: bool = False) -> None:
        self.graph: Any = None
        self._strict = strict
        self._ran_eagerly = False
        self.bytes = 0
        self._pool_given = pool
        self._recorder: CudaRecorder | None = None
        self._cleanup = contextlib.ExitStack()
        self._memory_before = 0
        self._before: dict[int, Any] = {}
        self._gradients: list[tuple[Any, Any]] = []
        self._policy: Any = None
        self._random: RandomState | None = None

    def __enter__(self) -> Self:
        if not torch.cuda.is_available():
            why = "there is no CUDA device, so there are no CUDA graphs"
            if self._strict:
                msg = f"capture_graph: {why}, and strict=True asks for one. Fix: leave strict out to run eagerly"
                raise UnsupportedOperationError(msg)
            warn(f"capture_graph: {why}; the block runs eagerly")
            self._ran_eagerly = True
            return self
        if self.graph is not None or self._recorder is not None:
            msg = "capture_graph: this block was captured already. Fix: call capture_graph() again for another"
            raise InputError(msg)
        if torch.cuda.is_current_stream_capturing():
            msg = (
                "capture_graph: the current stream is being captured already, and captures do not nest; end that first"
            )
            raise UnsupportedOperationError(msg)
        device = torch.device("cuda", torch.cuda.current_device())
        self._recorder = CudaRecorder(device, self._pool_given)
        self._random = RandomState(device, [])
        leaves = leaves_on(device)
        forget_accumulators(leaves)
        self._before = {id(leaf): leaf.grad for leaf in leaves}
        del leaves
        self._cleanup.enter_context(uncached_autocast())
        try:
            self._memory_before = self._recorder.begin([])
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ran_eagerly:
            return
        assert self._recorder is not None
        try:
            if error is not None:
                self._recorder.abandon()
                if lookup.is_capture_error(error):
                    raise _refusal(error) from error
                return
            try:
                self.graph, _, self.bytes = self._recorder.end(self._memory_before)
            except RuntimeError as spoiled:
                raise _refusal(spoiled) from spoiled
        finally:
            self._cleanup.close()
            if self._random is not None:
                self._random.restore()
        before = self._before
        self._gradients = [
            (leaf, leaf.grad) for leaf in leaves_on(self._recorder.device) if leaf.grad is not before.get(id(leaf))
        ]
        self._before = {}
        self._policy = context.active_policy()  # whose kernels and workspaces the graph refers to

    def replay(self) -> None:
        """Put the work of the block on the current stream.

        Gradients that the block made are attached to their parameters again, where `zero_grad` has taken them away.

        Raises
        ------
        InputError
            Nothing was captured.
        UnsupportedOperationError
            The block ran eagerly, without a CUDA device.
        """
        if self._ran_eagerly:
            msg = (
                "capture_graph: the block ran eagerly, without a CUDA device, and a block cannot be run again. "
                "Fix: write it as a function and call step = capture_graph(fn), which runs it at each step()"
            )
            raise UnsupportedOperationError(msg)
        if self.graph is None:
            msg = "capture_graph: nothing was captured, so there is nothing to replay; replay after the with block"
            raise InputError(msg)
        assert self._recorder is not None
        self._recorder.order()
        self.graph.replay()
        for leaf, gradient in self._gradients:
            if leaf.grad is not gradient:
                leaf.grad = gradient

    def pool(self) -> Any:
        """Return the handle of the pool that holds the memory of the work, for captures that never run beside it."""
        if self.graph is None:
            msg = "capture_graph: nothing was captured, so there is no pool yet; ask after the with block"
            raise InputError(msg)
        return self.graph.pool()

    def reset(self) -> None:
        """Drop the graph and give its memory back."""
        graph, self.graph = self.graph, None
        self._gradients = []
        self._policy = None
        if graph is not None:
            graph.reset()


def _refusal(error: BaseException) -> UnsupportedOperationError:
    text = error_line(error).rstrip(".")
    return UnsupportedOperationError(
        f"capture_graph: the block cannot be captured: {text}. What waits for the device (.item(), .cpu(), printing), "
        f"copies from pageable host memory, and work that runs for the first time do not belong into it: run it a few "
        f"times before, on a side stream, and drop the results; or use step = capture_graph(fn, inputs), which does so"
    )
