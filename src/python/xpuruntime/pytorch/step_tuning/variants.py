# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Variants of a training step: how its work is launched, and under which kernel policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError
from xpuruntime.policies import Policy
from xpuruntime.pytorch.capture import capture_graph
from xpuruntime.pytorch.capture.step_program import StepProgram
from xpuruntime.pytorch.compiler.compile_hooks import compiles_alike

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.policies import KernelPolicy

__all__ = ["EAGER", "LAUNCHES", "StepParts", "Variant", "VariantStep", "build", "captures_in_torch", "obstacle"]

EAGER = "eager"
#: How a step is launched, to the mode of torch.compile.
_MODES: dict[str, str | None] = {
    "compile": None,
    "compile:reduce-overhead": "reduce-overhead",
    "compile:max-autotune-no-cudagraphs": "max-autotune-no-cudagraphs",
}
_CAPTURED = {"capture": False, "capture:compile": True}
LAUNCHES = (EAGER, *_MODES, *_CAPTURED)
#: Those that launch CUDA graphs.
_GRAPHS = ("compile:reduce-overhead", *_CAPTURED)


@dataclass(frozen=True)
class Variant:
    """One candidate."""

    launch: str
    kernels: str
    policy: KernelPolicy | None

    @property
    def name(self) -> str:
        """The launch, and the policy where there is one."""
        return self.launch if self.policy is None else f"{self.launch}+{self.kernels}"


@dataclass(frozen=True)
class StepParts:
    """What a step consists of; see `capture_graph`."""

    fn: Callable[..., Any]
    optimizer: Any
    scaler: Any
    before_step: Callable[[], Any] | None
    modules: Sequence[Any] | None
    parameters: list[Any]

    def forget_gradients(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self.parameters:
            parameter.grad = None


def captures_in_torch(variant: Variant) -> bool:
    """Say whether torch.compile captures the step itself.

    Such variants are built last: their graphs keep autograd nodes alive that belong to the default stream, and under
    ``torch.distributed`` those would be part of a later capture, which they invalidate.
    """
    return variant.launch == "compile:reduce-overhead"


def obstacle(variant: Variant, device: torch.device) -> str:
    """Return why a variant cannot run on a device, or nothing."""
    if variant.launch in _GRAPHS and device.type != "cuda":
        return f"the {device.type.upper()} has no CUDA graphs"
    if variant.launch in _MODES and variant.policy is not None:
        if variant.launch in _GRAPHS:
            return (
                "CUDA graphs of torch.compile keep the kernels with which they were recorded, and do not know of "
                "policies; capture:compile does"
            )
        if not compiles_alike(Policy(kernels=variant.policy)):
            return "compiled code is compiled anew whenever a policy of more than products comes or goes"
    return ""


def build(variant: Variant, parts: StepParts, args: tuple[Any, ...]) -> VariantStep:
    """Return a function that does one step on `args`."""
    if variant.launch in _CAPTURED:
        step = capture_graph(
            parts.fn,
            args,
            optimizer=parts.optimizer,
            scaler=parts.scaler,
            before_step=parts.before_step,
            modules=parts.modules,
            compile=_CAPTURED[variant.launch],
        )
        if not step.report.captured:
            raise InputError("; ".join(step.report.reasons) or "the first step runs eagerly")
        return VariantStep(step, None, step.reset)
    fn = parts.fn
    if variant.launch in _MODES:
        fn = torch.compile(fn, mode=_MODES[variant.launch])
    program = StepProgram(fn, parts.optimizer, parts.scaler, parts.before_step, parts.parameters)
    return VariantStep(lambda *inputs: program.whole(inputs, {}), _MODES.get(variant.launch))


class VariantStep:
    """A step of one variant; called like the function that computes the loss."""

    def __init__(self, call: Callable[..., Any], mode: str | None, reset: Callable[[], None] | None = None) -> None:
        self._call, self._reset = call, reset
        #: Whether `torch.compile` records CUDA graphs of it.
        self.recorded = mode == "reduce-overhead"

    def __call__(self, *args: Any) -> Any:
        """Do one step."""
        if self.recorded:
            torch.compiler.cudagraph_mark_step_begin()
        return self._call(*args)

    def reset(self) -> None:
        """Drop the graphs that `capture_graph` made for it."""
        if self._reset is not None:
            self._reset()
