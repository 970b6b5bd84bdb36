# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A recorder that needs no CUDA: what it records is run again at each replay, into the same outputs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from xpuruntime.pytorch.capture.captured_state import CapturedState, captured_state_of
from xpuruntime.pytorch.capture.graph_recorder import CapturedGraph
from xpuruntime.pytorch.capture.step import CapturedStep
from xpuruntime.pytorch.capture.step_program import StepProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU = torch.device("cpu")


class RunAgain:
    """Replays by running the function; writes what it returns, and its gradients, where the capture left them."""

    def __init__(self, run: Callable[[], Any], outputs: Any, gradients: list[tuple[Any, Any]]) -> None:
        self.run = run
        self.outputs = outputs
        self.gradients = gradients
        self.alive = True
        self.grad_mode = torch.is_grad_enabled()

    def replay(self) -> None:
        assert self.alive, "a graph that was dropped is replayed"
        with torch.set_grad_enabled(self.grad_mode):
            outputs = self.run()
        with torch.no_grad():
            for mine, new in zip(pytree.tree_leaves(self.outputs), pytree.tree_leaves(outputs), strict=True):
                if isinstance(mine, torch.Tensor):
                    mine.copy_(new)
            for parameter, gradient in self.gradients if self.grad_mode else ():
                if gradient is not None:
                    gradient.copy_(parameter.grad)
                parameter.grad = gradient

    def reset(self) -> None:
        self.alive = False


class AgainRecorder:
    """Records by running; what that changed in parameters, buffers and optimizers is undone, as if it had not run."""

    def __init__(self, used: CapturedState) -> None:
        self.device = CPU
        self.used = used
        self.live = 0
        self.records = 0
        self.warmed = 0
        self.fails: Exception | None = None

    @contextlib.contextmanager
    def warming(self) -> Iterator[None]:
        self.warmed += 1
        yield

    def record(self, run: Callable[[], Any], generators: list[Any]) -> CapturedGraph:
        if self.fails is not None:
            raise self.fails
        self.records += 1
        places = [*self.used.tensors(), *self._states()]
        before = [place.detach().clone() for place in places]
        outputs = run()
        count = len(list(self._states()))
        assert len(places) == len(self.used.tensors()) + count, "the optimizer made state inside of a capture"
        with torch.no_grad():
            for place, copy in zip(places, before, strict=True):
                place.copy_(copy)
        outputs = pytree.tree_map_only(torch.Tensor, torch.clone, outputs)
        self.live += 1
        gradients = [(parameter, parameter.grad) for parameter in self.used.parameters()]
        return CapturedGraph(RunAgain(run, outputs, gradients), outputs, 100)

    def _states(self) -> Iterator[torch.Tensor]:
        for optimizer in self.used.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        for scaler in self.used.scalers:
            yield from (scaler._scale, scaler._growth_tracker)

    def released(self, count: int) -> None:
        self.live -= count

    def order(self) -> None:
        pass


def captured(
    fn: Callable[..., Any],
    *,
    optimizer: Any = None,
    scaler: Any = None,
    before_step: Callable[[], Any] | None = None,
    inside: bool = True,
    **options: Any,
) -> tuple[CapturedStep, AgainRecorder]:
    """Return a step that is captured on the CPU, and its recorder."""
    used = captured_state_of(fn)
    for value in (optimizer, scaler):
        if value is not None:
            used.add(value)
    recorder = AgainRecorder(used)
    work = StepProgram(fn, optimizer, scaler, before_step, used.parameters())
    work.steps_inside = inside
    return CapturedStep(work, used, CPU, recorder, **options), recorder
