# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Variants of a training step that are raced, their arguments, and the memory of their device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.argument_types import CALLABLE, COUNT, FLAG, TEXT, check_types
from xpuruntime.errors import InputError
from xpuruntime.pytorch.capture import capture_graph
from xpuruntime.pytorch.capture.step_program import StepProgram
from xpuruntime.pytorch.compiler.compile_hooks import guards_policies

if TYPE_CHECKING:
    from xpuruntime.policies import KernelPolicy

#: Seconds that a process group can be made with.
_LONGEST = 1e8


def check_arguments(
    *,
    optimizer: Any,
    scaler: Any,
    before_step: Any,
    rtol: Any,
    min_effect: Any,
    confidence: Any,
    rounds: Any,
    budget: Any,
    make_capturable: Any,
    cancel: Any,
    progress: Any,
    seed: Any,
    cache_key: Any,
) -> None:
    """Raise InputError or TypeError for an argument of `tune` that is not what it takes."""
    check_types(
        {"make_capturable": FLAG, "cancel": CALLABLE, "progress": CALLABLE, "seed": COUNT, "cache_key": TEXT},
        {
            "make_capturable": make_capturable,
            "cancel": cancel,
            "progress": progress,
            "seed": seed,
            "cache_key": cache_key,
        },
        optional=["cancel", "progress", "cache_key"],
    )
    if seed < 0:
        raise InputError(f"tune: seed is {seed}. Fix: give a number from 0")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"tune: optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("tune: LBFGS computes the loss several times in a step. Fix: do the whole step in fn")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(f"tune: scaler is a {type(scaler).__name__}, not a torch.amp.GradScaler")
    if before_step is not None and not callable(before_step):
        raise InputError(f"tune: before_step is a {type(before_step).__name__}. Fix: give a function")
    if rtol is not None and not (_is_number(rtol) and 0 <= rtol < math.inf):
        raise InputError(f"tune: rtol is {rtol!r}. Fix: give a number from 0, such as 1e-3, or leave it out")
    if not (_is_number(min_effect) and 0 <= min_effect < 1):
        raise InputError(f"tune: min_effect is {min_effect!r}. Fix: give a share from 0 to below 1, such as 0.02")
    if not (_is_number(confidence) and 0.5 <= confidence <= 0.9999):
        raise InputError(f"tune: confidence is {confidence!r}. Fix: give a number from 0.5 to 0.9999, such as 0.99")
    if not (_are_counts(rounds) and 3 <= rounds[0] <= rounds[1]):
        raise InputError(f"tune: rounds is {rounds!r}. Fix: give the fewest and the most, from 3, such as (7, 61)")
    if not (_is_number(budget) and budget > 0):
        raise InputError(f"tune: budget is {budget!r}. Fix: give seconds, such as 300.0")


def check_rank_timeout(value: Any) -> None:
    """Raise InputError for seconds that ranks cannot wait for each other."""
    if not (_is_number(value) and 0 < value <= _LONGEST):
        raise InputError(f"tune: rank_timeout is {value!r}. Fix: give seconds above 0, such as 1800.0")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_counts(value: Any) -> bool:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return all(isinstance(number, int) and not isinstance(number, bool) for number in value)


class VariantMemoryMeter:
    """Peaks of variants that are built one after another, each as if it were the only one.

    Made before anything is copied, so that copies of parameters do not count. The first variant makes the state of the
    optimizer, which stays for the others: it counts for each of them.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        allocated: Callable[[torch.device], int] = torch.cuda.memory_allocated,
        peak: Callable[[torch.device], int] = torch.cuda.max_memory_allocated,
        reset: Callable[[torch.device], None] = torch.cuda.reset_peak_memory_stats,
    ) -> None:
        self._device, self._allocated, self._peak, self._reset = device, allocated, peak, reset
        self._own = self._before = allocated(device)
        self._begun = self._copies = 0

    def begin(self) -> None:
        """Begin a variant; the one before has given its state and its gradients back."""
        self._before = self._allocated(self._device)
        if self._begun == 0:
            self._copies = self._before - self._own
        elif self._begun == 1:
            self._own = self._before - self._copies
        self._begun += 1
        self._reset(self._device)

    def peak(self) -> int:
        """Return the most bytes that the variant has needed since `begin`."""
        return self._own + self._peak(self._device) - self._before


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

    @property
    def plain(self) -> str:
        """The name of the same launch without a policy, which this has to be faster than."""
        return self.launch


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
        if not guards_policies():
            return "this PyTorch compiles code anew whenever a policy comes or goes"
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
    return VariantStep(lambda *inputs: program.run(inputs, {}), _MODES.get(variant.launch))


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
