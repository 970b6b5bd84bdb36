# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`fused_attention`, and what its arguments may be."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError, PolicyError, warn
from xpuruntime.policies.document import Refused
from xpuruntime.policies.kernel_rules import check_kernel
from xpuruntime.pytorch.attention.call import Arguments
from xpuruntime.pytorch.attention.selection import policy_for_xrt
from xpuruntime.pytorch.dispatch.context import thread_policy
from xpuruntime.pytorch.dispatch.overrides.attention import attend
from xpuruntime.pytorch.ops.attention_operator import LIBRARY

if TYPE_CHECKING:
    from torch import Tensor

_NUMBERS = (numbers.Real, torch.SymInt, torch.SymFloat)


def check_number(name: str, value: Any, *, optional: bool = False) -> None:
    """Raise InputError for an argument that is no number."""
    if not (value is None and optional) and not isinstance(value, _NUMBERS):
        raise InputError(f"{name} is {type(value).__name__}. Fix: give a number")


def traced_for_onnx() -> bool:
    """Say whether a call is traced into an ONNX model, which has no xpuruntime operators."""
    return bool(torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export())


def warn_dropped_in_onnx(function: str, kernel: str) -> None:
    """Warn that a kernel which a call names is not in the ONNX model that the call is traced into."""
    if kernel:
        msg = (
            f"{function}(kernel={kernel!r}) is exported without its kernel: a call in an ONNX model names none. Fix: "
            "pass a policy to export, with a rule for the module that has it"
        )
        warn(msg)


LIBRARY.define(
    "fused_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0,"
    ' bool is_causal=False, float? scale=None, *, bool enable_gqa=False, str kernel="") -> Tensor'
)


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    enable_gqa: bool = False,
    kernel: str = "",
) -> Tensor:
    query, key, value, attn_mask = _cast((query, key, value, attn_mask))

    def natively() -> Tensor:
        with thread_policy(None):
            return torch.ops.aten.scaled_dot_product_attention.default(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

    active = policy_for_xrt(kernel)
    arguments = Arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return attend(active, natively, arguments, kernel, explicit=True)


def _cast(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return tensors in the type that autocast asks for, as it does for ``scaled_dot_product_attention``."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor | None) -> Tensor | None:
        if x is None or not x.is_floating_point() or x.dtype == torch.float64 or x.device.type != device:
            return x
        return x.to(dtype)

    return tuple(cast(x) for x in tensors)


for _key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
    LIBRARY.impl("fused_attention", _fused_attention, _key)

_operator = torch.ops.xpuruntime.fused_attention.default


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    enable_gqa: bool = False,
    kernel: str | Sequence[str] | None = None,
) -> Tensor:
    """Return ``softmax(scale * query @ key^T + attn_mask) @ value`` for each head, without the scores in memory.

    Parameters
    ----------
    query : Tensor [batch, heads, q_length, head_dim]
        Any number of dimensions before `heads`, also none.
    key, value : Tensor [batch, kv_heads, kv_length, head_dim]
        Of the dtype and device of `query`.
    attn_mask : Tensor, optional
        Broadcasts to ``[batch, heads, q_length, kv_length]``. bool: true where a query sees a key. Floating point:
        added to the scores.
    dropout_p : float
        Probability with which each weight is dropped. The random numbers come from PyTorch's generator of the device;
        they are not those that ``scaled_dot_product_attention`` draws.
    is_causal : bool
        Whether query i sees keys 0..i only; not together with `attn_mask`.
    scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    enable_gqa : bool
        Whether `key` and `value` may have fewer heads than `query`, a divisor; each serves that many in a row.
    kernel : str or sequence of str, optional
        Kernels to choose from, in order, by their names in a policy for PyTorch: ``"cuda_raw.flash_attention_v2"``,
        ``"cudnn.sdpa"``, ``"cpu.reference"`` are xpuruntime's, ``"torch.flash"`` (or ``"flash_v2"``),
        ``"torch.cudnn"``, ``"torch.efficient"``, ``"torch.math"`` PyTorch's, ``"torch"`` whatever it chooses. Default:
        what the active policy asks for; without that, ``cuda_raw.flash_attention_v2`` on CUDA for what it can serve,
        and PyTorch's own choice for the rest and on the CPU, where the one xpuruntime kernel is a slow reference.

    Returns
    -------
    Tensor [batch, heads, q_length, head_dim]
        Of the dtype of `query`; under autocast, of the dtype that this asks for. A query that sees no key gets 0.

    Raises
    ------
    InputError
        An operand is no tensor, `attn_mask` is on another device, or an option has another type.
    PolicyError
        `kernel` names what is none for attention.
    UnsupportedOperationError
        None of `kernel` can serve the call, or none that a strict policy asks for; it has the reason of each.
    RuntimeError
        The arguments do not fit together, in PyTorch's words.

    Notes
    -----
    It is differentiable, also under ``torch.func``, and a gradient can be differentiated once more: then PyTorch's
    unfused attention serves, which is said by a warning, or refused where `kernel` is given or the policy is strict.
    With dropout there is no second derivative by xpuruntime kernels. ``torch.compile`` keeps it whole: in the graph it
    is ``xpuruntime::attention``, which obeys the active policy when the graph runs.

    Examples
    --------
    >>> import torch
    >>> from xpuruntime.pytorch.ops import fused_attention
    >>> q = torch.ones(1, 2, 3, 4)
    >>> fused_attention(q, q, q, is_causal=True, kernel="cpu.reference")[0, 0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    _check(query, key, value, attn_mask)
    check_number("dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise InputError(f"dropout_p is {dropout_p}. Fix: give a probability, from 0 to 1")
    check_number("scale", scale, optional=True)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, (bool, torch.SymBool)):
            raise InputError(f"{name} is {type(flag).__name__}. Fix: give True or False")
    kernel_names = _joined(kernel)
    if traced_for_onnx():
        warn_dropped_in_onnx("fused_attention", kernel_names)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return _operator(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa=enable_gqa, kernel=kernel_names
    )


def _check(query: Any, key: Any, value: Any, attn_mask: Any) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(tensor, torch.Tensor) and not (tensor is None and name == "attn_mask"):
            raise InputError(f"{name} is {type(tensor).__name__}. Fix: give a torch.Tensor")
    if attn_mask is not None and attn_mask.device != query.device:  # PyTorch reads one on meta as if it had contents
        raise InputError(f"attn_mask is on {attn_mask.device} and query on {query.device}: move one to the other")


def _joined(kernel: Any) -> str:
    if kernel is None:
        return ""
    kernel_names = (kernel,) if isinstance(kernel, str) else kernel
    if (
        not isinstance(kernel_names, (list, tuple))
        or not kernel_names
        or not all(isinstance(kernel_name, str) for kernel_name in kernel_names)
    ):
        raise PolicyError(f"kernel= is {kernel!r}: name a kernel, or several in a list")
    return ",".join(_checked(kernel_name) for kernel_name in kernel_names)


def _checked(kernel_name: str) -> str:
    try:
        return check_kernel(kernel_name, "attention")
    except Refused as refused:
        raise PolicyError(f"kernel=: {refused}") from None
