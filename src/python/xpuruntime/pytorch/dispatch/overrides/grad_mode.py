# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Grad mode outside of an ``autograd.Function``, whose forward runs under ``no_grad``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy

__all__ = ["call_context", "track_grad_mode"]


def call_context(active: CompiledPolicy) -> tuple[str, str]:
    """Return phase and module of the call that runs in this thread, each empty where no rule asks for it."""
    phase = context.phase() if active.by_phase else ""
    if phase == "infer" and CONTEXT.thread.recorded:
        phase = "train"
    module = module_paths.current(recorded=CONTEXT.thread.recorded or None) if active.by_module else ""
    return phase, module


def track_grad_mode(native: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for a kernel at a key of autograd: the native one, and inside of it `call_context` knows."""

    def autograd(*args: Any, **kwargs: Any) -> Any:
        active = active_policy()
        if active is None or not active.by_call or not torch.is_grad_enabled() or not _needs_grad(args):
            return native(*args, **kwargs)
        before, CONTEXT.thread.recorded = CONTEXT.thread.recorded, True
        try:
            return native(*args, **kwargs)
        finally:
            CONTEXT.thread.recorded = before

    return autograd


def _needs_grad(args: tuple[Any, ...]) -> bool:
    """Say whether a tensor among the arguments, or in a tuple among them, requires a gradient."""
    return any(
        x.requires_grad if isinstance(x, torch.Tensor) else isinstance(x, tuple) and _needs_grad(x) for x in args
    )
