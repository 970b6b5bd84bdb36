# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names of CUDA kernels, read for how one multiplies: on tensor cores or not, and in which precision.

The names are those of cuBLAS, cuDNN, CUTLASS and this library. NVIDIA documents none of them, so that a name that is
not known here says nothing.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["NameFacts", "parse_kernel_name", "short_name"]


class NameFacts(NamedTuple):
    """What can be read from a kernel's name; ``None`` where the name does not show it."""

    tensor_cores: bool | None
    precision: str | None


#: Without tensor cores: CUTLASS writes simt, cuBLAS ffma, or the names of BLAS, which begin the name or a word.
_PLAIN = re.compile(
    r"simt|ffma|(?:^|_)(?:volta|maxwell|turing|ampere|hopper)?_?[sd]gemm(?!.*tensorop)|gemv|gemmk1|winograd"
)
_TENSOR = re.compile(
    r"tensor_?op|[hi]mma|gmma|xmma|nvjet|cutlass.*(?:s1688|s16816|h16816|i16832)|(?:s|h)(?:884|1688|16816)"
    r"|mma_sync|flash_fwd|flash_bwd|fmha|sdpa_sm|flash_forward_mma|flash_forward_wgmma|wgmma",
    re.IGNORECASE,
)
#: In this order: the first that a name holds.
_PRECISIONS = (
    (re.compile(r"tf32|cutlass_80_tensorop_s1688gemm", re.IGNORECASE), "tf32"),
    (re.compile(r"e4m3|e5m2|fp8", re.IGNORECASE), "fp8"),
    (re.compile(r"bf16|bfloat16|nvjet(?:_sm\d+)?_tst", re.IGNORECASE), "bf16"),
    (re.compile(r"i8i8|i16832|imma|s8s8|int8", re.IGNORECASE), "int8"),
    (re.compile(r"f16f16|h16816|h1688|h884|hgemm|_f16_|__half|half_t|nvjet(?:_sm\d+)?_hsh", re.IGNORECASE), "fp16"),
    (re.compile(r"dgemm|f64f64|d884", re.IGNORECASE), "fp64"),
    (re.compile(r"sgemm|f32f32", re.IGNORECASE), "fp32"),
)


#: CUTLASS says in an argument of its template what the kernel is.
_CUTLASS = re.compile(r"cutlass::Kernel2?<(cutlass_\w+)")


def parse_kernel_name(name: str) -> NameFacts:
    """Read a kernel's name."""
    tensor = False if _PLAIN.search(name) else True if _TENSOR.search(name) else None
    if tensor is None:
        return NameFacts(None, None)
    precision = next((word for pattern, word in _PRECISIONS if pattern.search(name)), None)
    return NameFacts(tensor, precision)


def short_name(name: str) -> str:
    """Return a kernel's name without return type, arguments of templates and parameters."""
    inner = _CUTLASS.search(name)
    if inner is not None:
        return inner.group(1)
    depth, kept = 0, []
    text = name.replace("(anonymous namespace)::", "")
    for at, letter in enumerate(text):
        if letter == "(" and depth == 0 and at > 0:
            break
        depth -= letter == ">" and depth > 0
        if depth == 0 and letter not in "<>":
            kept.append(letter)
        depth += letter == "<"
    return "".join(kept).strip().rpartition(" ")[2] or name
