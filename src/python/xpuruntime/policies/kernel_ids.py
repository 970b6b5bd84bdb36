# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The words a kernel policy may use.

A kernel id is `backend.name`, such as ``cuda_raw.flash_attention_v2``; `backend.name@config` replays exactly what a
decision called the configuration of that kernel, such as an algorithm of a library. A bare word is a family: every
engine maps it to what it has under that idea. Plugins define further ids under their own backend name; families are
fixed here.
"""

from __future__ import annotations

import re

from xpuruntime.policies.refusal import Refused, did_you_mean, nearest, quote

__all__ = ["FAMILIES", "KERNEL_IDS", "OPS", "check_kernel", "families_of"]

_FRAMEWORK = "whatever PyTorch runs by default; in a session without PyTorch, what its engine chooses"
#: Operation -> family -> what it means.
FAMILIES: dict[str, dict[str, str]] = {
    "matmul": {
        "auto": "the choice is free; the report says what ran",
        "cublas": "cuBLAS, its own choice of algorithm",
        "cublasLt": "cuBLASLt, with a pinned algorithm where the engine can hold it",
        "cuda_raw": "the CUDA kernels of this library",
        "cpu": "the CPU kernels of this library",
        "torch": _FRAMEWORK,
    },
    "attention": {
        "auto": "the choice is free; the report says what ran",
        "flash_v2": "FlashAttention 2",
        "flash_v3": "FlashAttention 3 (Hopper and later)",
        "cudnn": "cuDNN's fused attention",
        "efficient": "memory-efficient attention (CUTLASS)",
        "math": "unfused: matmul, softmax, matmul",
        "trt_fused": "TensorRT's fused attention kernels",
        "trt_flash": "TensorRT's flash attention kernels",
        "trt_cross": "TensorRT's fused cross attention kernels",
        "trt_causal": "TensorRT's fused causal attention kernels",
        "lean": "lean attention, for decoding",
        "decoder": "the decoder's masked attention kernels",
        "cuda_raw": "the CUDA kernels of this library",
        "cpu": "the CPU kernels of this library",
        "torch": _FRAMEWORK,
    },
    "layer_norm": {
        "auto": "the choice is free; the report says what ran",
        "cuda_raw": "the CUDA kernels of this library",
        "cpu": "the CPU kernels of this library",
        "torch": _FRAMEWORK,
    },
    "rms_norm": {
        "auto": "the choice is free; the report says what ran",
        "cuda_raw": "the CUDA kernels of this library",
        "cpu": "the CPU kernels of this library",
        "torch": _FRAMEWORK,
    },
    "conv": {
        "auto": "the choice is free; the report says what ran",
        "cudnn": "cuDNN, with the engine's own way of choosing an algorithm",
        "cudnn_heuristic": "cuDNN, algorithm by its heuristics: the same choice in every run",
        "cudnn_exhaustive": "cuDNN, algorithm by timing all: the fastest, but the choice may differ between runs",
        "cudnn_default": "cuDNN without search: its default algorithm, or quick heuristics among deterministic ones",
        "cuda_raw": "the CUDA kernels of this library",
        "cpu": "the CPU kernels of this library",
        "torch": _FRAMEWORK,
    },
}

#: The operations a kernel can be chosen for.
OPS: tuple[str, ...] = tuple(FAMILIES)

#: Well-known ids: id -> (operations, what it means). Ids that are not listed are accepted: backends may define more.
KERNEL_IDS: dict[str, tuple[tuple[str, ...], str]] = {
    "cuda_raw.skinny": (("matmul",), "matmul with few rows (m <= 64), bound by reading the weights"),
    "cuda_raw.flash_attention_v2": (("attention",), "FlashAttention 2 of this library"),
    "cuda_raw.layer_norm": (("layer_norm",), "layer norm of this library"),
    "cuda_raw.rms_norm": (("rms_norm",), "RMS norm of this library"),
    "cuda_raw.depthwise_conv": (("conv",), "depthwise convolution of this library: one filter for each channel"),
    "cudnn.sdpa": (("attention",), "cuDNN's scaled dot product attention"),
    "cudnn.conv_heuristic": (("conv",), "cuDNN's convolution, by its precise heuristics"),
    "cudnn.conv_default": (("conv",), "cuDNN's convolution, by its quick heuristics among deterministic plans"),
    "cudnn.conv_exhaustive": (("conv",), "cuDNN's convolution, by timing all plans"),
    "cublas.cublas": (("matmul",), "the cuBLAS kernels"),
    "cublas.cublasLt": (("matmul",), "the cuBLASLt kernels"),
    "cpu.blas": (("matmul",), "matrix products by OpenBLAS"),
    "cpu.gemm_conv": (("conv",), "convolution as matrix products by OpenBLAS"),
    "cpu.vectorised": (("layer_norm", "rms_norm"), "norms with the widest vectors of the processor"),
    "cpu.reference": (OPS, "the definition of each operation, in double precision: slow and exact"),
    "null.null": (OPS, "computes nothing: the outputs become zeros"),
    "torch.mm": (("matmul",), "PyTorch's matrix product"),
    "torch.flash": (("attention",), "PyTorch's FlashAttention 2"),
    "torch.efficient": (("attention",), "PyTorch's memory-efficient attention"),
    "torch.cudnn": (("attention",), "cuDNN's attention as PyTorch calls it"),
    "torch.math": (("attention",), "PyTorch's unfused attention"),
    "torch.flex_triton": (("attention",), "flex_attention by its Triton kernel, compiled"),
    "torch.flex_decode": (("attention",), "flex_attention by its Triton kernel for few queries, compiled"),
    "torch.flex_flash": (("attention",), "flex_attention by FlashAttention 4, compiled"),
    "torch.layer_norm": (("layer_norm",), "PyTorch's layer norm"),
    "torch.rms_norm": (("rms_norm",), "PyTorch's RMS norm"),
}

_ID = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*(@[A-Za-z0-9_.:=,+-]+)?")
#: The form of an id, for the JSON Schema.
ID_PATTERN = f"^{_ID.pattern}$"


def families_of(op: str | None) -> dict[str, str]:
    """Return family -> meaning for an operation, or for all operations together when `op` is ``None``."""
    if op is not None:
        return FAMILIES[op]
    return {family: meaning for families in FAMILIES.values() for family, meaning in families.items()}


def check_kernel(kernel: str, op: str | None) -> str:
    """Return `kernel` if it can be used for `op` (``None``: for any operation). Raises `Refused` otherwise."""
    families = families_of(op)
    for_op = f" for {op}" if op else ""
    name, at, _ = kernel.partition("@")
    if "." not in name:
        if at and name in families:
            raise Refused(f"{quote(kernel)} gives a configuration to a family; give it to an id: 'backend.name@config'")
        if kernel in families:
            return kernel
        others = [other for other in OPS if kernel in FAMILIES[other]]
        if others:
            raise Refused(
                f"{quote(kernel)} is a kernel of {' and '.join(others)}, not of {op}."
                f" Valid kernels: {', '.join(families)}, or an id such as 'backend.name'."
            )
        hint = did_you_mean(kernel, families, "kernels").removesuffix(".")
        raise Refused(f"{quote(kernel)} is not a known kernel{for_op}{hint}, or an id such as 'backend.name'.")
    if not _ID.fullmatch(kernel):
        near = nearest(
            kernel, [*families, *(known for known, (ops, _) in KERNEL_IDS.items() if op is None or op in ops)]
        )
        question = f"; did you mean {near!r}?" if near else ""
        raise Refused(f"{quote(kernel)} is not a kernel id: an id is 'backend.name', with one dot{question}")
    ops, _ = KERNEL_IDS.get(name, (OPS, ""))
    if op is not None and op not in ops:
        raise Refused(f"{quote(kernel)} is a kernel of {' and '.join(ops)}, not of {op}")
    return kernel
