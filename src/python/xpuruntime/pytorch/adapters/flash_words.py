# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention of transformers by ``flash_attention_2`` and its kin: led to ``scaled_dot_product_attention``.

The function of the model's own word is replaced, so that its masks stay those of that word: none, or lengths.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.adapters.eager_attention import asks_for_kernel
from xpuruntime.pytorch.adapters.in_place import UNUSUAL, is_usual, run_original
from xpuruntime.pytorch.coverage.gaps import CoverageGap, report_gaps
from xpuruntime.pytorch.coverage.operation_table import FLASH_WORDS, title_of
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.dispatch.overrides.native import CLASSES, Override

if TYPE_CHECKING:
    from torch import Tensor

#: Arguments that change what is computed.
_CHANGES = ("softcap", "s_aux", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cache")
_UNKNOWN = "it is called with more than queries, keys and values of one length for all sequences"
_CASTS = "it casts its operands, which are in float32"
_COMPILED = "attention by this word is compiled with the kernels of its package"
_FIX = "load the model with attn_implementation='sdpa', or leave attention out of the policy"
_MODULE = "transformers.modeling_utils"


def _adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def report(kind: type, dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
        active = active_policy()
        if active is not None and asks_for_kernel(dtype, device, head_dim):
            report_gaps([CoverageGap("attention", title_of(kind), _COMPILED, _FIX)], active)
        return False

    _private_api.mark_constant(report)

    @functools.wraps(original)
    def flash_attention_forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        facts = (query.dtype, query.device, query.shape[-1])
        if torch.compiler.is_compiling():
            report(type(module), *facts)
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        if not asks_for_kernel(*facts):
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        why = _rejection(query, key, value, attention_mask, kwargs) if len(args) == 0 else _UNKNOWN
        if why:
            run = functools.partial(original, **kwargs)
            operands = (module, query, key, value, attention_mask, *args)
            return run_original("attention", original, run, operands, query, why)
        stated = kwargs.get("is_causal")
        causal = bool(module.is_causal if stated is None else stated) and query.shape[2] > 1
        mask = None
        if (
            causal and query.shape[2] != key.shape[2]
        ):  # its causal mask ends at the last key, and PyTorch's at the first
            seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
            mask, causal = seen.tril(key.shape[2] - query.shape[2]), False
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=kwargs.get("dropout", 0.0), is_causal=causal,
            scale=kwargs.get("scaling"), enable_gqa=key.shape[1] != query.shape[1],
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    return flash_attention_forward


def _rejection(query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]) -> str:
    """Return why ``scaled_dot_product_attention`` would compute something else; empty where it would not."""
    if not is_usual(query, key, value):
        return UNUSUAL
    window = kwargs.get("sliding_window")
    if mask is not None or any(kwargs.get(name) is not None for name in _CHANGES):
        return _UNKNOWN
    if window is not None and key.shape[2] > window:
        return _UNKNOWN
    positions = kwargs.get("position_ids")
    if positions is not None and query.shape[0] == 1 and positions.shape[-1] > 1:  # which may begin anew inside
        steps = positions[..., 1:] - positions[..., :-1]
        if not bool((steps == 1).all()):
            return _UNKNOWN
    return _CASTS if query.dtype == torch.float32 and query.device.type == "cuda" else ""


class _Words:
    """The functions of these words in the table of transformers, replaced until `remove`."""

    def __init__(self, placed: tuple[Override, str]) -> None:
        self.override, self.key = placed
        self._table: Any = sys.modules[_MODULE].ALL_ATTENTION_FUNCTIONS
        self._replacements = {word: _adapter(self._table[word]) for word in FLASH_WORDS if word in self._table}
        for word, replacement in self._replacements.items():
            self._table[word] = replacement

    @property
    def title(self) -> str:
        return f"{', '.join(self._replacements)} of transformers"

    def remove(self) -> None:
        """Give transformers its own back, unless another library has replaced it since."""
        for word, replacement in self._replacements.items():
            if self._table[word] is replacement:
                del self._table[word]
                original = replacement.__wrapped__
                if self._table.get(word) is not original:  # which was in the part of the table that replaces others
                    self._table[word] = original


OVERRIDES = (Override("flash_words", "attention", (CLASSES,), _Words, _MODULE, "eager_attention"),)
