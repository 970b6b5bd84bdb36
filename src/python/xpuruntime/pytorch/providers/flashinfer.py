# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""FlashInfer's kernels for inference: they have no backward, and its functions are no operators of PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xpuruntime.ops.torch_kernels import TorchKernel
from xpuruntime.pytorch.providers.operations import is_rotation, laid_out

if TYPE_CHECKING:
    from xpuruntime.ops.torch_kernels import TorchCall

_TYPES = ("float16", "bfloat16")
_HEAD_DIMS = (64, 128, 256)
#: Heads of queries for each head of keys.
_GROUPS = (1, 2, 3, 4, 8)
#: Numbers of all heads of a position: 1,024 threads with a vector each.
_MOST_NUMBERS = 8192
_VECTOR = 16


class FlashInferKernel(TorchKernel):
    """What FlashInfer's kernels have in common."""

    distributions = ("flashinfer-python>=0.7.4,<0.8",)
    install = 'pip install "flashinfer-python>=0.7.4,<0.8"'
    environment = ("FLASHINFER_*",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        """See `TorchKernel.supports`."""
        if not call.device.startswith("cuda"):
            return False, f"it runs on CUDA, and the operands are on {call.device}"
        if call.phase in ("train", "backward"):
            return False, "it has no backward"
        for name, operand in call.operands.items():
            if operand.dtype not in _TYPES:
                return False, f"it computes {', '.join(_TYPES)}, and {name} is {operand.dtype}"
        return True, ""


class _RmsNorm(FlashInferKernel):
    id = "flashinfer.rms_norm"
    op = "rms_norm"
    description = "FlashInfer's RMS norm"
    limits = "inference; fp16 and bf16; a weight; the reciprocal root is not returned"

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        fits, why = super().supports(call)
        if not fits:
            return fits, why
        x, weight = call.operands["x"], call.operands.get("weight")
        if weight is None:
            return False, "it is used with a weight"
        if weight.dtype != x.dtype:
            return False, f"input and weight have to be of one type, and they are {x.dtype} and {weight.dtype}"
        if call.attributes["formula"] not in ("torch", "gemma"):
            return False, f"it multiplies by the weight in float32, and the formula is {call.attributes['formula']}'s"
        return True, ""

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        import torch
        from flashinfer.norm import gemma_rmsnorm, rmsnorm

        x, weight = tensors
        compute = gemma_rmsnorm if call.attributes["formula"] == "gemma" else rmsnorm
        out = compute(x.view(-1, x.shape[-1]), weight, call.attributes["epsilon"])
        return (out.view(x.shape),), (x.new_full(x.shape[:-1], math.nan, dtype=torch.float32),)


class _SwiGlu(FlashInferKernel):
    id = "flashinfer.swiglu"
    op = "swiglu"
    description = "FlashInfer's gated SiLU"
    limits = "inference; fp16 and bf16; gate and input are copied beside each other, unless they are halves of a tensor"

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        fits, why = super().supports(call)
        gate, up = call.operands["gate"], call.operands["up"]
        if fits and (gate.shape != up.shape or gate.dtype != up.dtype):
            return False, "gate and input have to be of one shape and type"
        return fits, why

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        del call
        from flashinfer.activation import silu_and_mul

        return (silu_and_mul(_beside(*tensors)),), ()


def _beside(gate: Any, up: Any) -> Any:
    import torch

    columns = gate.shape[-1]
    joint_shape = (*gate.shape[:-1], 2 * columns)
    steps = torch.empty(joint_shape, device="meta").stride()
    if (
        gate.stride() == up.stride() == steps
        and gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
        and gate.storage_offset() + columns == up.storage_offset()
    ):
        return gate.as_strided(joint_shape, steps)
    return torch.cat((gate, up), -1)


class _Rope(FlashInferKernel):
    id = "flashinfer.rope"
    op = "rope"
    description = "FlashInfer's rotary embedding"
    limits = "inference; fp16 and bf16; head_dim 64, 128 or 256; halves of cos and sin that repeat"
    device_kernels = ("*RotaryPosIdsCosSinCache*",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        fits, why = super().supports(call)
        if not fits:
            return fits, why
        columns = call.operands["q"].shape[-1]
        if columns not in _HEAD_DIMS:
            return False, f"it takes a head_dim of {', '.join(map(str, _HEAD_DIMS))}, and this is {columns}"
        return is_rotation(call)

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        del call
        import torch
        from flashinfer.rope import apply_rope_with_cos_sin_cache

        q, k, cos, sin = tensors
        batch, _, length, columns = q.shape
        rows = torch.cat([x.chunk(2, -1)[0].flatten(0, -2) for x in (cos, sin)], -1).float()
        positions = torch.arange(rows.shape[0], device=q.device).repeat(batch * length // rows.shape[0])
        rotated = apply_rope_with_cos_sin_cache(
            positions, *(x.transpose(1, 2).reshape(batch * length, -1) for x in (q, k)), columns, rows
        )
        by_head = [x.view(batch, length, -1, columns).transpose(1, 2) for x in rotated]
        return [laid_out(x, like) for x, like in zip(by_head, (q, k), strict=True)], ()


class _Decode(FlashInferKernel):
    id = "flashinfer.decode"
    op = "attention"
    description = "FlashInfer's attention of a single query"
    limits = "inference; fp16 and bf16; one sequence and one query, without a mask; head_dim 64, 128 or 256"
    device_kernels = ("*flashinfer*Decode*",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        fits, why = super().supports(call)
        if not fits:
            return fits, why
        q, k, v = (call.operands[name] for name in ("q", "k", "v"))
        if (
            "mask" in call.operands
            or q.shape[0] != 1
            or q.shape[2] != 1
            or (call.attributes["causal"] and k.shape[2] > 1)
        ):
            return False, "it computes a single query of one sequence, which sees all keys, without a mask tensor"
        if q.shape[-1] not in _HEAD_DIMS or q.shape[-1] != v.shape[-1]:
            return False, f"it takes a head_dim of {', '.join(map(str, _HEAD_DIMS))}, and this is {q.shape[-1]}"
        if q.shape[1] % k.shape[1] or q.shape[1] // k.shape[1] not in _GROUPS:
            return False, f"it takes {', '.join(map(str, _GROUPS))} heads of queries for each head of keys"
        for name, operand in (("k", k), ("v", v)):
            if operand.strides[1:] != (operand.shape[2] * operand.shape[3], operand.shape[3], 1):
                return False, f"{name} is not dense"
        return True, ""

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        import torch
        from flashinfer.decode import single_decode_with_kv_cache

        q, k, v = tensors
        attended, lse = single_decode_with_kv_cache(
            q[0, :, 0].contiguous(), k[0], v[0], kv_layout="HND", sm_scale=call.attributes["scale"], return_lse=True
        )
        out = torch.empty_like(q)
        out[0, :, 0] = attended
        return (out,), ((lse * math.log(2)).view(1, -1, 1),)  # whose logarithms are to the base 2


class _CacheUpdate(FlashInferKernel):
    id = "flashinfer.cache_update"
    op = "cache_update"
    description = "FlashInfer's write of keys and values into a cache, each sequence as a page"
    limits = "fp16 and bf16; keys and values of one head_dim, 64, 128 or 256, in rows of whole vectors of 16 bytes"
    device_kernels = ("*AppendPagedKVCache*",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        operands = {name: operand for name, operand in call.operands.items() if name != "positions"}
        fits, why = super().supports(replace(call, operands=operands))
        if not fits:
            return fits, why
        keys, values = operands["keys"], operands["values"]
        heads, _, columns = keys.shape[1:]
        if keys.shape != values.shape or keys.strides != values.strides:
            return False, "keys and values have to be of one shape, and to lie in memory alike"
        if columns not in _HEAD_DIMS:
            return False, f"it takes a head_dim of {', '.join(map(str, _HEAD_DIMS))}, and this is {columns}"
        if heads * columns > _MOST_NUMBERS:
            return False, f"it takes at most {_MOST_NUMBERS // columns} heads of {columns}, and these are {heads}"
        for name, operand in operands.items():
            if (
                operand.strides[-1] != 1
                or operand.alignment < _VECTOR
                or any(step * 2 % _VECTOR for step in operand.strides[:-1])
            ):
                return False, f"the rows of {name} do not begin at multiples of {_VECTOR} bytes"
        return True, ""

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        del call
        import torch
        from flashinfer.page import append_paged_kv_cache

        keys, values, new_keys, new_values, positions = tensors
        batch, _, length, _ = keys.shape
        count = positions.shape[0]
        # It would write a position after the end into the next sequence.
        torch.ops.aten._assert_async.msg((positions < length).all(), "a position is after the end of the cache")
        pages = torch.arange(batch + 1, dtype=torch.int32, device=keys.device)
        append_paged_kv_cache(
            *(x.transpose(1, 2).flatten(0, 1) for x in (new_keys, new_values)),
            pages[:batch].repeat_interleave(count, output_size=batch * count), positions.int().repeat(batch),
            (keys, values), pages[:batch], pages, torch.full_like(pages[:batch], length), kv_layout="HND",
        )  # fmt: skip
        return (), ()


KERNELS: tuple[TorchKernel, ...] = (_RmsNorm(), _SwiGlu(), _Rope(), _Decode(), _CacheUpdate())
