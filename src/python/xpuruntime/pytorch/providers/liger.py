# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Liger's Triton kernels, by its functions alone: its ``apply_liger_kernel_to_*`` change classes of the whole process.

The kernels of its submodules are called, which the variable ``LIGER_KERNEL_IMPL`` does not replace: a call is refused
where it is set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xpuruntime.ops.torch_kernels import TorchKernel
from xpuruntime.pytorch.providers.chunked import is_loss_of_rows, scaled_gradients, unsaved_gradients
from xpuruntime.pytorch.providers.operations import is_rotation, laid_out

if TYPE_CHECKING:
    from xpuruntime.ops.torch_kernels import Saved, TorchCall

_TYPES = ("float32", "float16", "bfloat16")
#: Columns of the widest block that its kernels take.
_MOST_COLUMNS = 65536
#: Formula of a norm to Liger's ``casting_mode`` and the number that is added to the weight.
_CASTING = {"torch": ("gemma", 0.0), "llama": ("llama", 0.0), "gemma": ("gemma", 1.0)}


class LigerKernel(TorchKernel):
    """What Liger's kernels have in common."""

    distributions = ("liger-kernel>=0.8.5,<0.9", "triton>=3")
    install = 'pip install "xpuruntime[liger]"'
    environment = ("TRITON_*", "LIGER_*")

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        """See `TorchKernel.supports`."""
        if not call.device.startswith("cuda") and os.environ.get("TRITON_INTERPRET") != "1":
            return False, f"it runs on CUDA, and the operands are on {call.device}"
        if stated := os.environ.get("LIGER_KERNEL_IMPL", "").strip():
            return (
                False,
                f"LIGER_KERNEL_IMPL={stated} asks Liger for another implementation. Fix: unset LIGER_KERNEL_IMPL",
            )
        for name, operand in call.operands.items():
            if operand.dtype not in _TYPES:
                return False, f"it computes {', '.join(_TYPES)}, and {name} is {operand.dtype}"
        return True, ""


class _RmsNorm(LigerKernel):
    id = "liger.rms_norm"
    op = "rms_norm"
    description = "Liger's RMS norm, in Triton"
    limits = "fp32, fp16 and bf16; at most 65,536 columns; a weight"
    device_kernels = ("_rms_norm_*_kernel", "_block_rms_norm_*_kernel")

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        fits, why = super().supports(call)
        if not fits:
            return fits, why
        x, weight = call.operands["x"], call.operands.get("weight")
        if x.shape[-1] > _MOST_COLUMNS:
            return False, f"it takes at most {_MOST_COLUMNS} columns, and these are {x.shape[-1]}"
        if weight is None:
            return False, "it is used with a weight"
        if call.attributes["formula"] not in _CASTING:
            return False, f"it has no formula {call.attributes['formula']}"
        if weight.dtype != x.dtype:
            return False, f"it writes the type of the input, {x.dtype}, and the weight is {weight.dtype}"
        return True, ""

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        from liger_kernel.ops.rms_norm import rms_norm_forward

        x, weight = tensors
        casting, offset = _CASTING[call.attributes["formula"]]
        out, _, rstd, *_ = rms_norm_forward(x, weight, call.attributes["epsilon"], offset, casting, None)
        return (out,), (rstd.view(x.shape[:-1]),)

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        from liger_kernel.ops import rms_norm
        from liger_kernel.ops.utils import calculate_settings

        x, weight = saved.inputs
        casting, offset = _CASTING[call.attributes["formula"]]
        mode = {"gemma": rms_norm._CASTING_MODE_GEMMA, "llama": rms_norm._CASTING_MODE_LLAMA}[casting].value
        columns = x.shape[-1]
        return rms_norm.rms_norm_backward(  # type: ignore[no-any-return]
            grads[0], x.view(-1, columns), weight, saved.extra[0].reshape(-1), offset, mode,
            *calculate_settings(columns), False, None,
        )  # fmt: skip


