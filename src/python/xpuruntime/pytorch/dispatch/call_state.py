# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""State of the running call besides its arguments: phase, transforms, stream capture."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd import forward_ad

from xpuruntime import _core
from xpuruntime.pytorch import _private_api

__all__ = [
    "DTYPES",
    "arch_of",
    "call_key",
    "capturing",
    "has_tangent",
    "phase",
    "transforms",
]

#: Types of PyTorch by the names that policies use.
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
}

#: Everything that a kernel depends on of a call's arrays, behind a name, as one key; ``None`` where it cannot be seen.
call_key = _core.call_key

#: Returns ``"backward"``, ``"train"``, ``"infer"``, ``"prefill"`` or ``"decode"`` for the call of this thread.
#:
#: Compiled code states it, where rules ask for it. Otherwise ``"train"`` is where gradients are recorded, also with
#: ``create_graph=True`` in a backward and where a checkpoint computes its forward again. Inside the forward of a
#: ``torch.autograd.Function``, in which PyTorch records none, it is the phase in which that is called, while
#: `function_phases` are followed. What else runs inside a backward pass is ``"backward"``. The last two are parts of
#: ``"infer"``; see `generation_phases`.
phase = _core.call_phase


def capturing() -> bool:
    """Say whether the current CUDA stream is being captured into a graph."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def transforms() -> list[Any]:
    """Return the transforms of ``torch.func`` active in this thread, outermost first.

    PyTorch is asked for them only where there are some: whoever asks has a stack of them made for the thread, and from
    then on each node of autograd copies that: 1 % more instructions in a training step of a small model.
    """
    if not _private_api.has_transforms():
        return []
    return list(_private_api.transform_stack() or ())


@functools.cache
def _arch(index: int) -> str:
    return "sm{}{}".format(*torch.cuda.get_device_capability(index))


def arch_of(device: torch.device) -> str | None:
    """Return the architecture of a CUDA device, such as ``"sm90"``; ``None`` for others."""
    if device.type != "cuda":
        return None
    return _arch(torch.cuda.current_device() if device.index is None else device.index)


def has_tangent(x: Any) -> bool:
    """Say whether a tensor carries a derivative in forward mode; not whether one does that it wraps."""
    return isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None
