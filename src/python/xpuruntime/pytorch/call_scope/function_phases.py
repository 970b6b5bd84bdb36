# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Phase and thread of a ``torch.autograd.Function``: its forward, in which PyTorch records no gradients.

What such a forward calls is part of what calls it. Every function passes through ``_SingleLevelFunction.apply``, also
one whose ``apply`` a program has kept; it is wrapped only while somebody needs to know.
"""

from __future__ import annotations

from typing import Any

import torch

from xpuruntime import _core
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch import call_state
from xpuruntime.pytorch.dispatch.context import CONTEXT
from xpuruntime.pytorch.dispatch.overrides.native import skip_in_dynamo
from xpuruntime.runtime.process_forks import fork_lock

__all__ = ["release", "require"]

_lock = fork_lock()


def require() -> None:
    """Follow the forwards of functions; each call is undone by one `release`."""
    with _lock:
        CONTEXT.users["function_phases"] += 1
        if CONTEXT.users["function_phases"] == 1:
            _private_api.SingleLevelFunction.apply = classmethod(_apply)


def release() -> None:
    """Undo one `require`."""
    with _lock:
        CONTEXT.users["function_phases"] -= 1
        if CONTEXT.users["function_phases"] == 0 and "apply" in vars(_private_api.SingleLevelFunction):
            del _private_api.SingleLevelFunction.apply


def _apply(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    apply = super(_private_api.SingleLevelFunction, cls).apply
    if torch.compiler.is_dynamo_compiling():
        return apply(*args, **kwargs)
    _core.enter_function(call_state.phase(), _private_api.running_backward())
    try:
        found = apply(*args, **kwargs)
    finally:
        _core.leave_function()
    for one in found if isinstance(found, tuple) else (found,):
        node = one.grad_fn if type(one) is torch.Tensor else None
        if node is not None and isinstance(node, torch.autograd.function.BackwardCFunction):
            vars(node)["xpuruntime_thread"] = _core.node_thread()
            break
    return found


skip_in_dynamo(_apply.__code__, within=False)
