# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels and operators that no override sees: the operation that each belongs to, and why it is not covered."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from xpuruntime.pytorch.coverage.unserved import RECURRENT

__all__ = ["FLEX", "NOT_REACHED", "UncoveredKernel", "decomposed_operator", "uncovered_kernel", "uncovered_operator"]


class UncoveredKernel(NamedTuple):
    """An operation that ran by a kernel that no policy chose.

    Attributes
    ----------
    op : str
        Operation of a `KernelPolicy`.
    reason : str
    """

    op: str
    reason: str


_RECURRENT = "recurrent layers run by kernels of their own, inside which no product can be chosen"
_FAST_PATH = (
    "the fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer runs kernels of its own; "
    "torch.backends.mha.set_fastpath_enabled(False) turns it off"
)
NOT_REACHED = "it reached PyTorch's kernel without passing an override"
_NO_OVERRIDE = "no override takes this operator"
_TRITON = "torch.compile made a kernel of its own, which PyTorch's dispatcher does not see"
_TEMPLATE = (
    "torch.compile chose a kernel of its own by max_autotune; torch._inductor.config.max_autotune_gemm_backends = "
    "'ATEN' leaves the choice to the policy"
)
FLEX = "flex_attention is compiled, and was when no policy chose its kernel"
_DIRECT = "launched without PyTorch's dispatcher, as by cpp_wrapper, AOTInductor or a library's own code"

_RECURRENT_OPERATORS = frozenset((*(one.name for one in RECURRENT), "miopen_rnn"))
#: Operators by name without namespace, and how they escape where nothing else is known.
_OPERATORS: dict[str, UncoveredKernel] = {
    **{name: UncoveredKernel("matmul", _RECURRENT) for name in _RECURRENT_OPERATORS},
    "_native_multi_head_attention": UncoveredKernel("attention", _FAST_PATH),
    "_triton_multi_head_attention": UncoveredKernel("attention", _FAST_PATH),
    **{name: UncoveredKernel("matmul", NOT_REACHED) for name in ("mm", "addmm", "bmm", "baddbmm")},
    **{
        name: UncoveredKernel("attention", NOT_REACHED)
        for name in (
            "scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_cudnn_attention_backward", "_scaled_dot_product_attention_math",
        )
    },
    **{name: UncoveredKernel("layer_norm", NOT_REACHED)
       for name in ("native_layer_norm", "native_layer_norm_backward")},
    **{name: UncoveredKernel("conv", NOT_REACHED) for name in ("convolution", "convolution_backward")},
    **{
        name: UncoveredKernel("matmul", _NO_OVERRIDE)
        for name in (
            "mv", "addmv", "addmv_", "addbmm", "addbmm_", "_int_mm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm",
            "_scaled_grouped_mm", "_addmm_activation", "_weight_int4pack_mm", "_weight_int8pack_mm", "mkldnn_linear",
            "_mkl_linear", "_linear_pointwise",
        )
    },
    **{
        name: UncoveredKernel("attention", _NO_OVERRIDE)
        for name in ("_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward",
                     "_efficient_attention_backward", "_cudnn_attention_forward", "_cudnn_attention_backward")
    },
    **{
        name: UncoveredKernel("conv", _NO_OVERRIDE)
        for name in (
            "cudnn_convolution", "cudnn_convolution_transpose", "cudnn_convolution_relu",
            "cudnn_convolution_add_relu", "mkldnn_convolution", "_slow_conv2d_forward", "_slow_conv2d_backward",
            "slow_conv3d_forward", "_conv_depthwise2d", "conv_depthwise3d", "thnn_conv2d", "slow_conv_transpose2d",
            "slow_conv_dilated2d", "_convolution_pointwise", "_nnpack_spatial_convolution", "miopen_convolution",
        )
    },
    **{name: UncoveredKernel("rms_norm", _NO_OVERRIDE)
       for name in ("_fused_rms_norm", "_fused_rms_norm_backward", "rms_norm")},
}  # fmt: skip

#: What the name of a kernel means; the first that fits.
_KERNELS: tuple[tuple[re.Pattern[str], UncoveredKernel], ...] = tuple(
    (re.compile(pattern), UncoveredKernel(op, reason))
    for pattern, op, reason in (
        (r"^triton_.*flex_(attention|decod)", "attention", FLEX),
        (r"(?i)cute.*flash|flash.*cute", "attention", FLEX),
        (r"^triton_tem_.*conv", "conv", _TEMPLATE),
        (r"^(triton_tem_|triton_mm|.*_cutlass_fused)", "matmul", _TEMPLATE),
        (r"^(triton_.*|.*cpp_fused_.*)native_layer_norm", "layer_norm", _TRITON),
        (r"^(triton_.*|.*cpp_fused_.*)rms_norm", "rms_norm", _TRITON),
        (r"^(triton_|.*cpp_fused_)", "", ""),
        (r"(?i)flash_(fwd|bwd|attn|forward|backward)|fmha|sdpa|attention", "attention", _DIRECT),
        (r"(?i)layer_?norm", "layer_norm", _DIRECT),
        (r"(?i)rms_?norm", "rms_norm", _DIRECT),
        (r"(?i)implicit_gemm|convolve|conv\dd|fprop|dgrad|wgrad|winograd", "conv", _DIRECT),
        (r"(?i)gemm|gemv|nvjet|cutlass.*tensorop|splitKreduce", "matmul", _DIRECT),
    )
)


def uncovered_operator(name: str) -> UncoveredKernel | None:
    """Return what an operator that passed no override computes; ``None`` where no policy can speak of it.

    Parameters
    ----------
    name : str
        As the profiler has it: ``"aten::mm"``.
    """
    namespace, _, short = name.rpartition("::")
    if namespace not in ("aten", "mkldnn", "mkl", "torch_attn"):
        return None
    return _overridden().get(short) or _OPERATORS.get(short)


def decomposed_operator(name: str) -> UncoveredKernel | None:
    """Return the operation to which a transform of ``torch.func`` may lead an operator that no policy can speak of."""
    return UncoveredKernel("matmul", NOT_REACHED) if name in ("aten::dot", "aten::vdot") else None


@lru_cache(maxsize=4096)
def uncovered_kernel(name: str) -> UncoveredKernel | None:
    """Return what a kernel computes that no operator of PyTorch's launched, as far as its name shows."""
    for pattern, uncovered in _KERNELS:
        if pattern.search(name):
            return uncovered if uncovered.op else None
    return None


@lru_cache(maxsize=1)
def _overridden() -> dict[str, UncoveredKernel]:
    from xpuruntime.pytorch.dispatch.overrides.registry import RUNNING, overrides_of

    # Those of recurrent layers only say that a policy does not reach into them.
    names = ((one.name.partition("::")[2] or one.name, one.op) for group in RUNNING for one in overrides_of(group))
    short = ((name.partition(".")[0], op) for name, op in names)
    return {name: UncoveredKernel(op, NOT_REACHED) for name, op in short if name not in _RECURRENT_OPERATORS}
