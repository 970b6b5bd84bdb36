# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Replaced functions in Python, and operators that take functions, past PyTorch's dispatcher."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch.overrides.native import HIGHER_ORDER, IN_PYTHON
from xpuruntime.pytorch.import_hook import WhenImported

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.pytorch.dispatch.overrides.native import Override

__all__ = ["Awaited", "Higher", "InPlace", "Replaced", "is_there"]


class InPlace(Protocol):
    """Something of PyTorch's that is replaced until `remove`."""

    override: Override
    key: str

    @property
    def title(self) -> str:
        """What is replaced, in a few words; empty while it is missing."""

    def remove(self) -> None:
        """Give PyTorch its own back."""


def is_there(override: Override, key: str) -> bool:
    """Say whether this PyTorch has what such an override stands for; its module is imported."""
    if key == IN_PYTHON:
        return callable(getattr(sys.modules[override.module], override.name, None))
    op = getattr(torch.ops.higher_order, override.name, None)
    return op is not None and _private_api.dispatch_key(HIGHER_ORDER[key]) in _private_api.python_kernels(op)


class Replaced:
    """A function of one of PyTorch's modules, replaced by an override until `remove`.

    Code that is being compiled is traced through the override, and compiled again where that comes or goes.
    """

    def __init__(self, override: Override, key: str) -> None:
        self.override = override
        self.key = key
        self._module: Any = sys.modules[override.module]
        self._native = getattr(self._module, override.name)
        self._override = override.make(self._native)
        setattr(self._module, override.name, self._override)

    @property
    def title(self) -> str:
        """What is replaced, in a few words."""
        return f"{self.override.module}.{self.override.name}"

    def remove(self) -> None:
        """Give PyTorch its own back, unless another library has replaced the override since."""
        if getattr(self._module, self.override.name) is self._override:
            setattr(self._module, self.override.name, self._native)


class Higher:
    """A higher-order operator's kernel at one dispatch key, replaced by an override until `remove`.

    It runs where the operator is computed; what `torch.compile` lowers does not come here.
    """

    def __init__(self, override: Override, key: str) -> None:
        self.override = override
        self.key = key
        self._op: Any = getattr(torch.ops.higher_order, override.name)
        self._at = _private_api.dispatch_key(HIGHER_ORDER[key])
        self._native = _private_api.python_kernels(self._op)[self._at]
        self._override = override.make(self._native)
        self._place(self._override)

    @property
    def title(self) -> str:
        """What is replaced, in a few words."""
        return f"higher_order::{self.override.name} [{HIGHER_ORDER[self.key]}]"

    def _place(self, function: Any) -> None:
        _private_api.python_kernels(self._op)[self._at] = function
        _private_api.forget_dispatch(self._op)

    def remove(self) -> None:
        """Give PyTorch its own back, unless another library has replaced the override since."""
        if _private_api.python_kernels(self._op).get(self._at) is self._override:
            self._place(self._native)


class Awaited:
    """An override of something that is there once a module is imported, and placed then; until `remove`."""

    def __init__(
        self, override: Override, key: str, override_in_place: Callable[[Override, str], InPlace | None]
    ) -> None:
        self.override = override
        self.key = key
        self.placed: InPlace | None = None
        self._place = override_in_place
        self._wait = WhenImported(override.module, self._come)

    def _come(self, _module: Any) -> None:
        self.placed = self._place(self.override, self.key)

    @property
    def title(self) -> str:
        """What is replaced, in a few words; empty before the import."""
        return "" if self.placed is None else self.placed.title

    def remove(self) -> None:
        """Give PyTorch its own back. Idempotent."""
        self._wait.remove()
        placed, self.placed = self.placed, None
        if placed is not None:
            placed.remove()
