# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Phase and thread of a ``torch.autograd.Function``: its forward, in which PyTorch records no gradients.

What such a forward calls is part of what calls it. ``apply`` is wrapped, only while somebody needs to know: up to
PyTorch 2.13 in ``_SingleLevelFunction``, which every function passes, also one whose ``apply`` a program has kept. From
2.14 on, ``torch.autograd.Function`` has one in C of its own, and one that was kept before goes past the wrapper.
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
_BASE = _private_api.SingleLevelFunction
#: What has an `apply` that no other one calls.
_WRAPPED = tuple(
    cls for cls in (_BASE, torch.autograd.Function)
    if cls is _BASE or not isinstance(vars(cls).get("apply"), classmethod)
)  # fmt: skip
_native: list[tuple[Any, Any]] = []


def require() -> None:
    """Follow the forwards of functions; each call is undone by one `release`."""
    with _lock:
        CONTEXT.users["function_phases"] += 1
        if CONTEXT.users["function_phases"] == 1:
            for cls in _WRAPPED:
                _native.append((cls, vars(cls).get("apply")))
                cls.apply = classmethod(_apply)


def release() -> None:
    """Undo one `require`."""
    with _lock:
        CONTEXT.users["function_phases"] -= 1
        if CONTEXT.users["function_phases"] == 0:
            while _native:
                cls, native = _native.pop()
                if native is not None:
                    cls.apply = native
                else:
                    del cls.apply


def _apply(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    apply = super(_BASE, cls).apply
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
