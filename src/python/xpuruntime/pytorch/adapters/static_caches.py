# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Layers of the static caches of transformers, whose writes of new keys and values are ``cache_update``."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.adapters.in_place import UNUSUAL, decides, is_usual, run_original
from xpuruntime.pytorch.dispatch.context import active_policy, in_clean_thread
from xpuruntime.pytorch.dispatch.overrides.native import CLASSES, Override
from xpuruntime.pytorch.providers.operations import cache_update
from xpuruntime.pytorch.providers.operators import perform

if TYPE_CHECKING:
    from torch import Tensor

_OP = "cache_update"
_MODULE = "transformers.cache_utils"
_UNKNOWN = "it writes into its cache in none of the ways that this library knows"
_FULL = "its window is full, and all of its entries move"
_LEARNS = "the gradient of what it writes is recorded"
_OTHER = "what it writes has another type than its cache"
_lock = threading.RLock()


def _write(layer: Any, form: str, new_keys: Tensor, new_values: Tensor, write: Any) -> tuple[Tensor, Tensor]:
    count = new_keys.shape[-2]
    positions = torch.arange(count, device=layer.device) + layer.cumulative_length
    write(layer.keys, layer.values, new_keys, new_values, positions)
    layer.cumulative_length.add_(count)
    if form == "window":
        layer.cumulative_length_int += count
    return layer.keys, layer.values


def _by_kernel(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, positions: Tensor) -> None:
    operands = {"keys": keys, "values": values, "new_keys": new_keys, "new_values": new_values, "positions": positions}
    perform(_OP, operands, {})


def _adapter(original: FunctionType, owner: type) -> Callable[..., Any]:
    def form_of() -> str:
        return _form_of(original, owner)

    _private_api.mark_constant(form_of)

    # Traced by Dynamo: nothing but what it can follow, and the function that it takes for a constant.
    @functools.wraps(original)
    def update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        form = form_of()
        compiling = torch.compiler.is_compiling()
        if form == "" or not (compiling or decides(_OP, key_states)):
            return original(self, key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        why = _UNKNOWN if form == "!" else ""
        if why == "":
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            if form == "window" and self.cumulative_length_int + key_states.shape[-2] > self.max_cache_len:
                why = _FULL
            elif torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
                why = _LEARNS
            elif key_states.dtype != self.keys.dtype or value_states.dtype != self.values.dtype:
                why = _OTHER
            elif not compiling and not is_usual(self.keys, self.values, key_states, value_states):
                why = UNUSUAL
        if why == "":
            return _write(self, form, key_states, value_states, _by_kernel)
        if compiling:
            return original(self, key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        run = functools.partial(original, **kwargs)
        return run_original(_OP, original, run, (self, key_states, value_states, *args), key_states, why)  # type: ignore[no-any-return]

    return update


def _form_of(original: FunctionType, owner: type) -> str:
    """Return the form of a method where the active policy decides ``cache_update``; ``!`` for an unknown one."""
    # The policy that holds is part of the key of compiled code; see `compile_hooks`.
    active = active_policy()
    if active is None or _OP not in active.ops or torch.compiler.is_exporting():
        return ""
    with _lock:
        return _recognized(original, owner)


@functools.lru_cache(maxsize=64)
def _recognized(original: FunctionType, owner: type) -> str:
    return in_clean_thread(_first_form, original, owner)


def _first_form(original: FunctionType, owner: type) -> str:
    for form in ("all", "window"):
        try:
            theirs, ours = (owner(max_cache_len=6, sliding_window=6) for _ in range(2))
            if all(_agree(original, form, theirs, ours, count) for count in (3, 1)):
                return form
        except Exception:
            continue
    return "!"


def _agree(original: FunctionType, form: str, theirs: Any, ours: Any, count: int) -> bool:
    keys = torch.sin(torch.arange(2.0 * 3 * count * 4, device="cpu") ** 2).view(2, 3, count, 4)
    values = torch.cos(torch.arange(2.0 * 3 * count * 5, device="cpu") ** 2).view(2, 3, count, 5)
    seen = original(theirs, keys, values)
    if not ours.is_initialized:
        ours.lazy_initialization(keys, values)
    written = _write(ours, form, keys, values, cache_update)
    if seen[0] is not theirs.keys or seen[1] is not theirs.values or written[0] is not ours.keys:
        return False
    both = [(vars(theirs)[name], vars(ours).get(name)) for name in vars(theirs)]
    return len(vars(theirs)) == len(vars(ours)) and all(_same(*pair) for pair in both)


def _same(seen: Any, other: Any) -> bool:
    if isinstance(seen, torch.Tensor):
        return isinstance(other, torch.Tensor) and seen.dtype == other.dtype and torch.equal(seen, other)
    return bool(seen == other)


class _Layers:
    """The method ``update`` of the static layers of transformers, replaced until `remove`."""

    def __init__(self, placed: tuple[Override, str]) -> None:
        self.override, self.key = placed
        module = sys.modules[self.override.module]
        base = getattr(module, "StaticLayer", None)
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and base and issubclass(kind, base)]
        self._adapted: dict[type, tuple[Any, Any]] = {}
        for kind in kinds:
            original = kind.__dict__.get(self.override.name)
            if isinstance(original, FunctionType):
                self._adapted[kind] = (original, _adapter(original, kind))
                setattr(kind, self.override.name, self._adapted[kind][1])

    @property
    def title(self) -> str:
        return f"{self.override.name} of {len(self._adapted)} static caches" if self._adapted else ""

    def remove(self) -> None:
        """Give each class its own method back, unless another library has replaced it since."""
        for kind, (original, replacement) in self._adapted.items():
            if kind.__dict__.get(self.override.name) is replacement:
                setattr(kind, self.override.name, original)
        self._adapted.clear()


OVERRIDES = (Override("update", _OP, (CLASSES,), _Layers, _MODULE),)
