# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Table of the functions whose kernel no policy can replace: their calls are reported, or refused under ``strict``.

`dispatch.overrides.report_only` makes an override of each row, and `gaps` finds their calls in a traced graph.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import attention as torch_attention

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention.call import FAST_PATH, FLEX, VARLEN, WITH_WEIGHTS, EntryPoint
from xpuruntime.pytorch.dispatch.overrides.native import IN_PYTHON
from xpuruntime.pytorch.dispatch.route import DEFAULT_ID, NATIVE_NAMES

if TYPE_CHECKING:
    from torch import Tensor

#: The function that computes attention of ``nn.MultiheadAttention``, and where it is asked to return the weights.
MULTI_HEAD = "multi_head_attention_forward"


class UnservedCall(NamedTuple):
    """What rules may ask for of one call: a tensor of its sizes and device, its dtype, and what is known of its sizes.

    Of sizes that are ``None``, none is known.
    """

    like: Tensor
    dtype: torch.dtype
    sizes: tuple[tuple[str, int], ...] | None


class Unserved(NamedTuple):
    """A function of PyTorch whose kernel no policy can replace."""

    name: str
    keys: tuple[str, ...]
    entry: EntryPoint
    group: str
    title: str
    call: Callable[..., UnservedCall | None]
    module: str = ""
    reasons: Callable[[Tensor], tuple[tuple[str, str], ...]] = lambda _: ()
    gradient: str = ""
    recorded: bool = True
    autograd_keys: tuple[str, ...] = ()


def _head_dim(query: Tensor) -> tuple[tuple[str, int], ...]:
    return (("head_dim", int(query.shape[-1])),)


# --- flex_attention without a compiler: unfused, whatever its option says. `flex_options` decides compiled calls.

_UNFUSED = FLEX._replace(
    kernel_names={
        name: "torch.math" if kernel_name == FLEX.default else kernel_name
        for name, kernel_name in FLEX.kernel_names.items()
    },
    default="torch.math",
)
_COMPILE = "without torch.compile, flex_attention is unfused; compile the code that calls it, by Inductor"
_FUSED = tuple((name, _COMPILE) for name, kernel in _UNFUSED.kernel_names.items() if kernel != "torch.math")


def _flex_call(query: Tensor, *_: Any, **__: Any) -> UnservedCall | None:
    # Of others nothing is computed, or what wraps them comes here again.
    plain = type(query) in (torch.Tensor, torch.nn.Parameter)
    return UnservedCall(query, query.dtype, _head_dim(query)) if plain else None


_flex = functools.partial(
    Unserved,
    keys=("HigherOrderDense",),
    entry=_UNFUSED,
    group="flex_attention",
    call=_flex_call,
    module="torch._higher_order_ops.flex_attention",
    reasons=lambda _: _FUSED,
)

# --- varlen_attn: PyTorch's FlashAttention, or what is active in its place

_PACKED = "torch.nn.attention.varlen"
#: What PyTorch's registry calls FlashAttention 3, and implementations that leave packed sequences as they are.
_FLASH_V3 = "FA3"
_LEAVE_PACKED = (None, "xpuruntime")


def _varlen_reasons(query: Tensor) -> tuple[tuple[str, str], ...]:
    if query.is_cuda and _private_api.varlen_uses_cudnn(query.device.index):
        why = "this PyTorch gives varlen_attn to cuDNN, and a call has no option for it"
        return tuple((kernel_name, why) for kernel_name in ("flash_v2", "torch.flash", "flash_v3", "fa3"))
    reasons = [(name, "this PyTorch has cuDNN turned off for varlen_attn") for name in ("cudnn", "torch.cudnn")]
    active = torch_attention.current_flash_attention_impl()
    if active not in _LEAVE_PACKED:
        why = f"{active} is active in its place; torch.nn.attention.restore_flash_attention_impl() restores it"
        reasons += [(name, why) for name in ("flash_v2", "torch.flash")]
    if active != _FLASH_V3:
        why = "FlashAttention 3 is not active in PyTorch's registry"
        reasons += [(name, why) for name in ("flash_v3", "fa3")]
    return tuple(reasons)


def _varlen(name: str, query_at: int, *, autograd_keys: tuple[str, ...] = (), backward: bool = False) -> Unserved:
    def call(*args: Any, **_: Any) -> UnservedCall:
        query = args[query_at]
        return UnservedCall(query, query.dtype, _head_dim(query))

    gradient = "the gradient of varlen_attn of {}"
    return Unserved(
        f"torch_attn::{name}",
        ("CPU", "CUDA"),
        VARLEN,
        "varlen_attn",
        gradient if backward else "varlen_attn of {}",
        call,
        _PACKED,
        _varlen_reasons,
        "" if backward else gradient,
        autograd_keys=autograd_keys,
    )


# --- nn.MultiheadAttention that calls no function for attention


