# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`StateSnapshot`: all that a warm-up changes, restored after it."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch.capture.optimizer_state import OptimizerState, ScalerState

if TYPE_CHECKING:
    from xpuruntime.pytorch.capture.captured_state import CapturedState

__all__ = ["RandomState", "StateSnapshot"]


class RandomState:
    """Where the random numbers of Python, NumPy and PyTorch were, those of a CUDA device included."""

    def __init__(self, device: torch.device, generators: list[Any]) -> None:
        self._device = device
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._others = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Go back there."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        for generator, state in self._others:
            generator.set_state(state)


class StateSnapshot:
    """Copies of what a step changes: parameters, buffers, state of optimizers and scalers, random numbers.

    Takes as much memory again as all of that, until it is dropped.
    """

    def __init__(self, used: CapturedState, device: torch.device, *, optimizers: bool = True) -> None:
        self._random = RandomState(device, used.generators)
        with torch.no_grad():
            self._tensors = [(tensor, tensor.data_ptr(), tensor.detach().clone()) for tensor in used.tensors()]
        self._optimizers = [OptimizerState(optimizer) for optimizer in (used.optimizers if optimizers else [])]
        self._scalers = [ScalerState(scaler, device) for scaler in used.scalers]

    def restore(self) -> str:
        """Give everything back. Returns why a step cannot be captured yet, or nothing."""
        problem = ""
        with torch.no_grad():
            for tensor, place, copy in self._tensors:
                if tensor.data_ptr() != place:
                    problem = "the step moves parameters or buffers to other memory"
                tensor.copy_(copy)
        for optimizer in self._optimizers:
            problem = optimizer.restore() or problem
        for scaler in self._scalers:
            scaler.restore()
        self._random.restore()
        return problem

    def restore_host(self) -> None:
        """Give back what a capture changes, whose work on the device does not run: where random numbers were."""
        self._random.restore()
