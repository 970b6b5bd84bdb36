# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fused recurrent layers: those that PyTorch runs as one kernel, inside which no matmul kernel can be chosen.

A plan knows that from the names of operators, and from what an exported program calls their weights. Under fp16 on the
CPU it takes the one kernel for granted, which oneDNN has on some processors alone; what runs is seen when it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.engines.precision.names import precision_name
from xpuruntime.engines.torch.names import RECURRENT, RECURRENT_KERNELS

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.model import NodeInfo

__all__ = ["dtypes_of", "fused_layers"]

#: What an LSTM with projections calls its weights for them; oneDNN has no such kernel.
_PROJECTION = "weight_hr"
_FLOATS = ("fp64", "fp32", "fp16", "bf16")


def fused_layers(request: Request) -> list[NodeInfo]:
    """Return the recurrent layers of a program that PyTorch runs by one kernel. Pure."""
    dtypes = dtypes_of(request)
    cuda = request.device.startswith("cuda")
    return [node for node in request.model.nodes if _is_fused(node, dtypes, cuda=cuda)]


def dtypes_of(request: Request) -> tuple[str, ...]:
    """Return the types that a layer may compute in, as far as the weights tell."""
    precision = request.policy.execution.precision
    if precision in ("fp16", "bf16"):
        return (precision,)
    known = (precision_name(name) for name in request.model.weights)
    return tuple(dict.fromkeys(name for name in known if name in _FLOATS))


def _is_fused(node: NodeInfo, dtypes: tuple[str, ...], *, cuda: bool) -> bool:
    """Say whether cuDNN computes it on CUDA, or oneDNN on the CPU: that has the LSTM alone, and not in fp64."""
    name = node.op.rpartition(".")[2]
    if name in RECURRENT_KERNELS:
        return True
    if name not in RECURRENT or cuda:
        return name in RECURRENT
    projects = any(_PROJECTION in one for one in node.inputs)
    return name == "lstm" and dtypes != ("fp64",) and not projects
