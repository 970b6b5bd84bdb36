# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Phase and thread of a ``torch.autograd.Function``: its forward, in which PyTorch records no gradients.

What such a forward calls is part of what calls it. It is followed only while somebody needs to know, also of a function
whose ``apply`` a program has kept. Up to PyTorch 2.13 every ``apply`` passes that of ``_SingleLevelFunction``, which is
wrapped. From 2.14 on ``apply`` is in C alone, and looks up what it calls in the class: there the look-up is wrapped.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from xpuruntime import _core
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.call_scope import generation_phases
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import CONTEXT
from xpuruntime.pytorch.dispatch.overrides.native import skip_in_dynamo

_lock = threading.Lock()
_BASE = _private_api.SingleLevelFunction
_META: Any = type(torch.autograd.Function)
_SET_UP = _BASE.setup_context
#: Called with the class of each function and the arguments of its forward, before it runs.
CHECKS: list[Callable[[Any, tuple[Any, ...]], None]] = []
_IN_C = not isinstance(vars(torch.autograd.Function).get("apply"), classmethod)


def require() -> None:
    """Follow the forwards of functions, and of models that generate; each call is undone by one `release`."""
    generation_phases.require()
    with _lock:
        CONTEXT.users["function_phases"] += 1
        if CONTEXT.users["function_phases"] == 1:
            if _IN_C:
                _META.__getattribute__ = _look_up
            else:
                _BASE.apply = classmethod(_apply)


def release() -> None:
    """Undo one `require`."""
    with _lock:
        CONTEXT.users["function_phases"] -= 1
        if CONTEXT.users["function_phases"] == 0:
            for cls, name in ((_META, "__getattribute__"), (_BASE, "apply")):
                if name in vars(cls):
                    delattr(cls, name)
    generation_phases.release()


def _apply(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    apply = super(_BASE, cls).apply
    if torch.compiler.is_dynamo_compiling():
        return apply(*args, **kwargs)
    _core.enter_function(context.phase(), _private_api.running_backward())
    try:
        _refuse(cls, args)
        result = apply(*args, **kwargs)
    finally:
        _core.leave_function()
    for output in result if isinstance(result, tuple) else (result,):
        node = output.grad_fn if type(output) is torch.Tensor else None
        if _note_thread(node):
            break
    return result


def _refuse(cls: Any, args: tuple[Any, ...]) -> None:
    for check in CHECKS:
        check(cls, args)


def _note_thread(node: Any) -> bool:
    """Note which thread has made a node of a function; says whether it is one."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    vars(node)[_private_api.NODE_THREAD] = _core.node_thread()
    return True


class _Call(threading.local):
    """The call of a function that begins in this thread: its class, the frame that calls it by `id`, and its phase."""

    begun: tuple[Any, int, str, int] | None = None
    forwarded: tuple[Any, int] | None = None


_call = _Call()


def _look_up(cls: Any, name: str) -> Any:
    """Return an attribute of a function's class; to ``apply`` in C, the forward that knows where it was called."""
    # That looks up `NODE_CLASS` before it turns the recording of gradients off, then ``forward``, and ``setup_context``
    # where the class has one of its own, all for one frame of Python.
    attribute = type.__getattribute__(cls, name)
    if name == _private_api.NODE_CLASS:
        _call.begun = (cls, id(sys._getframe(1)), context.phase(), _private_api.running_backward())
        _call.forwarded = None
    elif name == "forward" and _call.begun is not None:
        (owner, frame, phase, backward), _call.begun = _call.begun, None
        if owner is cls and frame == id(sys._getframe(1)) and not torch.is_grad_enabled():
            if type.__getattribute__(cls, "setup_context") is not _SET_UP:
                _call.forwarded = (cls, frame)
            return functools.partial(_forward, cls, attribute, phase, backward)
    elif name == "setup_context" and _call.forwarded is not None:
        (owner, frame), _call.forwarded = _call.forwarded, None
        if owner is cls and frame == id(sys._getframe(1)):
            return functools.partial(_set_up, attribute)
    return attribute


def _forward(cls: Any, forward: Any, phase: str, backward: int, /, *args: Any, **kwargs: Any) -> Any:
    new_style = not (args and _note_thread(args[0]))
    _core.enter_function(phase, backward)
    try:
        _refuse(cls, args if new_style else args[1:])
        return forward(*args, **kwargs)
    except BaseException:
        _call.forwarded = None
        raise
    finally:
        _core.leave_function()


def _set_up(setup_context: Any, /, node: Any, *args: Any, **kwargs: Any) -> Any:
    _note_thread(node)
    return setup_context(node, *args, **kwargs)


for _code in (_apply, _look_up, _forward, _set_up):
    skip_in_dynamo(_code.__code__, within=False)
