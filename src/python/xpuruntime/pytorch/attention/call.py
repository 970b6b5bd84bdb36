# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`AttentionCall`: one call of attention in PyTorch, and the function that it entered by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.ops.call_context import kernel_ids, prepare
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention.sdpa_backends import static_size
from xpuruntime.pytorch.dispatch.context import DTYPES
from xpuruntime.pytorch.dispatch.route import DEFAULT_ID, NATIVE_NAMES, Route, facts_of_call

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.policies.call_facts import CallFacts


class Arguments(NamedTuple):
    """Those of ``scaled_dot_product_attention`` in one call, as the caller gave them."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


class AttentionCall(NamedTuple):
    """One call: its `Arguments`, and what else a route depends on."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    needs_grad: bool = False
    unfit: str = ""
    backward: bool = False
    phase: str = ""
    module: str = ""

    def __str__(self) -> str:
        sizes = ", ".join(map(str, map(sizes_of, (self.q, self.k, self.v))))
        extras = [name for name, there in (("causal", self.is_causal), ("mask", self.mask is not None)) if there]
        if self.dropout_p > 0:
            extras.append("dropout")
        what = "the gradient of attention" if self.backward else "attention"
        with_ = f" with {' and '.join(extras)}" if extras else ""
        return f"{what} of {sizes} {DTYPES.get(self.q.dtype, self.q.dtype)}{with_} on {self.q.device}"

    def facts(self) -> CallFacts:
        """Return the facts that rules ask for."""
        queries, keys = sizes_of(self.q), sizes_of(self.k)
        return facts_of_call(
            "attention", device=self.q.device, dtype=self.q.dtype, phase=phase_of(self.phase, queries[-2], keys[-2]),
            module=self.module, sizes={"head_dim": queries[-1], "kv": keys[-2]},
        )  # fmt: skip


def phase_of(phase: str, queries: int, keys: int) -> str:
    """Return the phase of an attention, from that of the call: an inference of one query over more keys decodes."""
    return "decode" if phase == "infer" and queries == 1 < keys else phase


def last_of_range(length: int) -> int:
    """Return the last length of the range that tells kinds of calls apart: the next power of two."""
    return 1 << (length - 1).bit_length() if length > 0 else length


def sizes_of(x: Tensor) -> list[int]:
    """Return the sizes of a tensor as numbers; 0 for one in which the parts of a nested tensor differ."""
    if not (x.is_nested and x.layout is torch.strided):
        return [static_size(n) for n in x.shape]
    parts = _private_api.nested_sizes(x).tolist()  # such a tensor has no shape
    return [len(parts), *(sizes[0] if len(set(sizes)) == 1 else 0 for sizes in zip(*parts, strict=True))]


def added_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Return a boolean mask as numbers that are added to scores, in the type of `like`.

    Of a mask that repeats its rows in memory, as an expanded one does, each is made once: they broadcast as well.
    """
    for dim, (size, step) in enumerate(zip(mask.shape[:-1], mask.stride(), strict=False)):
        if type(step) is int and step == 0 and size != 0:
            mask = mask.narrow(dim, 0, 1)
    return torch.where(mask, like.new_zeros(()), like.new_full((), -torch.inf))


def traits(x: Tensor | None) -> Any:
    """Return what a kernel depends on of a tensor, for the key of a route, also where sizes are symbols."""
    if x is None:
        return None
    if x.is_nested or x.layout is not torch.strided:  # what a kernel depends on is PyTorch's alone
        return (x.dtype, x.device, x.layout, x.dim())
    return (x.dtype, x.device, _sizes(x.shape), _sizes(x.stride()))


def _sizes(sizes: Any) -> Any:
    """Return sizes as what a key can hold; a symbol, which stands for any, is apart from the number of the example."""
    for n in sizes:
        if type(n) is not int:
            return tuple(n if type(n) is int else (static_size(n),) for n in sizes)
    return sizes


class EntryPoint(NamedTuple):
    """A function of PyTorch's that has kernels of its own, beside others of the same operation."""

    name: str
    kernel_names: Mapping[str, str]
    default: str
    no_xrt_kernel: str
    op: str = "attention"

    def rejection(self, kernel_name: str) -> str:
        """Return why a name means no kernel of this function; empty where an xpuruntime kernel may serve."""
        if kernel_name == "auto" or kernel_name in self.kernel_names:
            return ""
        others = [entry.name for entry in _ENTRIES if entry.name != self.name and kernel_name in entry.kernel_names]
        if others:
            return f"it is a kernel of {' and '.join(others)}, and this is {self.name}"
        if not self.no_xrt_kernel:
            return ""
        prepare()
        known = kernel_ids(self.op, kernel_name.partition("@")[0])
        return self.no_xrt_kernel if known else f"{self.name} has no such kernel"


SDPA = EntryPoint("scaled_dot_product_attention", NATIVE_NAMES["attention"], DEFAULT_ID["attention"], "")
FLEX = EntryPoint(
    "flex_attention",
    {
        "torch": "torch.flex",
        "inductor": "torch.flex",
        "torch.sdpa": "torch.flex",
        "torch.flex": "torch.flex",
        "torch.flex_triton": "torch.flex_triton",
        "torch.flex_decode": "torch.flex_decode",
        "torch.flex_flash": "torch.flex_flash",
        "math": "torch.math",
        "torch.math": "torch.math",
    },
    "torch.flex",
    "flex_attention stays PyTorch's because score_mod and mask_mod are compiled into its kernel, and this one takes "
    "neither",
)
VARLEN = EntryPoint(
    "varlen_attn",
    {
        "torch": "torch.varlen",
        "inductor": "torch.varlen",
        "torch.sdpa": "torch.varlen",
        "torch.varlen": "torch.varlen",
        "flash_v2": "torch.flash",
        "torch.flash": "torch.flash",
        "flash_v3": "flash_v3",
        "fa3": "flash_v3",
        "cudnn": "torch.cudnn",
        "torch.cudnn": "torch.cudnn",
    },
    "torch.varlen",
    "varlen_attn stays PyTorch's because this one has no form for sequences that are packed into one tensor",
)
_ENTRIES = (SDPA, FLEX, VARLEN)
WITH_WEIGHTS = EntryPoint(
    "nn.MultiheadAttention with need_weights=True",
    dict.fromkeys(("torch", "torch.sdpa", "math", "torch.math"), "torch.math"),
    "torch.math",
    "it multiplies and takes a softmax, so that it can return the weights; state need_weights=False",
)
FAST_PATH = EntryPoint(
    "the fast path of nn.MultiheadAttention",
    dict.fromkeys(("torch", "torch.sdpa"), "torch.mha"),
    "torch.mha",
    "it has an attention of its own; torch.backends.mha.set_fastpath_enabled(False) turns it off",
)


def left(entry: EntryPoint, kernel: str = "") -> Route:
    """Return the route of a call that no policy speaks of, by `kernel` where that is known."""
    return Route("attention", ("auto",), "default", kernel or entry.default)
