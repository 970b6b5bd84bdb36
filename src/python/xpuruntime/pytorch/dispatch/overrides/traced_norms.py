# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Norms in code that is being compiled: traced as operators of xpuruntime, which Inductor does not fuse away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.compiler.strict_exports import is_traced_for_a_program
from xpuruntime.pytorch.coverage.gaps import CoverageGap, report_gaps
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.dispatch.overrides.native import TRACING, Override
from xpuruntime.pytorch.dispatch.route import NATIVE_NAMES, facts_of_call

if TYPE_CHECKING:
    from torch import Tensor

_fused = torch.ops.aten._fused_rms_norm.default
_COMPOSITE = _private_api.dispatch_key("CompositeImplicitAutograd")
_KIND = _private_api.transform_kinds
_FUSED = "torch.compile fuses it there, since PyTorch differentiates no operator of a library under torch.func"
_FIX = "leave this function uncompiled, or differentiate it by autograd"
#: Where the kernels of a backend run; others may run anywhere.
_DEVICES = {"cpu": "cpu", "cuda_raw": "cuda", "cublas": "cuda", "cudnn": "cuda"}


def _layer_norm(native: Callable[..., Any]) -> Callable[..., Any]:
    def layer_norm(
        x: Tensor,
        shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        cudnn_enable: bool = True,
    ) -> Any:
        if not takes_kernel("layer_norm", x.dtype, x.device):
            return native(x, shape, weight, bias, eps, cudnn_enable)
        return torch.ops.xpuruntime.layer_norm(x, None, shape, weight, bias, eps, "", _phase())[0]

    return layer_norm


def _rms_norm(native: Callable[..., Any]) -> Callable[..., Any]:
    def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
        if not takes_kernel("rms_norm", x.dtype, x.device) or (weight is not None and weight.dtype != x.dtype):
            if x.device.type != "cuda" and is_traced_for_a_program():
                # As PyTorch has it off CUDA, where only a policy gives `_fused_rms_norm` a kernel of its own.
                return _private_api.call_kernel_at(_fused, _COMPOSITE, x, shape, weight, eps)[0]
            return native(x, shape, weight, eps)
        return torch.ops.xpuruntime.rms_norm(x, None, shape, weight, eps, "", _phase())[0]

    return rms_norm


def _phase() -> str:
    return "train" if torch.is_grad_enabled() else "infer"


def takes_kernel(op: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether the policy may ask for an xpuruntime kernel in such a call, in some phase or module."""
    active = active_policy()
    if active is None or op not in active.ops or not dtype.is_floating_point:
        return False
    if torch.compiler.is_exporting() or _private_api.compile_context.try_get() is None:
        return False
    import xpuruntime.pytorch.ops.norms  # noqa: F401 - which defines the operators

    # Measured call by call, a kernel wins where a fused norm would cost nothing: only a stated one is taken.
    if not active.names_modules(op) and not any(
        _requests_xrt_kernel(active, op, dtype, device, phase) for phase in ("train", "infer", "backward")
    ):
        return False
    if not _is_differentiated_by_func():
        return True
    report_gaps([CoverageGap(op, f"{op} in a gradient of torch.func", _FUSED, _FIX)], active)
    return False


def _is_differentiated_by_func() -> bool:
    """Say whether a transform of ``torch.func`` that differentiates is active; ``vmap`` alone is none."""
    return any(transform.key() in (_KIND.Grad, _KIND.Jvp) for transform in context.transforms())


def _requests_xrt_kernel(active: CompiledPolicy, op: str, dtype: torch.dtype, device: torch.device, phase: str) -> bool:
    facts = facts_of_call(op, device=device, dtype=dtype, phase=phase, module="", sizes={})
    for kernel_name in active.policy.kernels.compiled_rules.match(facts).use:
        if kernel_name == "auto" or kernel_name in NATIVE_NAMES[op]:
            return False
        if _DEVICES.get(kernel_name.partition(".")[0], device.type) == device.type:
            return True
    return False


OVERRIDES = (
    Override("layer_norm", "layer_norm", (TRACING,), _layer_norm),
    Override("rms_norm", "rms_norm", (TRACING,), _rms_norm),
)
