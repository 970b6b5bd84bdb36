# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names of PyTorch for types and operators, mapped to those of reports, and its names of recurrent layers."""

from __future__ import annotations

from typing import Any

from xpuruntime.engines.arrays import torch_dtype_name
from xpuruntime.engines.precision.names import precision_name

__all__ = ["CELLS", "RECURRENT", "RECURRENT_KERNELS", "op_name", "precision_dtype", "torch_dtype", "torch_precision"]

#: Recurrent layers of a program. PyTorch runs some by one kernel, and others product by product.
RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
#: These kernels, where a program names them itself.
RECURRENT_KERNELS = frozenset(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"))
#: One step of such layers, which runs product by product.
CELLS = frozenset(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"))

_TYPES = {"float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}


def torch_dtype(name: str) -> Any:
    """Return the ``torch.dtype`` of xpuruntime's name of a type."""
    import torch

    return getattr(torch, _TYPES.get(name, name))


def torch_precision(dtype: Any) -> str:
    """Return ``"fp16"`` for ``torch.float16``; integer types keep their names."""
    return precision_name(torch_dtype_name(dtype))


def precision_dtype(name: str) -> Any:
    """Return ``torch.float16`` for ``"fp16"``; ``torch.float32`` for what is no type of its own, such as ``"tf32"``."""
    import torch

    kinds = {"fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}
    return kinds.get(name, torch.float32)


def op_name(target: Any) -> str:
    """Return ``"aten.addmm"`` for the overload ``aten.addmm.default``."""
    text = str(target)
    if hasattr(target, "overloadpacket"):
        text = str(target.overloadpacket)
    elif hasattr(target, "__name__"):
        text = target.__name__
    return text.replace("::", ".")
