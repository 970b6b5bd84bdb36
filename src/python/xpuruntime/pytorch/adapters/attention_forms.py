# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The form of functions ``eager_attention_forward`` of models, recognized by what they compute."""

from __future__ import annotations

import functools
import inspect
import math
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from xpuruntime.pytorch.dispatch.context import in_clean_thread

#: What the modules of transformers call their function.
NAME = "eager_attention_forward"
_FIRST = ("module", "query", "key", "value", "attention_mask")
_CLOSE = 1e-5


def eager_function(kind: type) -> FunctionType | None:
    """Return the function that a class of attention calls, from the module that defines the class or one it extends."""
    for base in kind.__mro__:
        forward = inspect.unwrap(base.__dict__.get("forward", len))
        function = getattr(forward, "__globals__", {}).get(NAME)
        if isinstance(function, FunctionType):
            original: FunctionType = inspect.unwrap(function)
            return original
    return None


@functools.lru_cache(maxsize=1024)
def form_of(function: FunctionType) -> str:
    """Return ``"grouped"`` for plain attention whose heads may share keys, ``"plain"`` where they do not, or ``""``.

    It is compared in float32 with and without a mask, as products and a softmax round in ways of their own.
    """
    code = function.__code__
    if code.co_varnames[: min(len(_FIRST), code.co_argcount)] != _FIRST:
        return ""
    agreeing = (name for name, heads in (("grouped", 2), ("plain", 4)) if in_clean_thread(_agrees, function, heads))
    return next(agreeing, "")


def _agrees(function: FunctionType, heads: int) -> bool:
    q, k, v = (_numbers((1, count, 5, 8), at) for at, count in enumerate((4, heads, heads)))
    hidden = torch.full((1, 1, 5, 5), torch.finfo(torch.float32).min, device="cpu").triu(1)
    stand_in: Any = SimpleNamespace(num_key_value_groups=4 // heads, training=False, is_causal=True)
    for mask in (hidden, None):
        scores = q @ k.repeat_interleave(4 // heads, 1).mT * 0.3 + (0.0 if mask is None else mask)
        expected = (scores.softmax(-1) @ v.repeat_interleave(4 // heads, 1)).transpose(1, 2)
        try:
            out, _ = function(stand_in, q, k, v, mask, scaling=0.3, dropout=0.0)
        except Exception:  # it reads more of its module, such as sinks
            return False
        if out.shape != expected.shape or float((out - expected).abs().max()) > _CLOSE:
            return False
    return True


def _numbers(shape: tuple[int, ...], at: int) -> torch.Tensor:
    count = torch.arange(math.prod(shape), dtype=torch.float32, device="cpu")
    return torch.sin(count * count * 0.31 + at).view(shape) * 2
