# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention of one query a row by this library's Triton kernel, the one that captured decode steps are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xpuruntime.ops.torch_kernels import TorchKernel

if TYPE_CHECKING:
    from xpuruntime.ops.torch_kernels import TorchCall

_TYPES = ("float32", "float16", "bfloat16")
_HEAD_DIMS = (32, 64, 128, 256)
_MOST_GROUPS = 16


class _Decode(TorchKernel):
    id = "triton_raw.decode"
    op = "attention"
    description = "attention of one query a row, in Triton"
    limits = (
        "inference on CUDA, sm_80 and later; head_dim 32, 64, 128 or 256; up to 16 heads of queries for one of keys"
    )
    distributions = ("triton>=3.3",)
    device_kernels = ("_one_query",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        if not call.device.startswith("cuda") or int((call.arch or "sm0")[2:].rstrip("af")) < 80:
            return False, f"it runs on CUDA, sm_80 and later, and the operands are on {call.arch or call.device}"
        if call.phase in ("train", "backward"):
            return False, "it has no backward"
        q, k, v = (call.operands[name] for name in ("q", "k", "v"))
        if q.shape[2] != 1 or (call.attributes["causal"] and k.shape[2] > 1):
            return False, "it computes a single query of each row, and a causal one sees the first key alone"
        if q.dtype not in _TYPES or {k.dtype, v.dtype} != {q.dtype}:
            return False, f"it computes {', '.join(_TYPES)}, and these are {q.dtype}, {k.dtype} and {v.dtype}"
        if q.shape[-1] not in _HEAD_DIMS or v.shape[-1] != q.shape[-1]:
            return False, f"it takes a head_dim of {', '.join(map(str, _HEAD_DIMS))}, and this is {q.shape[-1]}"
        if q.shape[1] % k.shape[1] or q.shape[1] // k.shape[1] > _MOST_GROUPS:
            return False, f"it takes up to {_MOST_GROUPS} heads of queries for each head of keys"
        for name, operand in (("q", q), ("k", k), ("v", v)):
            if operand.strides[-1] != 1:
                return False, f"the rows of {name} are not dense"
        mask = call.operands.get("mask")
        if mask is not None and (len(mask.shape) != 4 or mask.dtype not in ("bool", *_TYPES)):
            return False, "it takes a mask of four dimensions, true where a key is seen, or added"
        return True, ""

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        import torch

        from xpuruntime.pytorch.generation.decode_attention import attend_to_all

        q, k, v, *mask = tensors
        scale = call.attributes["scale"]
        attended, lse = attend_to_all(
            q, k, v, mask[0] if mask else None, q.shape[-1] ** -0.5 if scale is None else scale
        )
        like = torch.empty_like(q)
        return (attended if attended.stride()[:2] == like.stride()[:2] else like.copy_(attended),), (lse,)


KERNELS: tuple[TorchKernel, ...] = (_Decode(),)