class _Rope(LigerKernel):
    id = "liger.rope"
    op = "rope"
    description = "Liger's rotary embedding, in Triton"
    limits = "fp32, fp16 and bf16; halves of cos and sin that repeat; it rotates copies"
    device_kernels = ("_triton_rope",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        fits, why = super().supports(call)
        return is_rotation(call) if fits else (fits, why)

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        del call
        from liger_kernel.ops.rope import rope_forward

        q, k, cos, sin = tensors
        rotated = rope_forward(_by_position(q), _by_position(k), cos, sin)
        return [laid_out(x, like) for x, like in zip(rotated, (q, k), strict=False)], ()

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        del call
        from liger_kernel.ops.rope import rope_backward

        gradients = rope_backward(*map(_by_position, grads), *saved.inputs[2:])
        return [*(laid_out(x, grad) for x, grad in zip(gradients, grads, strict=True)), None, None]


class _GatedUnit(LigerKernel):
    limits = "fp32, fp16 and bf16; at most 65,536 columns; its backward writes over copies of gate and input"

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        fits, why = super().supports(call)
        gate, up = call.operands["gate"], call.operands["up"]
        if not fits:
            return fits, why
        if gate.shape[-1] > _MOST_COLUMNS:
            return False, f"it takes at most {_MOST_COLUMNS} columns, and these are {gate.shape[-1]}"
        if gate.shape != up.shape or gate.dtype != up.dtype:
            return False, "gate and input have to be of one shape and type"
        return True, ""


class _SwiGlu(_GatedUnit):
    id = "liger.swiglu"
    op = "swiglu"
    description = "Liger's gated SiLU, in Triton"
    device_kernels = ("_swiglu_*_kernel*",)

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        del call
        from liger_kernel.ops.swiglu import swiglu_forward

        gate, up = (x.contiguous() for x in tensors)
        return (swiglu_forward(gate, up)[2],), ()

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        del call
        from liger_kernel.ops.swiglu import swiglu_backward

        return swiglu_backward(*_copies(saved.inputs), grads[0])  # type: ignore[no-any-return]


class _GeGlu(_GatedUnit):
    id = "liger.geglu"
    op = "geglu"
    description = "Liger's gated GELU by tanh, in Triton"
    device_kernels = ("_geglu_tanh_*_kernel",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        if call.attributes["approximate"] != "tanh":
            return False, "it computes GELU by tanh, and this call does not"
        return super().supports(call)

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        del call
        from liger_kernel.ops.geglu import geglu_forward

        gate, up = (x.contiguous() for x in tensors)
        return (geglu_forward(gate, up)[2],), ()

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        del call
        from liger_kernel.ops.geglu import geglu_backward

        return geglu_backward(*_copies(saved.inputs), grads[0])  # type: ignore[no-any-return]


class _CrossEntropy(LigerKernel):
    id = "liger.cross_entropy"
    op = "cross_entropy"
    description = "Liger's cross entropy, in Triton, which computes the gradient in the forward"
    limits = "fp32, fp16 and bf16; rows of logits with one class each; its forward writes over a copy of the logits"
    capturable = "its forward waits for the number of rows that are not ignored"
    device_kernels = ("liger_cross_entropy_kernel",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        logits, target = call.operands["logits"], call.operands["target"]
        fits, why = super().supports(replace(call, operands={"logits": logits}))
        if not fits:
            return fits, why
        if len(logits.shape) != len(target.shape) + 1 or len(target.shape) != 1 or target.dtype != "int64":
            return False, "it takes rows of logits and one class index, int64, for each"
        return True, ""

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        from liger_kernel.ops.cross_entropy import cross_entropy_forward

        learns = call.phase == "train"
        logits, target = tensors
        rows = logits.detach().float() if call.attributes["upcast"] else logits.detach()
        if learns:  # it writes the gradient there
            rows = (rows.clone() if rows.dtype == logits.dtype else rows).requires_grad_()
        stated = (call.attributes["ignore_index"], 0.0, 0.0, call.attributes["reduction"], None, False)
        loss, *_, gradient = cross_entropy_forward(rows, target, None, *stated)
        return (loss,), (gradient.detach().to(logits.dtype),) if learns else ()

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        del call
        grad = grads[0]
        gradient = saved.extra[0] * (grad if grad.dim() == 0 else grad.unsqueeze(-1))
        return gradient.to(saved.extra[0].dtype), None

    def saved_like(self, call: TorchCall, *tensors: Any) -> Sequence[Any]:
        return (tensors[0].new_empty(tensors[0].shape),) if call.phase == "train" else ()


class _LinearCrossEntropy(LigerKernel):
    id = "liger.linear_cross_entropy"
    op = "linear_cross_entropy"
    description = "Liger's fused linear cross entropy, in Triton, which computes the gradient in the forward"
    limits = "fp32, fp16 and bf16; rows with one class index each; a mean or a sum"
    capturable = _CrossEntropy.capturable
    device_kernels = _CrossEntropy.device_kernels

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        operands = {name: operand for name, operand in call.operands.items() if name != "target"}
        fits, why = super().supports(replace(call, operands=operands))
        if not fits:
            return fits, why
        return is_loss_of_rows(call, reduced=True)

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

        needs = call.attributes.get("needs", ("x", "weight", "bias")) if call.phase == "train" else ()
        x, weight, target, *bias = (tensor.detach() for tensor in tensors)
        loss, *_, of_x, of_weight, of_bias = fused_linear_cross_entropy_forward(
            x, weight, target, None, bias[0] if bias else None, call.attributes["ignore_index"],
            reduction=call.attributes["reduction"], compute_gradients=bool(needs),
            weight_requires_grad="weight" in needs,
        )  # fmt: skip
        gradient_by_name = {"x": of_x, "weight": of_weight, "bias": of_bias if bias else None}
        return (loss,), [
            gradient for name, gradient in gradient_by_name.items() if name in needs and gradient is not None
        ]

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        return scaled_gradients(call, saved, grads[0])

    def saved_like(self, call: TorchCall, *tensors: Any) -> Sequence[Any]:
        return unsaved_gradients(call, tensors)


def _by_position(x: Any) -> Any:
    """Return a copy in which the heads of a position are beside each other, which it writes the results to."""
    import torch

    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _copies(tensors: Sequence[Any]) -> list[Any]:
    """Return copies that its backward may write the gradients to; the tensors belong to the program."""
    import torch

    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


KERNELS: tuple[TorchKernel, ...] = (
    _RmsNorm(), _SwiGlu(), _GeGlu(), _Rope(), _CrossEntropy(), _LinearCrossEntropy(),
)  # fmt: skip
