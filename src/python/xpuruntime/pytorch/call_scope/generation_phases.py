# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Phases of generation: ``"prefill"`` and ``"decode"``, the parts of inference in a model that keeps keys and values.

A forward of a model of transformers that is called with a cache is one of the two: it decodes where it has one query a
row, and the cache holds something. All that runs in it is of that phase. Other models have no common form in which they
take a cache, so that of those the attention alone tells, by its sizes; see `attention.call.phase_of`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from xpuruntime import _core
from xpuruntime.pytorch.call_scope import generation_calls
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import CONTEXT
from xpuruntime.pytorch.import_hook import WhenImported

#: Modules of transformers to what each has, and what follows that.
_MODULES = {"transformers.modeling_utils": "PreTrainedModel", "transformers.generation.utils": "GenerationMixin"}
#: Arguments that hold the queries of a forward, those of a decoder first.
_QUERIES = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")

_lock = threading.Lock()
_undo: list[Callable[[], None]] = []
#: Caches whose length is on a device, which was asked once.
_asked: weakref.WeakSet[Any] = weakref.WeakSet()


class _Running(threading.local):
    """Whether a forward runs in this thread, and whether one whose phase is known."""

    inside = False
    value = False


_running = _Running()


def require() -> None:
    """Follow the forwards of models of transformers; each call is undone by one `release`."""
    with _lock:
        CONTEXT.users["generation_phases"] += 1
        if CONTEXT.users["generation_phases"] == 1:
            for name, attribute in _MODULES.items():
                if hasattr(sys.modules.get(name), attribute):
                    _follow(sys.modules[name])
                else:
                    _undo.append(WhenImported(name, _follow).remove)


def release() -> None:
    """Undo one `require`."""
    with _lock:
        CONTEXT.users["generation_phases"] -= 1
        if CONTEXT.users["generation_phases"] == 0:
            while _undo:
                _undo.pop()()


def _follow(module: Any) -> None:
    if not hasattr(module, "PreTrainedModel"):
        generation_calls.follow_generation(module, _undo)
        return
    owner = module.PreTrainedModel

    def call(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        run = super(owner, model).__call__
        if torch.compiler.is_dynamo_compiling() or _running.value:
            return run(*args, **kwargs)
        cache = _cache_of(kwargs)
        phase = _phase_of(args, kwargs, cache)
        if phase:
            generation_calls.forward(model, cache, phase)
            before = _core.set_generation_phase(phase)
        inside, _running.inside, _running.value = _running.inside, True, bool(phase)
        try:
            result = run(*args, **kwargs)
        finally:
            _running.inside, _running.value = inside, False
            if phase:
                _core.set_generation_phase(before)
        if not inside:
            generation_calls.after_forward(model)
        return result

    def remove() -> None:
        if vars(owner).get("__call__") is call:
            del owner.__call__

    owner.__call__ = call
    _undo.append(remove)
    generation_calls.follow_models(owner, _undo)


def _cache_of(kwargs: Mapping[str, Any]) -> Any:
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def _phase_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], cache: Any) -> str:
    if cache is None:
        return "prefill" if kwargs.get("use_cache") is True else ""
    if not hasattr(cache, "get_seq_length"):
        return ""
    queries = next((kwargs[name] for name in _QUERIES if kwargs.get(name) is not None), args[0] if args else None)
    if not isinstance(queries, torch.Tensor) or queries.dim() < 2:
        return ""
    return "decode" if queries.shape[1] == 1 and _holds_something(cache) else "prefill"


def _holds_something(cache: Any) -> bool:
    if cache in _asked or context.capturing():
        return True
    length = cache.get_seq_length()
    if isinstance(length, torch.Tensor):
        _asked.add(cache)  # the program would wait for a device at each token
    return bool(length > 0)
