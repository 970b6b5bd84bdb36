# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`EntryPoint`: a function of PyTorch that has kernels of its own, and the kernel names that mean one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.ops.call_context import kernel_ids, prepare
from xpuruntime.pytorch.dispatch.route import DEFAULT_ID, NATIVE_NAMES, Route

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAST_PATH", "FLEX", "SDPA", "VARLEN", "WITH_WEIGHTS", "EntryPoint", "left"]


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