def _multi_head(query: Tensor, width: int, heads: int) -> UnservedCall:
    dtype, kind = query.dtype, query.device.type
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    return UnservedCall(query, dtype, (("head_dim", width // heads),))


_TAKES = inspect.signature(torch.nn.functional.multi_head_attention_forward).parameters
_LOOKED_AT = tuple(
    (name, list(_TAKES).index(name), _TAKES[name].default)
    for name in ("query", "embed_dim_to_check", "num_heads", "need_weights")
)


def _weights_call(*args: Any, **kwargs: Any) -> UnservedCall | None:
    query, width, heads, wanted = (
        kwargs[name] if name in kwargs else args[position] if position < len(args) else default
        for name, position, default in _LOOKED_AT
    )
    # What wraps the queries comes here again.
    return _multi_head(query, width, heads) if wanted and not torch.overrides.has_torch_function((query,)) else None


def _fast_path_call(query: Tensor, _key: Tensor, _value: Tensor, width: int, heads: int, *_: Any) -> UnservedCall:
    return _multi_head(query, width, heads)


def _multi_head_row(
    name: str, keys: tuple[str, ...], entry: EntryPoint, call: Callable[..., UnservedCall | None], *, recorded: bool
) -> Unserved:
    title = f"attention of {{}} in {entry.name}"
    gradient = f"the gradient of {title}"
    return Unserved(
        name, keys, entry, "multi_head_attention", title, call,
        module="torch.nn.functional" if keys == (IN_PYTHON,) else "", gradient=gradient, recorded=recorded,
    )  # fmt: skip


# --- recurrent layers: oneDNN's for the LSTM on the CPU, cuDNN's for all of them on CUDA. Where PyTorch multiplies step
# by step instead, the products pass their own overrides, and none of these operators is called.

_LAYER = EntryPoint(
    "a recurrent layer",
    {"torch": "torch.rnn", "torch.rnn": "torch.rnn"},
    "torch.rnn",
    "the products of a recurrent layer are inside one kernel of PyTorch's, and no other can serve there",
    "matmul",
)


def _recurrent(name: str, key: str) -> Unserved:
    def call(x: Tensor, *_: Any, **__: Any) -> UnservedCall:
        return UnservedCall(x, x.dtype, ())

    return Unserved(name, (key,), _LAYER, "matmul", f"aten::{name} of {{}}", call, recorded=False)


RECURRENT = tuple(
    _recurrent(f"{name}{form}", key)
    for name, key in (("mkldnn_rnn_layer", "CPU"), ("_cudnn_rnn", "CUDA"))
    for form in ("", "_backward")
)


# --- operators of other packages, and products that this library has no kernel for: `operation_table` names them


#: Operators that multiply numbers of all types; `matmul` of a policy includes them where these are floats.
_OF_ANY_TYPE = frozenset(("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv"))


def products_of_any_type(name: str) -> bool:
    """Say whether an operator multiplies numbers of all types, of which `matmul` of a policy includes floats alone."""
    return name.removeprefix("aten::").partition(".")[0].removesuffix("_") in _OF_ANY_TYPE


def unserved_row(name: str, keys: tuple[str, ...], op: str, shown: str = "") -> Unserved:
    """Return the row of an operator that computes `op` and keeps its kernel, at some dispatch keys.

    An autograd function has none; it is `shown` with its package.
    """
    shown = shown or (name if "::" in name else f"aten::{name}")
    names = {name: shown for name, kernel in NATIVE_NAMES[op].items() if kernel == DEFAULT_ID[op]}
    entry = EntryPoint(shown, names, shown, f"{shown} runs kernels of its own, and no other can stand in for it", op)

    def call(*args: Any, **kwargs: Any) -> UnservedCall | None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if not tensors or (products_of_any_type(name) and not tensors[0].is_floating_point()):
            return None
        return UnservedCall(tensors[0], tensors[0].dtype, sizes_of_call(op, [tuple(x.shape) for x in tensors]))

    return Unserved(name, keys, entry, f"unserved_{op}", f"{shown} of {{}}", call, recorded=False)


def sizes_of_call(op: str, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[str, int], ...] | None:
    """Return the sizes that rules ask for of a call that no kernel can stand in for; ``None`` where they are not known.

    Of a product they are those of ``a @ b`` or of ``a @ vector``, as far as the shapes show which these are.
    """
    if op == "attention":
        return (("head_dim", shapes[0][-1]),) if shapes and shapes[0] else None
    if op != "matmul":
        return ()
    a, b = (*(shape for shape in shapes if len(shape) > 1), (), ())[:2]
    if len(a) == 2 and not b:
        b = next((shape for shape in shapes[shapes.index(a) + 1 :] if len(shape) == 1), ())
    if len(a) != 2 or len(b) not in (1, 2) or b[0] != a[1]:
        return None
    return ("m", a[0]), ("n", b[1] if len(b) == 2 else 1), ("k", a[1])


UNSERVED = (
    _flex("flex_attention", title="flex_attention of {}", autograd_keys=("HigherOrderAutograd",)),
    _flex("flex_attention_backward", title="the gradient of flex_attention of {}"),
    _varlen("_varlen_attn", 0, autograd_keys=("AutogradCPU", "AutogradCUDA")),
    _varlen("_varlen_attn_out", 1),  # PyTorch 2.11 has none
    _varlen("_varlen_attn_backward", 1, backward=True),
    _multi_head_row(MULTI_HEAD, (IN_PYTHON,), WITH_WEIGHTS, _weights_call, recorded=True),
    _multi_head_row(
        "_native_multi_head_attention", ("CPU", "CUDA", "NestedTensorCPU", "NestedTensorCUDA"), FAST_PATH,
        _fast_path_call, recorded=False,
    ),
    *RECURRENT,
)  # fmt: skip
