# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Losses of the first steps of a variant, compared with those of the eager step from the same state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.pytorch._private_api import pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.pytorch.capture.captured_state import CapturedState
    from xpuruntime.pytorch.capture.snapshot import StateSnapshot

__all__ = ["ReferenceLosses", "difference", "losses_of", "reference_losses"]

#: Steps whose losses are compared, and eager repetitions with other random numbers where a step draws some.
_STEPS, _REPEATS = 4, 4
#: Relative tolerance by the type that is computed in.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}


class ReferenceLosses(NamedTuple):
    """What other variants are compared with."""

    losses: tuple[float, ...]
    tolerance: float
    random: bool


def losses_of(step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, ...]:
    """Return the first numbers that some steps return."""
    return tuple(_number(step(*args)) for _ in range(_STEPS))


def reference_losses(
    step: Callable[..., Any], args: tuple[Any, ...], used: CapturedState, snapshot: StateSnapshot, rtol: float | None
) -> ReferenceLosses:
    """Return the losses of the eager step, and the tolerance that they allow."""
    before = _random_states()
    losses, types = _losses_and_types(step, args)
    random = any(not torch.equal(a, b) for a, b in zip(before, _random_states(), strict=True))
    snapshot.restore()
    if rtol is not None:
        return ReferenceLosses(losses, rtol, random)
    tolerance = _tolerance(types | {parameter.dtype for parameter in used.parameters()})
    if random:
        apart = 0.0
        for seed in range(_REPEATS):
            torch.manual_seed(seed)
            apart = max(apart, difference(losses_of(step, args), losses))
            snapshot.restore()
        tolerance = max(tolerance, 2 * apart)
    return ReferenceLosses(losses, tolerance, random)


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference; infinite where one is not a number."""
    found = 0.0
    for loss, expected in zip(losses, reference, strict=True):
        if not math.isfinite(loss) and not (math.isnan(loss) and math.isnan(expected)) and loss != expected:
            return math.inf
        if math.isfinite(loss):
            found = max(found, abs(loss - expected) / max(abs(expected), 1e-12))
    return found


def _number(result: Any) -> float:
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return float(tensors[0].detach().float().mean()) if tensors else math.nan


def _random_states() -> list[torch.Tensor]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _losses_and_types(step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[tuple[float, ...], set[torch.dtype]]:
    """Return losses, and the types of what the steps save for their backward: those that autocast computes in, too."""
    types: set[torch.dtype] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        types.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        return losses_of(step, args), types


def _tolerance(types: set[torch.dtype]) -> float:
    return max((_TOLERANCES[one] for one in types & _TOLERANCES.keys()), default=_TOLERANCES[torch.float32])
