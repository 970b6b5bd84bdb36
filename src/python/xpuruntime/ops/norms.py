# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Layer norm, RMS norm and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from xpuruntime import _core
from xpuruntime.argument_types import FLAG, check_types
from xpuruntime.errors import InputError
from xpuruntime.ops.call_context import call_context

_RESULTS = {"return_sum": FLAG, "return_stats": FLAG}
_BIAS = {"has_bias": FLAG}
ArrayT = TypeVar("ArrayT")


class _Options(TypedDict, total=False):
    """Keywords of norms that do not decide what they return."""

    eps: float
    out: Any
    sum_out: Any
    kernel: str | Sequence[str] | None
    policy: Any
    stream: Any
    phase: str | None


@overload
def layer_norm(
    x: ArrayT,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    *,
    return_sum: Literal[False] = False,
    return_stats: Literal[False] = False,
    **options: Unpack[_Options],
) -> ArrayT: ...
@overload
def layer_norm(
    x: ArrayT,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    *,
    return_sum: Literal[True],
    return_stats: bool = False,
    **options: Unpack[_Options],
) -> tuple[ArrayT, ...]: ...
@overload
def layer_norm(
    x: ArrayT,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    *,
    return_sum: bool = False,
    return_stats: Literal[True],
    **options: Unpack[_Options],
) -> tuple[ArrayT, ...]: ...
def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    *,
    eps: float = 1e-5,
    return_sum: bool = False,
    return_stats: bool = False,
    out: Any = None,
    sum_out: Any = None,
    kernel: str | Sequence[str] | None = None,
    policy: Any = None,
    stream: Any = None,
    phase: str | None = None,
) -> Any:
    """Return ``(s - mean(s)) / sqrt(var(s) + eps) * weight + bias`` over the last dimension, with ``s = x + residual``.

    Parameters
    ----------
    x : array [.., columns]
        float64, float32, float16 or bfloat16.
    weight, bias : array [columns], optional
        In the dtype of `x`, or float32.
    residual : array [.., columns], optional
        Added first, in the same pass over memory.
    eps : float
        Added to the variance.
    return_sum : bool
        Whether to return ``s`` too, rounded to the dtype of `x`; needs a residual.
    return_stats : bool
        Whether to return the mean and the reciprocal standard deviation too, which the gradient needs.
    out, sum_out : array [.., columns], optional
        Where to write. They may be `x` or `residual` itself. `sum_out` needs ``return_sum=True``.
    kernel, policy, stream, phase
        As for `matmul`.

    Returns
    -------
    array [.., columns], or a tuple
        ``out``, then as far as asked for ``sum``, ``mean`` and ``rstd``; the last two are [..], float64
        where `x` is, else float32.

    Raises
    ------
    InputError, UnsupportedOperationError, PolicyError
        As for `matmul`.
    """
    _check_results(return_sum, return_stats, sum_out)
    here = call_context(policy, kernel, "layer_norm")
    return _core.op_norm(
        here, False, x, residual, weight, bias, out, sum_out, return_sum, return_stats, eps, phase, stream,
    )  # fmt: skip


@overload
def rms_norm(
    x: ArrayT,
    weight: Any = None,
    residual: Any = None,
    *,
    return_sum: Literal[False] = False,
    return_stats: Literal[False] = False,
    **options: Unpack[_Options],
) -> ArrayT: ...
@overload
def rms_norm(
    x: ArrayT,
    weight: Any = None,
    residual: Any = None,
    *,
    return_sum: Literal[True],
    return_stats: bool = False,
    **options: Unpack[_Options],
) -> tuple[ArrayT, ...]: ...
@overload
def rms_norm(
    x: ArrayT,
    weight: Any = None,
    residual: Any = None,
    *,
    return_sum: bool = False,
    return_stats: Literal[True],
    **options: Unpack[_Options],
) -> tuple[ArrayT, ...]: ...
def rms_norm(
    x: Any,
    weight: Any = None,
    residual: Any = None,
    *,
    eps: float = 1e-6,
    return_sum: bool = False,
    return_stats: bool = False,
    out: Any = None,
    sum_out: Any = None,
    kernel: str | Sequence[str] | None = None,
    policy: Any = None,
    stream: Any = None,
    phase: str | None = None,
) -> Any:
    """Return ``s / sqrt(mean(s^2) + eps) * weight`` over the last dimension, with ``s = x + residual``.

    Parameters and errors are those of `layer_norm`; there is no bias and no mean.

    Returns
    -------
    array [.., columns], or a tuple
        ``out``, then as far as asked for ``sum`` and ``rstd``.
    """
    _check_results(return_sum, return_stats, sum_out)
    here = call_context(policy, kernel, "rms_norm")
    return _core.op_norm(
        here, True, x, residual, weight, None, out, sum_out, return_sum, return_stats, eps, phase, stream,
    )  # fmt: skip


