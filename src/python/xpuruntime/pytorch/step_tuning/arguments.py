# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`check_arguments`: the arguments of `tune`, checked before any step runs."""

from __future__ import annotations

import math
from typing import Any

import torch

from xpuruntime.argument_types import CALLABLE, COUNT, FLAG, check_types
from xpuruntime.errors import InputError

__all__ = ["check_arguments", "check_rank_timeout"]

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
) -> None:
    """Raise InputError or TypeError for an argument of `tune` that is not what it takes."""
    check_types(
        {"make_capturable": FLAG, "cancel": CALLABLE, "progress": CALLABLE, "seed": COUNT},
        {"make_capturable": make_capturable, "cancel": cancel, "progress": progress, "seed": seed},
        optional=["cancel", "progress"],
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
    return all(isinstance(one, int) and not isinstance(one, bool) for one in value)
