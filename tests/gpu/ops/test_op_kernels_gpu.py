# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One list of op cases, every kernel for CUDA, on PyTorch tensors."""

from __future__ import annotations

from xpuruntime.testing import OpSuite, TorchArrays
from xpuruntime.testing.op_arrays import Arrays
from xpuruntime.testing.op_suite import op_cases

_FP64 = "it has no float64"
_NARROW = "it has float16 and bfloat16"
_ROWS = "the columns of a matrix must lie next to each other"
_CONV_TYPES = ("float32", "float16", "bfloat16")
#: cuDNN 9.19 refuses the first three on an H200; another version may take them.
_CONV_MAY_REFUSE = {
    f"conv/{what}/{dtype}": reason
    for dtype in _CONV_TYPES
    for what, reason in {
        "relu": "in channels first its ready-made engines fuse ReLU with a bias only",
        "bias-silu": "in channels first its ready-made engines fuse no SiLU",
        "bias-gelu": "in channels first its ready-made engines fuse no GELU",
        "channels-last-relu": "engines that it compiles while running fuse this, which not every installation has",
        "channels-last-bias-silu": "engines that it compiles while running fuse this, which not every installation has",
        "channels-last-bias-gelu": "engines that it compiles while running fuse this, which not every installation has",
    }.items()
} | {
    f"conv_{of}_gradient/{what}/{dtype}": reason
    for of in ("input", "weight")
    for dtype in _CONV_TYPES
    for what, reason in {
        "uneven-padding": "not every engine for gradients pads the two sides by different numbers",
        "wide-padding": "not every engine for gradients pads by more than the kernel is wide",
        "rows-apart": "not every engine for gradients reads rows that lie apart",
        "columns-apart": "not every engine for gradients reads pixels that lie apart",
    }.items()
}
_CONV_UNSUPPORTED = {
    "conv*/*/float64": _FP64,
    **{f"conv_weight_gradient/no-image/{dtype}": "it serves no empty operand" for dtype in _CONV_TYPES},
}


class OnCuda(OpSuite):
    __test__ = False

    @classmethod
    def arrays(cls) -> Arrays:
        return TorchArrays("cuda")


class TestCublasLt(OnCuda):
    __test__ = True
    kernel = "cublas.cublasLt"
    unsupported = {  # noqa: RUF012 - overrides a ClassVar
        "matmul/out-transposed/*": _ROWS,
        "matmul/columns-apart/*": _ROWS,
        "matmul/repeated-row/*": "rows must not overlap",
        "matmul/gelu/*": "its GELU is the one by tanh",
        "matmul/bias-gelu/*": "its GELU is the one by tanh",
        "matmul/gelu-far-out/*": "its GELU is the one by tanh",
        "matmul/gelu-tanh/float64": "its GELU is not exact in float64",
        "matmul/bias-gelu-tanh/float64": "its GELU is not exact in float64",
        "matmul/silu/*": "it has no SiLU",
        "matmul/bias-silu-odd/*": "it has no SiLU",
        "matmul/bias-gelu-tanh-to-float32/*": "its bias has the dtype of the result",
        "matmul/fp8-odd/*": "float8 is multiplied along contiguous k alone",
    }


class TestCublas(OnCuda):
    __test__ = True
    kernel = "cublas.cublas"
    unsupported = {  # noqa: RUF012
        "matmul/*/float8_e4m3fn": "it has no float8",
        "matmul/out-transposed/*": _ROWS,
        "matmul/columns-apart/*": _ROWS,
        "matmul/repeated-row/*": "rows must not overlap",
        "matmul/*bias*": "it adds no bias",
        "matmul/relu/*": "it has no activation",
        "matmul/gelu*": "it has no activation",
        "matmul/silu/*": "it has no activation",
    }


class TestSkinny(OnCuda):
    __test__ = True
    kernel = "cuda_raw.skinny"
    unsupported = {  # noqa: RUF012
        "matmul/*/float64": _NARROW,
        "matmul/*/float32": _NARROW,
        "matmul/*/float8_e4m3fn": _NARROW,
        "matmul/*-to-float32/*": "the result has the dtype of the inputs",
        "matmul/primes/*": "it serves at most 64 rows",
        "matmul/one-more-than-a-tile/*": "it serves at most 64 rows",
        "matmul/a-transposed/*": _ROWS,
        "matmul/both-transposed/*": _ROWS,
        "matmul/out-transposed/*": _ROWS,
        "matmul/columns-apart/*": _ROWS,
        "matmul/repeated-row/*": "rows must not overlap",
    }


class TestLayerNorm(OnCuda):
    __test__ = True
    kernel = "cuda_raw.layer_norm"
    unsupported = {"*/float64": _FP64, "*/columns-apart/*": _ROWS, "*/transposed/*": _ROWS}  # noqa: RUF012


class TestRmsNorm(OnCuda):
    __test__ = True
    kernel = "cuda_raw.rms_norm"
    unsupported = {"*/float64": _FP64, "*/columns-apart/*": _ROWS, "*/transposed/*": _ROWS}  # noqa: RUF012


class TestFlashAttention(OnCuda):
    __test__ = True
    kernel = "cuda_raw.flash_attention_v2"
    unsupported = {  # noqa: RUF012
        "*/float64": _NARROW,
        "*/float32": _NARROW,
        "*/head-dim-13/*": "head_dim must be a multiple of 8",
        "*/columns-apart/*": "the last dimension must be contiguous",
    }


class TestCudnnAttention(OnCuda):
    __test__ = True
    kernel = "cudnn.sdpa"
    other_random_numbers = True
    unsupported = {  # noqa: RUF012
        "*/float64": _NARROW,
        "*/float32": _NARROW,
        "*/head-dim-13/*": "head_dim must be a multiple of 8",
        "*/columns-apart/*": "the last dimension must be contiguous",
        "*/causal-bottom-right-more-queries/*": "rows that see nothing",
        "*/bool-mask*": "its masks are added",
        "*/mask-and-causal/*": "its masks are added",
        "*/grouped-mask/*": "its masks are added",
        "*/no-key/*": "it serves no empty operand",
        "attention_backward/no-query/*": "it serves no empty operand",
        "attention_backward/one/*": "cuDNN has no gradient for one query and one key",
        "attention_backward/one-query/*": "its gradients for one query may be NaN, as an advisory says",
        "attention_backward/decoding/*": "its gradients for one query may be NaN, as an advisory says",
    }


class TestCudnnConvHeuristic(OnCuda):
    __test__ = True
    kernel = "cudnn.conv_heuristic"
    unsupported = _CONV_UNSUPPORTED
    may_refuse = _CONV_MAY_REFUSE


class TestCudnnConvDefault(OnCuda):
    __test__ = True
    kernel = "cudnn.conv_default"
    unsupported = _CONV_UNSUPPORTED
    may_refuse = _CONV_MAY_REFUSE


class TestCudnnConvExhaustive(OnCuda):
    __test__ = True
    kernel = "cudnn.conv_exhaustive"
    unsupported = _CONV_UNSUPPORTED
    may_refuse = _CONV_MAY_REFUSE


class TestDepthwiseConv(OnCuda):
    __test__ = True
    kernel = "cuda_raw.depthwise_conv"
    unsupported = {  # noqa: RUF012
        "conv/*/float64": _FP64,
        **{
            case.name: "it has one filter for each channel"
            for case in op_cases()
            if case.op == "conv" and "/depthwise/" not in case.name and not case.name.endswith("/float64")
        },
    }
