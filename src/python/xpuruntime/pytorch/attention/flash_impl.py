# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention that PyTorch names by itself: its registry of flash attention, and flex_attention's choices."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.errors import UnsupportedOperationError, warn
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention.call import AttentionCall
from xpuruntime.pytorch.attention.selection import xrt_rejection
from xpuruntime.pytorch.dispatch.context import CONTEXT, call_key
from xpuruntime.pytorch.dispatch.overrides.native import Native
from xpuruntime.pytorch.dispatch.overrides.registry import quiet_override_warning
from xpuruntime.pytorch.ops.attention_operator import run_backward, run_forward

if TYPE_CHECKING:
    from torch import Tensor

#: What serves.
KERNEL = "cuda_raw.flash_attention_v2"
_FORWARD = "_scaled_dot_product_flash_attention"
_BACKWARD = "_scaled_dot_product_flash_attention_backward"
_RANDOM_BOUND = 1 << 62


def register_flash_attention() -> None:
    """Add ``"xpuruntime"`` to PyTorch's registry of flash attention; there it stays, and does nothing until activated.

    Then ``torch.nn.attention.activate_flash_attention_impl("xpuruntime")`` has `KERNEL` stand in for PyTorch's
    FlashAttention 2 on CUDA, without any policy. Idempotent.
    """
    if "xpuruntime" not in torch.nn.attention.list_flash_attention_impls():
        torch.nn.attention.register_flash_attention_impl("xpuruntime", register_fn=FlashAttentionImpl)


class FlashAttentionImpl:
    """Our kernel in place of PyTorch's FlashAttention 2, from when it is made until `remove`."""

    def __init__(self, kernel: str = KERNEL, key: str = "CUDA") -> None:
        if key == "CUDA" and not torch.backends.cuda.is_built():
            msg = f"{kernel} cannot stand in for PyTorch's FlashAttention: this PyTorch is built without CUDA"
            raise UnsupportedOperationError(f"{msg}. Fix: install one that has it", engine="torch")
        quiet_override_warning()
        self.kernel = kernel
        self._forward = Native(_FORWARD, key, self._again)
        self._backward = Native(_BACKWARD, key, self._again)
        self._key = key
        self._refusals: dict[Any, str] = {}
        self._said: set[str] = set()
        self._library: Any = None
        self._place()

    def _place(self) -> None:
        library = torch.library.Library("aten", "IMPL")
        library.impl(_FORWARD, self.forward, self._key, with_keyset=True, allow_override=True)
        library.impl(_BACKWARD, self.backward, self._key, with_keyset=True, allow_override=True)
        self._library = library

    def _again(self, native: Native) -> None:
        self.remove()
        native.take()
        self._place()

    def remove(self) -> None:
        """Give PyTorch its own back. Idempotent."""
        library, self._library = self._library, None
        if library is not None:
            _private_api.remove_library(library)

    def _refusal(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool) -> str:
        """Return why forward and backward of a call are left to PyTorch; the same for both."""
        exact = torch.are_deterministic_algorithms_enabled()
        key = (call_key("flash", q, k, v), dropout_p > 0, is_causal, exact)
        refusal = self._refusals.get(key)
        if refusal is None:
            call = AttentionCall(q, k, v, dropout_p=dropout_p, is_causal=is_causal, needs_grad=True)
            refusal = xrt_rejection(self.kernel, call, exact)
            self._refusals[key] = refusal
            if refusal and refusal not in self._said:
                self._said.add(refusal)
                msg = f"{call} runs by PyTorch's FlashAttention 2, not by {self.kernel}: {refusal}"
                warn(msg)
        return refusal

    def forward(
        self,
        keyset: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        """Serve ``aten::_scaled_dot_product_flash_attention``."""
        if return_debug_mask or self._refusal(query, key, value, dropout_p, is_causal):
            return self._forward(
                keyset, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
            )  # fmt: skip
        device = query.device
        rng = None
        if dropout_p > 0:
            rng = torch.randint(0, _RANDOM_BOUND, (2,), dtype=torch.int64, device=device)
        out, lse = run_forward(
            query, key, value, None, rng, dropout_p, is_causal, scale, self.kernel, True, "train", ""
        )  # fmt: skip
        state = torch.empty((2,), dtype=torch.uint64, device=device) if rng is None else rng.view(torch.uint64)
        unused = torch.empty((), dtype=torch.uint64, device=device)
        mask = torch.empty((0,), dtype=query.dtype, device=device)
        return out, lse, None, None, query.shape[2], key.shape[2], state, unused, mask

    def backward(
        self,
        keyset: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        cum_seq_q: Any,
        cum_seq_k: Any,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> Any:
        """Serve ``aten::_scaled_dot_product_flash_attention_backward``."""
        if self._refusal(query, key, value, dropout_p, is_causal):
            return self._backward(
                keyset, grad_out, query, key, value, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                is_causal, philox_seed, philox_offset, scale=scale,
            )  # fmt: skip
        rng = philox_seed.view(torch.int64) if dropout_p > 0 else None
        return run_backward(
            grad_out, query, key, value, out, lse, None, rng, dropout_p, is_causal, scale, self.kernel, ""
        )


class FlexChoice(NamedTuple):
    """What was chosen while code was compiled, for `explain` to tell when that code runs."""

    kernel: str
    asked: tuple[str, ...]
    source: str
    status: str
    reason: str
    module: str


_lock = threading.Lock()
#: Choices that are kept; with one more, all are forgotten.
_MOST = 4096


def note(choice: FlexChoice) -> None:
    """Keep what was chosen for code that may run from now on."""
    with _lock:
        if len(CONTEXT.flex_choices) >= _MOST:
            CONTEXT.flex_choices.clear()
        CONTEXT.flex_choices[CONTEXT.compiled_for, choice] = None


def forget() -> None:
    """Forget all, since all code is dropped."""
    with _lock:
        CONTEXT.flex_choices.clear()


def choices(module: str) -> tuple[FlexChoice, ...]:
    """Return the active policy's choice for code inside a module, or for all code where it has none there."""
    with _lock:
        every = tuple(choice for key, choice in CONTEXT.flex_choices if key == CONTEXT.compiled_for)
    inside = tuple(choice for choice in every if choice.module == module or choice.module.startswith(f"{module}."))
    return inside if module and inside else every
