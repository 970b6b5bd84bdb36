# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The arithmetic of PyTorch's quantised operators: those that multiply integers, whatever types they read and write."""

from __future__ import annotations

__all__ = ["multiplies_integers"]

#: Operators of namespaces other than these multiply in the types of their tensors.
_PRODUCTS = ("linear", "conv", "matmul", "mul", "add", "batch_norm", "lstm", "gru", "rnn")
#: Products of int8 tensors.
_ATEN = frozenset(("_int_mm", "_int_bmm", "qlinear_pointwise", "qconv_pointwise", "qconv2d_pointwise"))
#: They hold weights of fewer bits and multiply in floats.
_DEQUANTISED = ("_fp16", "_prepack", "_unpack", "embedding_bag")


def multiplies_integers(op: str) -> bool:
    """Whether an operator, such as ``"aten._int_mm"`` or ``"quantized.linear_dynamic"``, multiplies integers."""
    space, _, name = op.replace("::", ".").partition(".")
    name = name.partition(".")[0]
    if name in _ATEN or name.startswith("_dyn_quant_matmul"):
        return True
    if space not in ("quantized", "onednn", "sparse"):
        return False
    return any(word in name for word in _PRODUCTS) and not any(word in name for word in _DEQUANTISED)
