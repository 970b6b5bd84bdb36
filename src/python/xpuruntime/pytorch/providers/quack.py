# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""quack's CuTe kernels for Hopper and later, untuned, so that the same call runs the same kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from xpuruntime.ops.torch_kernels import Operand, TorchKernel
from xpuruntime.pytorch.providers.chunked import (
    is_loss_of_rows,
    loss_in_parts,
    padded,
    scaled_gradients,
    unsaved_gradients,
)
from xpuruntime.pytorch.providers.operations import is_rotation, laid_out

if TYPE_CHECKING:
    from xpuruntime.ops.torch_kernels import Saved, TorchCall

#: What CuTe kernels are compiled by: a change of one changes the kernel.
CUTE = ("nvidia-cutlass-dsl>=4.7", "apache-tvm-ffi>=0.1.11,<0.2", "torch-c-dlpack-ext")
_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
_VECTOR_BITS = 128
_FIRST_ARCH = 90
#: Columns and bits of a column from which the gradient has not enough shared memory.
_WIDE = (128 * 1024, 32)
_MOST_HEAD_DIM = 512


class QuackKernel(TorchKernel):
    """What quack's kernels have in common."""

    limits = "sm_90 and later; fp32, fp16 and bf16; columns in whole vectors of 16 bytes"
    distributions = ("quack-kernels>=0.6.5,<0.7", *CUTE)
    install = 'pip install "xpuruntime[quack]"'
    environment = ("QUACK_*", "CUTE_DSL_*")
    device_kernels = ("kernel_cutlass_kernel_quack*",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        """See `TorchKernel.supports`."""
        if not call.arch or int(call.arch.removeprefix("sm")) < _FIRST_ARCH:
            return False, f"it runs on sm_90 and later, and the operands are on {call.arch or call.device}"
        for name, operand in call.operands.items():
            if name == "target":
                continue
            if operand.dtype not in _BITS:
                return False, f"it computes {', '.join(_BITS)}, and {name} is {operand.dtype}"
            if operand.alignment < _VECTOR_BITS // 8:
                return False, f"{name} does not begin at a multiple of {_VECTOR_BITS // 8} bytes"
        first = next(iter(call.operands.values()))
        columns, bits = first.shape[-1], _BITS[first.dtype]
        if columns * bits % _VECTOR_BITS:
            return False, f"it takes columns in multiples of {_VECTOR_BITS // bits}, and these are {columns}"
        return True, ""


class _RmsNorm(QuackKernel):
    id = "quack.rms_norm"
    op = "rms_norm"
    description = "quack's RMS norm, in CuTe"
    limits = f"{QuackKernel.limits}; a weight"
    operators = ("quack::_rmsnorm_*", "quack::rmsnorm_*")

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        fits, why = super().supports(call)
        if not fits:
            return fits, why
        x = call.operands["x"]
        if "weight" not in call.operands:
            return False, "it is used with a weight"
        columns, bits = x.shape[-1], _BITS[x.dtype]
        if columns > _WIDE[0] and bits >= _WIDE[1]:
            return False, f"it takes at most {_WIDE[0]} columns of {x.dtype}, and these are {columns}"
        if call.attributes["formula"] not in ("torch", "gemma"):
            return False, f"it multiplies by the weight in float32, and the formula is {call.attributes['formula']}'s"
        return True, ""

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        import quack.rmsnorm  # noqa: F401 - whose package has a function of the same name

        x, weight = tensors
        out, _, rstd = _module().rmsnorm_fwd(
            x.view(-1, x.shape[-1]),
            weight,
            eps=call.attributes["epsilon"],
            store_rstd=True,
            weight_offset=_offset(call),
        )
        return (out.view(x.shape),), (rstd.view(x.shape[:-1]),)

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        import quack.rmsnorm  # noqa: F401

        x, weight = saved.inputs
        rows = x.view(-1, x.shape[-1])
        of_x, of_weight, *_ = _module().rmsnorm_bwd(
            rows, weight, grads[0].view(rows.shape), saved.extra[0].reshape(-1), weight_offset=_offset(call)
        )
        return of_x.view(x.shape), of_weight


class _Softmax(QuackKernel):
    id = "quack.softmax"
    op = "softmax"
    description = "quack's softmax, in CuTe"
    operators = ("quack::_softmax_*",)

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        del call
        from quack.softmax import softmax_fwd

        (x,) = tensors
        return (softmax_fwd(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape),), ()

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        del call
        from quack.softmax import softmax_bwd

        columns = saved.outputs[0].shape[-1]
        gradient = softmax_bwd(grads[0].view(-1, columns), saved.outputs[0].view(-1, columns))
        return (gradient.view(grads[0].shape),)


class _CrossEntropy(QuackKernel):
    id = "quack.cross_entropy"
    op = "cross_entropy"
    description = "quack's cross entropy, in CuTe"
    limits = "sm_90 and later; fp32, fp16 and bf16; dense rows of logits, in whole vectors of 16 bytes"
    operators = ("quack::cross_entropy_*",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        logits, target = call.operands["logits"], call.operands["target"]
        if len(logits.shape) != 2 or len(target.shape) != 1 or target.dtype != "int64":
            return False, "it takes rows of logits and one class index, int64, for each"
        fits, why = super().supports(call)
        if fits and (logits.strides != (logits.shape[1], 1) or target.strides != (1,)):
            return False, "logits and target are not dense"
        return fits, why

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        import torch
        from quack.cross_entropy import cross_entropy_fwd

        logits, target = tensors
        ignored, reduction = call.attributes["ignore_index"], call.attributes["reduction"]
        rows, sums = cross_entropy_fwd(logits, target, ignore_index=ignored, return_lse=True)
        count = (target != ignored).sum().float() if reduction == "mean" else torch.ones_like(rows[:1]).squeeze(0)
        loss = rows if reduction == "none" else rows.sum() / count
        loss = loss if call.attributes["upcast"] else loss.to(logits.dtype)
        return (loss,), (sums, count) if call.phase == "train" else ()

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        from quack.cross_entropy import cross_entropy_bwd

        logits, target = saved.inputs
        sums, count = saved.extra
        of_rows = (grads[0].float() / count).expand(sums.shape).contiguous()
        return cross_entropy_bwd(logits, target, of_rows, sums, ignore_index=call.attributes["ignore_index"]), None

    def saved_like(self, call: TorchCall, *tensors: Any) -> Sequence[Any]:
        import torch

        if call.phase != "train":
            return ()
        return tensors[0].new_empty(tensors[0].shape[0], dtype=torch.float32), tensors[0].new_empty(
            (), dtype=torch.float32
        )


class _LinearCrossEntropy(_CrossEntropy):
    id = "quack.linear_cross_entropy"
    op = "linear_cross_entropy"
    description = "the logits of some rows at a time, their loss by quack, and the gradient in the forward"
    limits = "sm_90 and later; fp32, fp16 and bf16; a mean or a sum"

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        fits, why = is_loss_of_rows(call, reduced=True)
        if not fits:
            return fits, why
        x = call.operands["x"]
        classes = padded(call.operands["weight"].shape[0], _BITS.get(x.dtype, 64) // 8)
        logits = Operand(x.dtype, (x.shape[0], classes), (classes, 1))
        return super().supports(replace(call, operands={"logits": logits, "target": call.operands["target"]}))

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        from quack.cross_entropy import cross_entropy_bwd, cross_entropy_fwd

        ignored = call.attributes["ignore_index"]

        def losses_of(logits: Any, target: Any, factors: Any) -> tuple[Any, Any]:
            losses, sums = cross_entropy_fwd(logits, target, ignore_index=ignored, return_lse=True)
            if factors is None:
                return losses, None
            factors = factors.contiguous()
            return losses, cross_entropy_bwd(logits, target, factors, sums, ignore_index=ignored, inplace_backward=True)

        return loss_in_parts(call, tensors, losses_of, held=1)

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        return scaled_gradients(call, saved, grads[0])

    def saved_like(self, call: TorchCall, *tensors: Any) -> Sequence[Any]:
        return unsaved_gradients(call, tensors)


class _Rope(QuackKernel):
    id = "quack.rope"
    op = "rope"
    description = "quack's rotary embedding, in CuTe"
    limits = "sm_90 and later; fp32, fp16 and bf16; head_dim in multiples of 8; halves of cos and sin that repeat"
    operators = ("quack::_rotary_*",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        fits, why = super().supports(call)
        if not fits:
            return fits, why
        columns = call.operands["q"].shape[-1]
        if columns % 8 or columns > _MOST_HEAD_DIM:
            return False, f"it takes a head_dim in multiples of 8 up to {_MOST_HEAD_DIM}, and this is {columns}"
        if call.phase != "backward" and (wrong := _unaligned(call, ("q", "k"))):  # which a gradient does without
            return False, wrong
        return is_rotation(call)

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        del call
        q, k, cos, sin = tensors
        return [_rotated(x, cos, sin, back=False) for x in (q, k)], ()

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        del call
        return [*(_rotated(x, *saved.inputs[2:], back=True) for x in grads), None, None]


class _GroupedProduct(QuackKernel):
    id = "quack.grouped_matmul"
    op = "grouped_matmul"
    description = "quack's product of groups of rows, in CuTe"
    limits = "sm_90 and later; fp16 and bf16; sizes in multiples of 8"
    operators = ("quack::gemm*",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        operands = {name: operand for name, operand in call.operands.items() if name not in ("offsets", "grad")}
        fits, why = super().supports(replace(call, operands=operands))
        if not fits:
            return fits, why
        x, weight = operands["x"], operands["weight"]
        if x.dtype == "float32" or x.dtype != weight.dtype:
            return False, f"it computes float16 and bfloat16, and these are {x.dtype} and {weight.dtype}"
        if call.operands["offsets"].dtype != "int32":
            return False, f"it takes offsets of int32, and these are {call.operands['offsets'].dtype}"
        if weight.shape[-1] % 8:
            return False, f"it takes matrices with columns in multiples of 8, and these have {weight.shape[-1]}"
        if 1 not in weight.strides[1:]:
            return False, "the matrices are dense neither by rows nor by columns"
        wrong = _unaligned(replace(call, operands={"x": x}), ("x",)) or _unaligned(call, ("weight",), dense=False)
        return not wrong, wrong

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        del call
        from quack.gemm_interface import gemm

        x, weight, offsets = tensors
        return (gemm(x, weight, cu_seqlens_m=_starts(offsets), tuned=False),), ()

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        del call
        from quack.gemm_interface import gemm

        x, weight, offsets = saved.inputs
        starts, (grad,) = _starts(offsets), grads
        of_x = gemm(grad, weight.mT, cu_seqlens_m=starts, tuned=False)
        of_weight = gemm(x.mT, grad, cu_seqlens_k=starts, tuned=False)
        return of_x, of_weight, None


def _starts(offsets: Any) -> Any:
    import torch

    return torch.nn.functional.pad(offsets, (1, 0))


def _rotated(x: Any, cos: Any, sin: Any, *, back: bool) -> Any:
    from quack.rotary import apply_rotary

    angles = [rows.chunk(2, -1)[0].flatten(0, -2) for rows in (cos, sin)]
    rows = x.transpose(1, 2)
    if cos.shape[0] > 1:  # a row for each position of each sequence
        rows = rows.reshape(1, -1, *rows.shape[2:])
    rotated = apply_rotary(rows, *angles, conjugate=back).view(x.shape[0], x.shape[2], x.shape[1], x.shape[3])
    return laid_out(rotated.transpose(1, 2), x)


def _unaligned(call: TorchCall, names: Sequence[str], *, dense: bool = True) -> str:
    for name in names:
        operand = call.operands[name]
        vector = _VECTOR_BITS // _BITS[operand.dtype]
        if (dense and operand.strides[-1] != 1) or any(step % vector for step in operand.strides if step != 1):
            return f"the rows of {name} do not begin at multiples of {_VECTOR_BITS // 8} bytes"
    return ""


def _module() -> Any:
    import sys

    return sys.modules["quack.rmsnorm"]


def _offset(call: TorchCall) -> float:
    return 1.0 if call.attributes["formula"] == "gemma" else 0.0


KERNELS: tuple[TorchKernel, ...] = (
    _RmsNorm(), _Softmax(), _CrossEntropy(), _LinearCrossEntropy(), _Rope(), _GroupedProduct(),
)  # fmt: skip
