# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Products of matrices, on arrays of any library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from xpuruntime import _core
from xpuruntime.ops.call_context import ambient_context, call_context

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["matmul"]

ArrayT = TypeVar("ArrayT")
_op_matmul = _core.op_matmul


@overload
def matmul(
    a: ArrayT,
    b: Any,
    bias: Any = ...,
    activation: str | None = ...,
    out: Any = ...,
    *,
    scale_a: Any = ...,
    scale_b: Any = ...,
    out_dtype: None = ...,
    kernel: str | Sequence[str] | None = ...,
    policy: Any = ...,
    stream: Any = ...,
    phase: str | None = ...,
) -> ArrayT: ...
@overload
def matmul(
    a: Any,
    b: Any,
    bias: Any = ...,
    activation: str | None = ...,
    out: Any = ...,
    *,
    scale_a: Any = ...,
    scale_b: Any = ...,
    out_dtype: str,
    kernel: str | Sequence[str] | None = ...,
    policy: Any = ...,
    stream: Any = ...,
    phase: str | None = ...,
) -> Any: ...
def matmul(
    a: Any,
    b: Any,
    bias: Any = None,
    activation: str | None = None,
    out: Any = None,
    *,
    scale_a: Any = None,
    scale_b: Any = None,
    out_dtype: str | None = None,
    kernel: str | Sequence[str] | None = None,
    policy: Any = None,
    stream: Any = None,
    phase: str | None = None,
) -> Any:
    """Return ``activation(a @ b + bias)``.

    Parameters
    ----------
    a : array [.., m, k]
        float64, float32, float16, bfloat16 or float8_e4m3fn. Any strides: a transposed view is not copied.
    b : array [.., k, n]
        Of the same dtype. Leading dimensions are batches, and broadcast as a whole.
    bias : array [n], optional
    activation : {"relu", "gelu", "gelu_tanh", "silu"}, optional
        ``"gelu"`` is the one by the error function.
    out : array [.., m, n], optional
        Where to write. It may not share memory with the inputs.
    scale_a, scale_b : float32 array of one element, optional
        Factors of float8 inputs.
    out_dtype : str, optional
        ``"float32"`` for 16-bit inputs; for float8 inputs also ``"float16"``, and bfloat16 where nothing is stated.
    kernel : str or sequence of str, optional
        The kernel to run, by id such as ``"cublas.cublasLt"`` or by family, or several in order of preference. What
        cannot serve is refused, whatever the policy's mode.
    policy : Policy, KernelPolicy, path or dict, optional
        Instead of the ambient policy.
    stream : Stream, stream of another library, or int, optional
        On CUDA. Default: the current stream of the library of the arrays, or the device's default stream. With another
        stream than its library's current one, both are ordered before and after the call.
    phase : {"infer", "train", "backward"}, optional
        For rules by phase; default ``"infer"``.

    Returns
    -------
    array [.., m, n]
        Of the library of `a`, or `out`. On CUDA it is complete in the order of the stream.

    Raises
    ------
    InputError
        Names the argument whose shape, dtype, device or strides do not fit.
    UnsupportedOperationError
        No kernel can serve the call, or not the one that is asked for: names every candidate and its reason.
    PolicyError
        The policy or the kernel is none.
    """
    here = ambient_context() if policy is None and kernel is None else call_context(policy, kernel, "matmul")
    return _op_matmul(
        here, a, b, bias, scale_a, scale_b, out, activation, out_dtype, phase, stream,
    )  # fmt: skip
