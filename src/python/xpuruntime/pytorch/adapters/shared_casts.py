# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One cast by autocast for all linear layers that read the rows of a norm.

Autocast casts the rows once for each layer, and keeps each copy for the gradient. Here the layers share a copy: with
the same bits, also of the gradients, which are added in float32 as before.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: F401, N812 - TorchScript looks up names of a wrapped forward here

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.adapters.in_place import is_usual
from xpuruntime.pytorch.dispatch.context import active_policy, capturing

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FunctionType

    from torch import Tensor

__all__ = ["forward_of_linear", "offer", "sharing"]

_same = torch.ops.aten._unsafe_view.default
_NOTE = "autocast casts the rows of a norm once for all linear layers that read them"


class _CastRows:
    """Rows of a norm that linear layers may read, and what autocast would cast them to, once they have."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = weakref.ref(rows, functools.partial(_forget, weakref.ref(self)))
        self.made_in = self._state(rows)
        self.cast: Tensor | None = None

    @staticmethod
    def _state(rows: Tensor) -> tuple[Any, ...]:
        """Return what a copy holds for: the numbers of the rows, a type, and calls that run after it."""
        kind = rows.device.type
        stream = _private_api.current_stream(rows.device.index) if kind == "cuda" else None
        numbers = rows.data_ptr(), _private_api.tensor_version(rows)
        return numbers, torch.get_autocast_dtype(kind), stream, stream is not None and capturing()

    def read(self, rows: Tensor) -> Tensor:
        """Return the copy as what is computed of the rows, whose gradient autograd casts to the type of the rows."""
        if self.cast is None:
            self.cast = rows.detach().to(self.made_in[1])
        shared: Tensor = _same(rows, rows.shape)  # which is no view to autograd: the rows may be written to later
        shared.data = self.cast
        return shared

    def holds_for(self, rows: Tensor, weight: Tensor) -> bool:
        return torch.is_grad_enabled() and _is_cast(rows, weight) and self.made_in == self._state(rows)


def _forget(cast_rows: weakref.ref[_CastRows], _: object) -> None:
    known = cast_rows()
    if known is not None:
        known.cast = None


class _Latest(threading.local):
    rows: _CastRows | None = None


_latest = _Latest()


def _is_cast(*tensors: Tensor) -> bool:
    """Say whether autocast casts rows, the first ones, for linear layers, and keeps what it has cast."""
    wide = tensors[0].dtype is torch.float32 and torch.is_autocast_enabled(tensors[0].device.type)
    return wide and torch.is_autocast_cache_enabled() and is_usual(*tensors) and _private_api.dispatch_modes() == 0


def offer(rows: Tensor) -> None:
    """Let the linear layers that read these rows next share what autocast casts them to."""
    active = active_policy()
    _latest.rows = None
    if active is not None and rows.requires_grad and torch.is_grad_enabled() and _is_cast(rows):
        _latest.rows = _CastRows(rows)
        active.adapted[_NOTE] = None


def forward_of_linear(kind: type) -> FunctionType | None:
    """Return the forward of ``torch.nn.Linear``, and of no other class."""
    return kind.__dict__["forward"] if kind is torch.nn.Linear else None


def sharing(original: FunctionType) -> Callable[..., Any]:
    """Return a forward that reads the shared cast where that holds."""

    @functools.wraps(original)
    def linear(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not torch.compiler.is_compiling():
            latest, rows = _latest.rows, args[0]
            # A weight of another class, such as a quantized one, gets the rows before autocast.
            if latest is not None and rows is latest.rows() and latest.holds_for(rows, self.weight):
                return original(self, latest.read(rows))
        return original(self, *args, **kwargs)

    return linear  # exported programs keep frames called `forward`, and this is none of theirs
