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
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: F401, N812 - TorchScript looks up names of a wrapped forward here

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.adapters.in_place import is_usual
from xpuruntime.pytorch.dispatch.context import active_policy, capturing
from xpuruntime.pytorch.dispatch.step_cost import waits_for_host
from xpuruntime.pytorch.providers.calls import PLAIN

if TYPE_CHECKING:
    from torch import Tensor

_same = torch.ops.aten._unsafe_view.default
_NOTE = "autocast casts the rows of a norm once for all linear layers that read them"


class _CastRows:
    """Rows of a norm that linear layers may read, and what autocast would cast them to, once they have."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = weakref.ref(rows, functools.partial(_forget, weakref.ref(self)))
        self.kind = rows.device.type
        self.dtype = torch.get_autocast_dtype(self.kind)
        self.made_in = self._state(rows)
        self.shared: Tensor | None = None

    def _state(self, rows: Tensor) -> tuple[Any, ...]:
        """Return what a copy holds for: the numbers of the rows, what autocast does, and calls that run after it."""
        kind = self.kind
        state = (
            rows.data_ptr(), _private_api.tensor_version(rows), torch.is_grad_enabled(),
            torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled(), torch.get_autocast_dtype(kind),
        )  # fmt: skip
        return (*state, _private_api.current_stream(rows.get_device()), capturing()) if kind == "cuda" else state

    def read(self, rows: Tensor) -> Tensor:
        """Return the copy as what is computed of the rows, whose gradients autograd adds in the type of the rows."""
        if self.shared is None:
            # No view to autograd: the rows may be written to later.
            self.shared = _same(rows, rows.shape)
            self.shared.data = rows.detach().to(self.dtype)
        return self.shared

    def holds_for(self, rows: Tensor, weight: Any) -> bool:
        return type(weight) in PLAIN and self.made_in == self._state(rows)


def _forget(cast_rows: weakref.ref[_CastRows], _: object) -> None:
    known = cast_rows()
    if known is not None:
        known.shared = None


class _Latest(threading.local):
    rows: _CastRows | None = None


_latest = _Latest()


def offer(rows: Tensor) -> None:
    """Let the linear layers that read these rows next share what autocast casts them to."""
    active = active_policy()
    _latest.rows = None
    if active is not None and rows.requires_grad and torch.is_grad_enabled() and _is_cast(rows):
        _latest.rows = _CastRows(rows)
        active.adapted[_NOTE] = None


def _is_cast(rows: Tensor) -> bool:
    """Say whether autocast casts rows for linear layers, and keeps it; not where that would cost a step more."""
    wide = rows.dtype is torch.float32 and torch.is_autocast_enabled(rows.device.type)
    usual = wide and torch.is_autocast_cache_enabled() and is_usual(rows) and _private_api.dispatch_modes() == 0
    return usual and not waits_for_host(rows.device)


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
            if latest is not None and rows is latest.rows() and latest.holds_for(rows, self._parameters.get("weight")):
                return original(self, latest.read(rows))
        return original(self, *args, **kwargs)

    return linear  # exported programs keep frames called `forward`, and this is none of theirs
