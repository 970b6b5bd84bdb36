# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Capturable optimizers: whether an optimizer's step can be captured, and making it so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.capture.captured_state import parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["hyperparameters", "make_capturable", "obstacles", "scaler_obstacle"]


def obstacles(optimizer: Any, device: torch.device) -> list[str]:
    """Return what keeps the step of an optimizer out of a graph on `device`, each with its fix; nothing: it can go in.

    Asked are ``capturable=True`` of every group (of SGD, which has no such option, ``fused=True``: only its fused
    kernel reads the learning rate on the device) and a learning rate that is a tensor on the device, since a number
    would be frozen into the graph.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD):
        wrong = ["fused=True"] if not all(group.get("fused") for group in optimizer.param_groups) else []
    elif all("capturable" in group for group in optimizer.param_groups):
        wrong = ["capturable=True"] if not all(group["capturable"] for group in optimizer.param_groups) else []
    else:
        return [
            f"{name} has no option `capturable`, so its step cannot be captured; pass capture_optimizer=False, and it "
            f"runs after each replay"
        ]
    if not all(_reads_on(group["lr"], device) for group in optimizer.param_groups):
        wrong.append(f"lr=torch.tensor({_number(optimizer.param_groups[0]['lr'])}, device={str(device)!r})")
    found = []
    if wrong:
        found.append(
            f"the step of {name} is not capturable as it is; construct it with {', '.join(wrong)}, or pass "
            f"make_capturable=True to have it changed so, or capture_optimizer=False to run it after each replay"
        )
    if any(_on_other_device(value, device) for state in optimizer.state.values() for value in state.values()):
        found.append(
            f"{name} holds state on another device than {device}, made before it was capturable; pass "
            f"make_capturable=True to have it moved"
        )
    return found


def scaler_obstacle(optimizer: Any, scaler: Any) -> str:
    """Return why a scaler keeps the optimizer's step out of a graph, or nothing."""
    if scaler is None or not scaler.is_enabled() or _private_api.steps_with_scaler(optimizer):
        return ""
    return (
        f"GradScaler.step waits for the device to see whether a gradient is infinite, except for a fused optimizer; "
        f"construct {type(optimizer).__name__} with fused=True, where it has it, to capture its step too"
    )


def make_capturable(optimizer: Any, device: torch.device) -> None:
    """Change an optimizer in place, so that its step can be captured on `device`.

    Every group gets ``capturable=True`` (SGD: ``fused=True``) and a learning rate that is a float32 tensor on the
    device; schedulers that were made already go on working, since they find it in the group. Its state is moved there.
    """
    sgd = isinstance(optimizer, torch.optim.SGD)
    if not sgd and not all("capturable" in group for group in optimizer.param_groups):
        msg = f"make_capturable: {type(optimizer).__name__} has no option `capturable`; pass capture_optimizer=False"
        raise InputError(msg)
    for group in [*optimizer.param_groups, optimizer.defaults]:
        if sgd:
            group["fused"], group["foreach"] = True, None
        else:
            group["capturable"] = True
        if not _reads_on(group["lr"], device):
            group["lr"] = torch.tensor(_number(group["lr"]), dtype=torch.float32, device=device)
    if sgd:
        # What the constructor sets for fused=True.
        optimizer._step_supports_amp_scaling = True
        optimizer._need_device_dtype_check_for_fused = True
    for parameter in parameters_of(optimizer):
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if _on_other_device(value, device):
                state[key] = value.to(device)


def hyperparameters(optimizer: Any) -> Iterator[tuple[Any, ...]]:
    """Yield what a graph freezes of each group: the numbers, and the places of tensors."""
    for group in optimizer.param_groups:
        yield tuple([_frozen(value) for key, value in group.items() if key not in _NO_NUMBERS])


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return tuple(value) if isinstance(value, list) else value


#: What groups hold besides: schedulers keep the last one for themselves.
_NO_NUMBERS = frozenset({"params", "param_names", "initial_lr"})


def _reads_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device


def _on_other_device(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device != device


def _number(value: Any) -> float:
    return float(value)
