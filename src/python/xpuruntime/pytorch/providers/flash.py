# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""FlashAttention 4, called directly, and cuDNN's attention of PyTorch with a mask of its own making.

The way that PyTorch has to FlashAttention 4 expects two results, and it returns five by now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.ops.torch_kernels import TorchKernel
from xpuruntime.pytorch.attention.call import added_mask
from xpuruntime.pytorch.providers.quack import CUTE

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.ops.torch_kernels import Saved, TorchCall

_TYPES = ("float16", "bfloat16")
#: Architectures that were looked at in its source: what it says of others is left to a newer adapter.
_ARCHS = ("sm90", "sm100")
_ALIGNED = 16
_MOST_HEAD_DIM = {"sm90": 256, "sm100": 128}
_MASKED_HEAD_DIM = 128


class _Attention(TorchKernel):
    id = "fa4.attention"
    op = "attention"
    families = ("fa4",)
    description = "FlashAttention 4, in CuTe"
    limits = "sm_90 and sm_100; fp16 and bf16; no mask tensor; head_dim in multiples of 8"
    distributions = ("flash-attn-4==4.0.0b36", "quack-kernels>=0.6.5,<0.7", *CUTE)
    install = 'pip install "xpuruntime[fa4]"'
    environment = ("FA_*", "FLASH_ATTENTION_*", "CUTE_DSL_*")
    device_kernels = ("kernel_cutlass_kernel_flash_attncute*",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        if call.arch not in _ARCHS:
            return False, f"it runs on {' and '.join(_ARCHS)}, and the operands are on {call.arch or call.device}"
        if "mask" in call.operands:
            return False, "it takes no mask tensor"
        q, k, v = (call.operands[name] for name in ("q", "k", "v"))
        for name, operand in call.operands.items():
            if operand.dtype not in _TYPES:
                return False, f"it computes {', '.join(_TYPES)}, and {name} is {operand.dtype}"
            if (
                operand.strides[-1] != 1
                or operand.alignment < _ALIGNED
                or any(step % 8 for step in operand.strides[:-1])
            ):
                return False, f"the rows of {name} do not begin at multiples of {_ALIGNED} bytes"
        for name, size in (("head_dim of q", q.shape[-1]), ("head_dim of v", v.shape[-1])):
            if size % 8 or not 8 <= size <= _MOST_HEAD_DIM[call.arch]:
                most = _MOST_HEAD_DIM[call.arch]
                return False, f"it takes a head_dim of 8 to {most} in multiples of 8, and the {name} is {size}"
        if q.shape[-1] != v.shape[-1]:
            return False, "it is used where queries and values have the same head_dim"
        if q.shape[1] % k.shape[1]:
            return False, f"{q.shape[1]} heads of queries are no multiple of {k.shape[1]} heads of keys"
        if call.attributes["causal"] and q.shape[2] != k.shape[2]:
            return False, "its causal mask begins at the last key, and PyTorch's at the first"
        return True, ""

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        from flash_attn.cute.interface import _flash_attn_fwd

        q, k, v = (x.transpose(1, 2) for x in tensors)
        out = torch.empty_like(tensors[0])
        _, lse, *_ = _flash_attn_fwd(
            q, k, v, softmax_scale=call.attributes["scale"], causal=call.attributes["causal"], return_lse=True,
            out=out.transpose(1, 2),
        )  # fmt: skip
        return (out,), (lse,)

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        from flash_attn.cute.interface import _flash_attn_bwd

        gradients = [torch.empty_like(x) for x in saved.inputs]
        q, k, v, out, grad = (x.transpose(1, 2) for x in (*saved.inputs, *saved.outputs, *grads))
        of_q, of_k, of_v = (x.transpose(1, 2) for x in gradients)
        _flash_attn_bwd(
            q, k, v, out, grad, saved.extra[0], softmax_scale=call.attributes["scale"],
            causal=call.attributes["causal"], deterministic=call.deterministic, dq=of_q, dk=of_k, dv=of_v,
        )  # fmt: skip
        return gradients


class _MaskedCudnn(TorchKernel):
    """PyTorch adds a finite number for hidden keys, which cancels where a query sees none; this adds minus infinity."""

    id = "torch_masked.cudnn"
    op = "attention"
    description = "cuDNN's attention as PyTorch calls it, with a mask; queries that see no key get 0"
    limits = "sm_80 and later; fp16 and bf16; with a mask; no gradients of 64 more keys than a multiple of 128"
    operators = ("*_scaled_dot_product_cudnn_attention*",)
    deterministic = "its gradient adds in any order"
    adds_masks = traceable = True
    alone = True

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        if not call.device.startswith("cuda") or int((call.arch or "sm0")[2:].rstrip("af")) < 80:
            return False, f"it runs on CUDA, sm_80 and later, and the operands are on {call.arch or call.device}"
        q, k, v = (call.operands[name] for name in ("q", "k", "v"))
        mask = call.operands.get("mask")
        if mask is None or mask.shape[-1] != k.shape[2]:
            return False, "it is for calls with a mask that has a column for each key"
        if q.dtype not in _TYPES or {k.dtype, v.dtype} != {q.dtype}:
            return False, f"it computes {', '.join(_TYPES)}, and these are {q.dtype}, {k.dtype} and {v.dtype}"
        if mask.dtype not in ("bool", q.dtype):
            return False, f"it takes a boolean mask or one of {q.dtype}, and this is {mask.dtype}"
        for name in ("q", "k", "v") if mask.dtype == "bool" else ("q", "k", "v", "mask"):
            operand = call.operands[name]
            if operand.strides[-1] != 1 or operand.alignment < _ALIGNED or any(n % 8 for n in operand.strides[:-1]):
                return False, f"the rows of {name} do not begin at multiples of {_ALIGNED} bytes"
        if q.shape[-1] % 8 or not 8 <= q.shape[-1] <= _MASKED_HEAD_DIM or v.shape[-1] != q.shape[-1]:
            return False, f"it takes a head_dim of 8 to {_MASKED_HEAD_DIM} in multiples of 8, and this is {q.shape[-1]}"
        if q.shape[1] % k.shape[1]:
            return False, f"{q.shape[1]} heads of queries are no multiple of {k.shape[1]} heads of keys"
        if call.phase in ("train", "backward") and (q.shape[2] == 1 or k.shape[2] % 128 == 64):
            return False, "cuDNN's gradient of a single query, or of 64 more keys than a multiple of 128, may be NaN"
        return (False, "it takes keys in multiples of 8") if k.shape[2] % 8 else (True, "")

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        q, k, v, mask = tensors
        keeps_lse = call.attributes.get("lse", True)
        attended, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, _added(mask, q), keeps_lse, scale=call.attributes["scale"]
        )
        return (_as(attended, q),), (lse.reshape(q.shape[:3]),) if keeps_lse else ()

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        q, k, v, mask = saved.inputs
        unused = q.new_empty((), dtype=torch.int64)  # the seed of a dropout
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            grads[0], q, k, v, saved.outputs[0], saved.extra[0].unsqueeze(-1), unused, unused, _added(mask, q), None,
            None, q.shape[2], k.shape[2], 0.0, False, scale=call.attributes["scale"],
        )  # fmt: skip
        return (*map(_as, gradients, (q, k, v)), None)


def _as(result: Tensor, operand: Tensor) -> Tensor:
    """Return a result as it has to lie in memory, which is as its operand where that is dense."""
    if result.stride() == operand.stride():
        return result
    like = torch.empty_like(operand)
    return result if result.stride() == like.stride() else like.copy_(result)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as it is added to scores, in four dimensions."""
    # A boolean one is converted in the forward and again in the backward, so that no layer keeps another copy for it.
    mask = mask[(None,) * (4 - mask.dim())]
    return added_mask(mask, like) if mask.dtype == torch.bool else mask


KERNELS: tuple[TorchKernel, ...] = (_Attention(), _MaskedCudnn())
