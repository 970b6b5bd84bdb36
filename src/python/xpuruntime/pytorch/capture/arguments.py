# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arguments of a step that is captured or tuned: what it works on, its sample inputs and its device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError
from xpuruntime.pytorch.capture.captured_state import captured_state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.pytorch.capture.captured_state import CapturedState

__all__ = ["device_of", "samples_of", "state_of"]

_CPU = torch.device("cpu")


def state_of(fn: Callable[..., Any], optimizer: Any, scaler: Any, modules: Sequence[Any] | None) -> CapturedState:
    """Return what a step works on. Raises InputError where modules of the optimizer's parameters cannot be found."""
    if not callable(fn):
        raise InputError(
            f"capture_graph: fn is a {type(fn).__name__}; pass the function that computes the loss or the step"
        )
    if isinstance(modules, torch.nn.Module):
        modules = (modules,)
    if modules is not None and not isinstance(modules, Iterable):
        raise InputError(f"capture_graph: modules is a {type(modules).__name__}; pass a list, such as modules=[model]")
    used = captured_state_of(fn)
    for value in (*(() if modules is None else modules), optimizer, scaler):
        if value is not None and not used.add(value):
            msg = (
                f"capture_graph: modules holds a {type(value).__name__}; pass torch.nn.Modules, such as modules=[model]"
            )
            raise InputError(msg)
    missing = used.unexplained()
    if missing and modules is None:
        msg = (
            f"capture_graph: {missing} parameters of the optimizer belong to no module that fn closes over, names or "
            f"is bound to, so train or eval mode and buffers of their modules are not known; pass modules=[model]"
        )
        raise InputError(msg)
    return used


def samples_of(sample_inputs: Any) -> tuple[Any, ...]:
    """Return sample inputs as the arguments of a call."""
    if sample_inputs is None:
        return ()
    return tuple(sample_inputs) if isinstance(sample_inputs, (tuple, list)) else (sample_inputs,)


def device_of(used: CapturedState, samples: tuple[Any, ...]) -> tuple[torch.device, str]:
    """Return where the step runs, and why it runs eagerly there, or nothing."""
    tensors = used.tensors() or [leaf for leaf in samples if isinstance(leaf, torch.Tensor)]
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    if not devices:
        devices = [torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU]
    if len(devices) > 1:
        names = " and ".join(map(str, devices))
        return devices[0], f"parameters and buffers are on {names}, and a graph belongs to one device"
    device = devices[0]
    if device.type == "cuda":
        return device, ""
    if torch.cuda.is_available():
        return device, f"parameters are on {device}, which has no CUDA graphs; move the model to a CUDA device"
    return device, f"the {device.type.upper()} has no CUDA graphs"
