# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The phase and the thread of a ``torch.autograd.Function``: its forward, in which PyTorch records no gradients.

What such a forward calls is part of what calls it. Every function passes through ``_SingleLevelFunction.apply``, also
one whose ``apply`` a program has kept; it is wrapped only while somebody needs to know.
"""

from __future__ import annotations

from typing import Any

import torch

from xpuruntime import _core
from xpuruntime.pytorch import _private_api, calls
from xpuruntime.pytorch.overriding.native import leave_alone
from xpuruntime.runtime.forking import fork_lock

__all__ = ["give_back", "require"]

_lock = fork_lock()
_users = 0


def require() -> None:
    """Follow the forwards of functions; each call is undone by one `give_back`."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _private_api.SingleLevelFunction.apply = classmethod(_apply)


def give_back() -> None:
    """Undo one `require`."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0 and "apply" in vars(_private_api.SingleLevelFunction):
            del _private_api.SingleLevelFunction.apply


def _apply(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    apply = super(_private_api.SingleLevelFunction, cls).apply
    if torch.compiler.is_dynamo_compiling():
        return apply(*args, **kwargs)
    _core.enter_function(calls.phase(), _private_api.running_backward())
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


leave_alone(_apply.__code__, within=False)
