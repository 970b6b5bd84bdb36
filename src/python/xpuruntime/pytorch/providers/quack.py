# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""quack's CuTe kernels for Hopper and later, untuned, so that the same call runs the same kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.ops.torch_kernels import TorchKernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.ops.torch_kernels import Saved, TorchCall

__all__ = ["CUTE", "KERNELS"]

#: What CuTe kernels are compiled by: a change of one changes the kernel.
CUTE = ("nvidia-cutlass-dsl>=4.7", "apache-tvm-ffi>=0.1.11,<0.2", "torch-c-dlpack-ext")
_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
_VECTOR_BITS = 128
_FIRST_ARCH = 90
#: Columns and bits of a column from which the gradient has not enough shared memory.
_WIDE = (128 * 1024, 32)


class _RmsNorm(TorchKernel):
    id = "quack.rms_norm"
    op = "rms_norm"
    description = "quack's RMS norm, in CuTe"
    limits = "sm_90 and later; fp32, fp16 and bf16; columns in whole vectors of 16 bytes; a weight"
    distributions = ("quack-kernels>=0.6.5,<0.7", *CUTE)
    install = 'pip install "xpuruntime[quack]"'
    environment = ("QUACK_*", "CUTE_DSL_*")
    operators = ("quack::_rmsnorm_*", "quack::rmsnorm_*")
    device_kernels = ("kernel_cutlass_kernel_quack*",)

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        if not call.arch or int(call.arch.removeprefix("sm")) < _FIRST_ARCH:
            return False, f"it runs on sm_90 and later, and the operands are on {call.arch or call.device}"
        x, weight = call.operands["x"], call.operands.get("weight")
        if weight is None:
            return False, "it is used with a weight"
        for name, one in call.operands.items():
            if one.dtype not in _BITS:
                return False, f"it computes {', '.join(_BITS)}, and {name} is {one.dtype}"
            if one.alignment < _VECTOR_BITS // 8:
                return False, f"{name} does not begin at a multiple of {_VECTOR_BITS // 8} bytes"
        columns, bits = x.shape[-1], _BITS[x.dtype]
        if columns * bits % _VECTOR_BITS:
            return False, f"it takes columns in multiples of {_VECTOR_BITS // bits}, and these are {columns}"
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


def _module() -> Any:
    import sys

    return sys.modules["quack.rmsnorm"]


def _offset(call: TorchCall) -> float:
    return 1.0 if call.attributes["formula"] == "gemma" else 0.0


KERNELS: tuple[TorchKernel, ...] = (_RmsNorm(),)