def layer_norm_backward(
    grad_out: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any = None,
    *,
    has_bias: bool = False,
    grad_sum: Any = None,
    grad_x: Any = None,
    kernel: str | Sequence[str] | None = None,
    policy: Any = None,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """Return the gradients of `layer_norm` for x, weight and bias.

    Parameters
    ----------
    grad_out : array [.., columns]
        Gradient that arrives at the output.
    x : array [.., columns]
        What was normalized: the sum, where there was a residual.
    mean, rstd : array [..]
        What the forward returned, with ``return_stats=True``.
    weight : array [columns], optional
        As in the forward.
    has_bias : bool
        Whether the gradient of a bias is wanted.
    grad_sum : array [.., columns], optional
        Gradient that arrives at the returned sum. It is added to the gradient of `x`, which is also that of the
        residual.
    grad_x : array, optional
        Where to write. It may be `grad_out`, `x` or `grad_sum` itself.
    kernel, policy, stream
        As for `matmul`. Rules see the phase ``"backward"``.

    Returns
    -------
    (array [.., columns], array [columns] or None, array [columns] or None)
        Of x, weight and bias; ``None`` where there is none. In the dtypes of `x` and `weight`.

    Raises
    ------
    InputError, UnsupportedOperationError, PolicyError
        As for `matmul`.
    """
    if type(has_bias) is not bool:
        check_types(_BIAS, {"has_bias": has_bias})
    here = call_context(policy, kernel, "layer_norm")
    gradients = _core.op_norm_backward(
        here, False, grad_out, x, weight, mean, rstd, grad_sum, grad_x, weight is not None, has_bias, stream,
    )  # fmt: skip
    return _gradients(gradients, weight is not None, has_bias)


def rms_norm_backward(
    grad_out: Any,
    x: Any,
    rstd: Any,
    weight: Any = None,
    *,
    grad_sum: Any = None,
    grad_x: Any = None,
    kernel: str | Sequence[str] | None = None,
    policy: Any = None,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Return the gradients of `rms_norm` for x and weight.

    Parameters and errors are those of `layer_norm_backward`.

    Returns
    -------
    (array [.., columns], array [columns] or None)
    """
    here = call_context(policy, kernel, "rms_norm")
    gradients = _core.op_norm_backward(
        here, True, grad_out, x, weight, None, rstd, grad_sum, grad_x, weight is not None, False, stream,
    )  # fmt: skip
    return _gradients(gradients, weight is not None, False)[:2]


def _check_results(return_sum: bool, return_stats: bool, sum_out: Any) -> None:
    if type(return_sum) is not bool or type(return_stats) is not bool:
        check_types(_RESULTS, {"return_sum": return_sum, "return_stats": return_stats})
    if sum_out is not None and not return_sum:
        raise InputError("sum_out is given without return_sum=True: nothing would be written to it")


def _gradients(gradients: Any, has_weight: bool, has_bias: bool) -> tuple[Any, Any, Any]:
    arrays = list(gradients) if has_weight or has_bias else [gradients]
    grad_x = arrays.pop(0)
    grad_weight = arrays.pop(0) if has_weight else None
    grad_bias = arrays.pop(0) if has_bias else None
    return grad_x, grad_weight, grad_bias
