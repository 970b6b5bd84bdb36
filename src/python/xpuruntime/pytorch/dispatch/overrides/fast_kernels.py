# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fast kernels: what stands for an operator, so that a call that no rule matches costs little.

A fast kernel calls the native one where no policy is active, and where the route of the call is known and native.
Everything else is handled in Python: calls that are not known yet, those that xpuruntime kernels serve and that need
more than the arrays, and all calls while a thread has a policy of its own, or a recorder watches.

The route of the process (`fast_path`) decides how a fast kernel is reached: in C++ by the addon, in C by PyTorch's
stable C ABI for ``mm`` and ``bmm``, or in Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch.fast_path import fast_path, load_addon
from xpuruntime.pytorch.dispatch.overrides.native import ALIASES

if TYPE_CHECKING:
    from xpuruntime.pytorch.dispatch.overrides.native import Native


class FastKernel:
    """A kernel in C or C++ that PyTorch calls without Python, once it is placed."""

    def __init__(self, native: Native, slow: Callable[..., Any], otherwise: Callable[..., Any]) -> None:
        self._native = native
        self._slow = slow
        self.otherwise = otherwise

    def place(self) -> Callable[[], None] | None:
        """Put it in the operator's place, and return what removes it; ``None`` where this route has none for it."""
        native, keyset = self._native, keyset_of(self._native.key)
        if fast_path().route == "addon":
            remove: Callable[[], None] | None = load_addon().place(native.name, native.key, self._slow, keyset)
            return remove
        return _core.place_stable_kernel(native.name, native.key, self._slow, native, keyset)


def fast_kernel(native: Native, slow: Callable[..., Any]) -> Callable[..., Any] | FastKernel:
    """Return a fast kernel before a native one whose arguments are tensors and scalars."""
    in_python = _core.make_guard(native.name, slow, native)
    if fast_path().route != "python" and is_pytorch_kernel(native):
        return FastKernel(native, slow, in_python)
    return in_python


def fast_operator_kernel(native: Native, slow: Callable[..., Any]) -> Callable[..., Any] | FastKernel:
    """Return a fast kernel before a native one that takes more than tensors, norms and attention; or `slow`."""
    if fast_path().route == "addon" and is_pytorch_kernel(native):
        return FastKernel(native, slow, slow)
    return slow


def keyset_of(key: str) -> Any:
    """Return the set of one dispatch key, with which a kernel at it is called."""
    return _private_api.dispatch_keyset(_private_api.dispatch_key(key))


def is_pytorch_kernel(native: Native) -> bool:
    """Say whether the native kernel is PyTorch's, and not another library's over it, which may do other things."""
    own = rf"Register({native.key}|CompositeImplicitAutograd)(_\d+)?\.cpp:"
    line = re.compile(rf"^{ALIASES.get(native.key, native.key)}: registered at .*/{own}", re.MULTILINE)
    return line.search(_private_api.dispatch_table(f"aten::{native.name}")) is not None
