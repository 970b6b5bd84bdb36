# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Scaled dot-product attention and its gradient, on arrays of any library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from xpuruntime import _core
from xpuruntime.argument_types import FLAG, check_types
from xpuruntime.ops.call_context import call_context

__all__ = ["attention", "attention_backward"]

ArrayT = TypeVar("ArrayT")
_RESULTS = {"return_lse": FLAG}


class _Options(TypedDict, total=False):
    """Keywords of `attention` that do not decide what it returns."""

    mask: Any
    is_causal: bool | str
    scale: float | None
    dropout_p: float
    rng: Any
    out: Any
    kernel: str | Sequence[str] | None
    policy: Any
    stream: Any
    phase: str | None


@overload
def attention(
    q: ArrayT, k: Any, v: Any, *, return_lse: Literal[False] = False, **options: Unpack[_Options]
) -> ArrayT: ...
@overload
def attention(
    q: ArrayT, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[ArrayT, ArrayT]: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    is_causal: bool | str = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Any = None,
    return_lse: bool = False,
    out: Any = None,
    kernel: str | Sequence[str] | None = None,
    policy: Any = None,
    stream: Any = None,
    phase: str | None = None,
) -> Any:
    """Return ``softmax(scale * q @ k^T + mask) @ v`` for each head.

    A query that sees no key gets 0.

    Parameters
    ----------
    q : array [batch, heads, q_length, head_dim]
        float64, float32, float16 or bfloat16. Any strides that the kernel takes: a view of ``[batch, length, heads,
        head_dim]`` is not copied.
    k, v : array [batch, kv_heads, kv_length, head_dim]
        Of the same dtype. `heads` is a multiple of `kv_heads`; each serves that many heads in a row.
    mask : array, optional
        Broadcasts to ``[batch, heads, q_length, kv_length]``. bool: true where a query sees a key. Of the dtype of `q`
        or float32: added to the scores.
    is_causal : bool or {"top_left", "bottom_right"}
        ``True`` and ``"top_left"``: query i sees keys 0..i. ``"bottom_right"``: the last query sees all keys, the one
        before all but the last, and so on. Together with a mask both hold.
    scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    dropout_p : float
        Probability with which each weight is dropped, 0 <= p < 1.
    rng : int64 array [2], optional
        Seed and offset of the dropout, on the device; needed with `dropout_p`. The same numbers drop the same weights.
    return_lse : bool
        Whether to return the logarithm of the sum of exponentials too, which the gradient needs.
    out : array, optional
        Where to write.
    kernel, policy, stream, phase
        As for `matmul`.

    Returns
    -------
    array [batch, heads, q_length, head_dim], or (that, float32 array [batch, heads, q_length])

    Raises
    ------
    InputError, UnsupportedOperationError, PolicyError
        As for `matmul`.
    """
    if type(return_lse) is not bool:
        check_types(_RESULTS, {"return_lse": return_lse})
    here = call_context(policy, kernel, "attention")
    return _core.op_attention(
        here, q, k, v, mask, rng, out, return_lse, is_causal, scale, dropout_p, phase, stream,
    )  # fmt: skip


def attention_backward(
    grad_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    mask: Any = None,
    is_causal: bool | str = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: Any = None,
    grad_q: Any = None,
    grad_k: Any = None,
    grad_v: Any = None,
    kernel: str | Sequence[str] | None = None,
    policy: Any = None,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """Return the gradients of `attention` for q, k and v.

    Parameters
    ----------
    grad_out : array [batch, heads, q_length, head_dim]
        Gradient that arrives at the output.
    q, k, v, mask, is_causal, scale, dropout_p, rng
        What the forward was given.
    out, lse : array
        What the forward returned, with ``return_lse=True``.
    grad_q, grad_k, grad_v : array, optional
        Where to write; parts of one packed array too.
    kernel, policy, stream
        As for `matmul`. Rules see the phase ``"backward"``.

    Returns
    -------
    (array, array, array)
        In the shapes and dtype of q, k and v.

    Raises
    ------
    InputError, UnsupportedOperationError, PolicyError
        As for `matmul`.
    """
    here = call_context(policy, kernel, "attention")
    gradients: tuple[Any, Any, Any] = _core.op_attention_backward(
        here, grad_out, q, k, v, out, lse, mask, rng, grad_q, grad_k, grad_v, is_causal, scale, dropout_p,
        stream,
    )  # fmt: skip
    return gradients
