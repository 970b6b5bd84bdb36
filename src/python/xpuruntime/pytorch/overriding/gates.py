# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Gates: what stands for an operator, in C++, so that a call that no rule speaks of costs little.

A gate calls the native kernel where no policy holds, and where the route of the call is known and native. Everything
else is looked at by Python: calls that are not known yet, those that kernels of ours serve, and all calls while rules
ask for phase or module, a thread has a policy of its own, or somebody watches.

Before products that PyTorch has a C function for, a gate calls this one where it knows a call to be native. Before
those whose arguments PyTorch can hand over in C (``mm``, ``bmm``), it is itself called without Python.
"""

from __future__ import annotations

import functools
import re
import threading
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.pytorch.overriding.native import Native

__all__ = ["Kernel", "count_thread", "forget", "gate", "set_policy", "set_watched", "why_not_direct"]

_lock = threading.Lock()
_routes: dict[Any, Any] | None = None
_circumstances: Callable[[], tuple[str, str]] | None = None
_threads = 0
_watched = False


class Kernel:
    """A gate that PyTorch calls without Python, once it is placed.

    Parameters
    ----------
    native : Native
    slow : callable
        As for `gate`.
    otherwise : callable
        A gate that does the same as a kernel in Python.
    """

    def __init__(self, native: Native, slow: Callable[..., Any], otherwise: Callable[..., Any]) -> None:
        self._native = native
        self._slow = slow
        self.otherwise = otherwise

    def place(self) -> Callable[[], None] | None:
        """Put it in the operator's place, and return what takes it away again; ``None`` where PyTorch refuses it."""
        native = self._native
        return _core.place_kernel(native.name, native.key, self._slow, native, _keyset(native.key))


def gate(native: Native, slow: Callable[..., Any]) -> Callable[..., Any] | Kernel:
    """Return a gate before a native kernel. Where that says `direct` now, it is called without a keyset.

    Parameters
    ----------
    native : Native
    slow : callable
        Called with the dispatcher's keyset, then the operator's arguments. It keeps routes under `calls.call_key` of
        the native kernel's name, the operator's arrays in their order, and `out` where it is given.
    """
    if _is_own(native) and not why_not_direct():
        direct = _core.make_direct_gate(native.name, native.key, slow, native, _keyset(native.key))
        if direct is not None:
            native.direct = True
            return Kernel(native, slow, direct) if native.name in _IN_C and not _why_not_in_c() else direct
    return _core.make_gate(native.name, slow, native)


#: Operators that a kernel in C can stand for: PyTorch's C functions hand tensors over, and no Scalar.
_IN_C = frozenset(("mm", "mm.out", "bmm", "bmm.out"))


def _keyset(key: str) -> Any:
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))


def _is_own(native: Native) -> bool:
    """Say whether the native kernel is PyTorch's, and not another library's over it, which may do other things."""
    line = re.compile(rf"^{native.key}: registered at .*/Register{native.key}(_\d+)?\.cpp:", re.MULTILINE)
    return line.search(torch._C._dispatch_dump_table(f"aten::{native.name}")) is not None


def why_not_direct() -> str:
    """Return why no gate calls PyTorch's C functions in this process; empty where they do."""
    return _core.open_torch()


@functools.cache
def _why_not_in_c() -> str:
    """Return why no kernel in C can be placed, found by placing one: whether Python's errors pass through PyTorch."""
    space, name = "_xpuruntime_probe", "raises"
    library = torch.library.Library(space, "DEF")
    library.define(f"{name}(Tensor x) -> Tensor")
    remove = _core.place_raising_kernel(space, name)
    if remove is None:
        return "this PyTorch takes no kernel in C"
    try:
        torch.ops._xpuruntime_probe.raises(torch.empty(0))
    except LookupError:
        return ""
    except RuntimeError:
        return "an error of Python's does not pass through this PyTorch"
    finally:
        remove()
        library._destroy()
    return "an error of Python's is lost in this PyTorch"


def forget() -> None:
    """Have all gates look anew which calls are native, since a route that was kept is another one now."""
    _core.forget_native_calls()


def set_policy(routes: dict[Any, Any] | None, circumstances: Callable[[], tuple[str, str]] | None = None) -> None:
    """Say what routes the policy of the process has, under which keys. ``None``: no policy.

    Parameters
    ----------
    routes : dict, optional
    circumstances : callable, optional
        Gives phase and module of the call that runs, where they are parts of the keys.
    """
    global _routes, _circumstances
    with _lock:
        _routes, _circumstances = routes, circumstances
        _tell()


def count_thread(step: int) -> None:
    """Say that one thread more, or less, has a policy of its own."""
    global _threads
    with _lock:
        _threads += step
        _tell()


def set_watched(watched: bool) -> None:
    """Say whether every call is watched."""
    global _watched
    with _lock:
        _watched = watched
        _tell()


def _tell() -> None:
    _core.set_gates(_routes, _watched or _threads > 0, _circumstances)
