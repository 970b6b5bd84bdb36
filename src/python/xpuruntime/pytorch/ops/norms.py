# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`fused_layernorm` and `fused_rms_norm`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.nn import functional

from xpuruntime.errors import InputError, PolicyError, UnsupportedOperationError
from xpuruntime.policies.document import Refused
from xpuruntime.policies.kernel_rules import check_kernel
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import active_policy, has_tangent
from xpuruntime.pytorch.dispatch.overrides.norms import rms_eps
from xpuruntime.pytorch.ops import norm_autograd, norm_operators  # noqa: F401 - the latter defines the operators
from xpuruntime.pytorch.ops.attention import check_number, traced_for_onnx, warn_dropped_in_onnx

if TYPE_CHECKING:
    from torch import Tensor

_COMPILED_TRANSFORM = (
    "fused_layernorm and fused_rms_norm with kernel= run uncompiled under torch.func; leave kernel= out to have "
    "PyTorch's own compiled, or leave fullgraph=True out"
)


@overload
def fused_layernorm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    residual: None = ...,
    kernel: str | None = ...,
) -> Tensor: ...
@overload
def fused_layernorm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    eps: float = ...,
    *,
    residual: Tensor,
    kernel: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
def fused_layernorm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    kernel: str | None = None,
) -> Any:
    """Return the layer norm of `input` over its last dimensions, by one kernel, as ``F.layer_norm`` defines it.

    Parameters
    ----------
    input : Tensor [.., *normalized_shape]
        float64, float32, float16 or bfloat16. Under autocast on CUDA it is computed in float32, as PyTorch does it.
    normalized_shape : int or list of int
        Sizes of the last dimensions of `input`.
    weight, bias : Tensor [*normalized_shape], optional
        In the dtype of `input`, or float32.
    eps : float
        Added to the variance.
    residual : Tensor, optional
        As `input`; added to it first, in the same pass over memory.
    kernel : str, optional
        Kernel for this call and its backward, whatever the policy says: ``"cuda_raw.layer_norm"``. By default the
        policy active chooses; without one, a kernel of this library, or PyTorch's where none can serve.

    Returns
    -------
    Tensor, or (Tensor, Tensor)
        With a residual: the norm, and the sum that was normalized.

    Raises
    ------
    InputError
        An argument is no tensor, or shapes, dtypes or devices do not fit.
    PolicyError
        `kernel` is no kernel of a layer norm.
    UnsupportedOperationError
        `kernel` cannot serve this call; the message says why.

    Examples
    --------
    >>> import torch
    >>> from xpuruntime.pytorch.ops import fused_layernorm
    >>> fused_layernorm(torch.tensor([[1.0, 3.0]]), [2]).round().tolist()
    [[-1.0, 1.0]]
    """
    shape = _shape(input, normalized_shape)
    _check_parameters(input, shape, residual=residual, weight=weight, bias=bias)
    check_number("eps", eps)
    kernel_name = _word(kernel, "layer_norm")
    input, residual, weight, bias = _as_autocast(input, residual, weight, bias)
    if _is_native_call("fused_layernorm", kernel_name, input, residual, weight, bias):
        total = input if residual is None else input + residual
        out = functional.layer_norm(total, shape, weight, bias, eps)
        return out if residual is None else (out, total)
    if residual is None and not kernel_name and _goes_to_dispatcher("layer_norm"):
        return functional.layer_norm(input, shape, weight, bias, eps)
    out, total, _, _ = norm_autograd.layer_norm(input, residual, shape, weight, bias, eps, kernel_name, phase_of_norm())
    return out if residual is None else (out, total)


@overload
def fused_rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = ...,
    eps: float | None = ...,
    *,
    residual: None = ...,
    kernel: str | None = ...,
) -> Tensor: ...
@overload
def fused_rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = ...,
    eps: float | None = ...,
    *,
    residual: Tensor,
    kernel: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
def fused_rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    kernel: str | None = None,
) -> Any:
    """Return the RMS norm of `input` over its last dimensions, by one kernel, as ``F.rms_norm`` defines it.

    Parameters
    ----------
    input, normalized_shape, weight, residual, kernel
        As for `fused_layernorm`.
    eps : float, optional
        Added to the mean of squares; by default the machine epsilon of float32, or of float64 for float64.

    Returns
    -------
    Tensor, or (Tensor, Tensor)
        With a residual: the norm, and the sum that was normalized.

    Raises
    ------
    InputError, PolicyError, UnsupportedOperationError
        As for `fused_layernorm`.

    Examples
    --------
    >>> import torch
    >>> from xpuruntime.pytorch.ops import fused_rms_norm
    >>> fused_rms_norm(torch.tensor([[3.0, 4.0]]), [2]).mul(5).round().tolist()
    [[4.0, 6.0]]
    """
    shape = _shape(input, normalized_shape)
    _check_parameters(input, shape, residual=residual, weight=weight)
    check_number("eps", eps, optional=True)
    kernel_name = _word(kernel, "rms_norm")
    input, residual, weight, _ = _as_autocast(input, residual, weight, None)
    if _is_native_call("fused_rms_norm", kernel_name, input, residual, weight):
        total = input if residual is None else input + residual
        wide = total if weight is None else total.to(weight.dtype)  # PyTorch's takes one type
        out = functional.rms_norm(wide, shape, weight, rms_eps(input.dtype, eps)).to(input.dtype)
        return out if residual is None else (out, total)
    same = weight is None or weight.dtype == input.dtype
    if residual is None and not kernel_name and same and _goes_to_dispatcher("rms_norm"):
        return functional.rms_norm(input, shape, weight, eps)
    out, total, _ = norm_autograd.rms_norm(input, residual, shape, weight, eps, kernel_name, phase_of_norm())
    return out if residual is None else (out, total)


