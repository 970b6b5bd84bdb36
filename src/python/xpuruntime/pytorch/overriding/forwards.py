# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Whether a forward that runs inside a function of autograd records gradients: inside, PyTorch has turned that off."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import calls, module_paths
from xpuruntime.pytorch.held import current

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.pytorch.held import Held

__all__ = ["circumstances", "keep_recording"]


class _Forward(threading.local):
    recorded = False


_forward = _Forward()


def circumstances(held: Held) -> tuple[str, str]:
    """Return phase and module of the call that runs in this thread, each empty where no rule asks for it."""
    phase = calls.phase() if held.by_phase else ""
    if phase == "infer" and _forward.recorded:
        phase = "train"
    module = module_paths.current(recorded=_forward.recorded or None) if held.by_module else ""
    return phase, module


def keep_recording(native: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for a kernel at a key of autograd: the native one, and inside of it `circumstances` knows."""

    def autograd(*args: Any, **kwargs: Any) -> Any:
        held = current()
        if held is None or not held.by_call or not torch.is_grad_enabled() or not _needs_grad(args):
            return native(*args, **kwargs)
        before, _forward.recorded = _forward.recorded, True
        try:
            return native(*args, **kwargs)
        finally:
            _forward.recorded = before

    return autograd


def _needs_grad(args: tuple[Any, ...]) -> bool:
    """Say whether a tensor among the arguments, or in a tuple among them, requires a gradient."""
    return any(
        x.requires_grad if isinstance(x, torch.Tensor) else isinstance(x, tuple) and _needs_grad(x) for x in args
    )
