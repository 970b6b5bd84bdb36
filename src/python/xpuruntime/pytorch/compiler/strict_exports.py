# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Strict exports: ``torch.export(strict=True)`` while hooks that all modules share are in place.

Where there are global hooks, Dynamo traces ``__call__`` of the module that export wraps around the user's, and refuses,
since that wrapper is a part of itself. Without its hooks, which do nothing in traced code, it traces ``forward``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.import_hook import WhenImported

_NAME = _private_api.TRACED_FUNCTION
_FRAMES, _EXPORT = _private_api.TRACED_FUNCTION_MODULES


class StrictExports:
    """Have strict exports overlook global hooks of this library, until `remove`."""

    def __init__(self) -> None:
        self._placed: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []
        self._awaited: list[WhenImported] = []
        for name in (_FRAMES, _EXPORT):
            if name in sys.modules:
                self._place(sys.modules[name])
            else:
                self._awaited.append(WhenImported(name, self._place))

    def _place(self, module: Any) -> None:
        before = getattr(module, _NAME, None)
        if before is None:  # a PyTorch that traces ``forward`` itself
            return
        if hasattr(before, "__wrapped__"):  # imported from the other module, where it is wrapped already
            before = before.__wrapped__

        @functools.wraps(before)
        def get_traced_fn(traced: Any) -> Any:
            kind = type(traced)
            if (kind.__module__, kind.__name__) == (_EXPORT, "ModuleToTrace") and _are_xpuruntime_hooks():
                return traced.forward.__func__, traced
            return before(traced)

        self._placed.append((module, before, get_traced_fn))
        setattr(module, _NAME, get_traced_fn)

    def remove(self) -> None:
        """Have them see all hooks again. Idempotent."""
        while self._awaited:
            self._awaited.pop().remove()
        while self._placed:
            module, before, xrt_kernel = self._placed.pop()
            if getattr(module, _NAME) is xrt_kernel:
                setattr(module, _NAME, before)


def _are_xpuruntime_hooks() -> bool:
    hooks = _private_api.global_module_hooks()
    return all(str(getattr(hook, "__module__", "")).startswith("xpuruntime.") for hook in hooks)


_mode = _private_api.dispatch_mode
_PROXY = _private_api.mode_keys.PROXY
_FAKE = _private_api.mode_keys.FAKE


def is_traced_for_a_program() -> bool:
    """Say whether a graph is traced now that becomes the user's own, and is no code of ``torch.compile``.

    Such a graph has PyTorch's operators, since it is kept, saved and run where no policy holds.
    """
    if _mode(_PROXY) is None and _mode(_FAKE) is None:
        return bool(torch.compiler.is_exporting())
    return bool(torch.compiler.is_exporting()) or _private_api.compile_context.try_get() is None