def _goes_to_dispatcher(op: str) -> bool:
    """Say whether PyTorch's own operator is to be called: where a policy replaces its kernel."""
    if torch.compiler.is_compiling():
        return False
    active = active_policy()
    return active is not None and op in active.ops


def _is_native_call(function: str, kernel_name: str, *operands: Tensor | None) -> bool:
    """Say whether a call uses PyTorch's own operators: for derivatives that xpuruntime lacks, and for ONNX models."""
    # Derivatives are those of forward mode, where naming a kernel is an `UnsupportedOperationError`, and in compiled
    # code all of ``torch.func``, where a call that names one is left uncompiled.
    if torch.compiler.is_compiling():
        if traced_for_onnx():
            warn_dropped_in_onnx(function, kernel_name)
            return True
        if not _private_api.has_transforms():
            return False
        if kernel_name:
            torch._dynamo.graph_break(msg=_COMPILED_TRANSFORM)
    elif _private_api.forward_level() < 0:
        return False
    elif kernel_name and any(has_tangent(operand) for operand in operands):
        raise UnsupportedOperationError(norm_autograd.NO_FORWARD_MODE)
    return not kernel_name


def phase_of_norm() -> str:
    """Return the phase of a call, as the operators of norms are given it."""
    if torch.compiler.is_compiling():
        return "train" if torch.is_grad_enabled() else "infer"
    return context.phase()


def _shape(input: Any, normalized_shape: Any) -> list[int]:
    if not isinstance(input, torch.Tensor):
        raise InputError(f"input is {type(input).__name__}. Fix: give a torch.Tensor")
    if not input.is_floating_point():
        raise InputError(f"input is {input.dtype}. Fix: give float64, float32, float16 or bfloat16")
    several = isinstance(normalized_shape, Iterable) and getattr(normalized_shape, "ndim", 1) > 0
    try:
        shape = [_size(size) for size in (normalized_shape if several else (normalized_shape,))]
    except (TypeError, RuntimeError):
        raise InputError(f"normalized_shape is {normalized_shape!r}. Fix: give a size, or a list of sizes") from None
    if not shape:
        raise InputError("normalized_shape is empty. Fix: name the sizes of the last dimensions of input, at least one")
    if len(shape) > input.dim() or list(input.shape[-len(shape) :]) != shape:
        raise InputError(
            f"input is {list(input.shape)} and normalized_shape {shape}; the last dimensions of input must be these"
        )
    return shape


def _size(size: Any) -> Any:
    return size if isinstance(size, (int, torch.SymInt)) else index(size)


def _check_parameters(input: Tensor, shape: list[int], **parameters: Tensor | None) -> None:
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        if not isinstance(parameter, torch.Tensor):
            raise InputError(f"{name} is {type(parameter).__name__}. Fix: give a torch.Tensor")
        wanted = list(input.shape) if name == "residual" else shape
        if list(parameter.shape) != wanted:
            raise InputError(f"{name} is {list(parameter.shape)}. Fix: give {wanted}")
        if parameter.device != input.device:
            raise InputError(f"{name} is on {parameter.device} and input on {input.device}: move one to the other")
        if parameter.dtype != input.dtype and (name == "residual" or parameter.dtype != torch.float32):
            alternative = "" if name == "residual" else " or torch.float32"
            raise InputError(f"{name} is {parameter.dtype}. Fix: give {input.dtype}, the dtype of input{alternative}")


def _word(kernel: Any, op: str) -> str:
    if kernel is None:
        return ""
    try:
        if not isinstance(kernel, str):
            raise Refused(f"{kernel!r} is no name of a kernel")
        return check_kernel(kernel, op)
    except Refused as refused:
        raise PolicyError(f"kernel=: {refused}") from None


def _as_autocast(input: Tensor, *others: Tensor | None) -> Any:
    """Return the operands in float32 where autocast has PyTorch's own norms run in it: on CUDA."""
    if not input.is_cuda or not torch.is_autocast_enabled("cuda") or input.dtype == torch.float64:
        return (input, *others)
    return tuple(tensor if tensor is None else tensor.float() for tensor in (input, *others))
