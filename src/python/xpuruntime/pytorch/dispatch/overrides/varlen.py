# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Override of ``varlen_attn``, attention over sequences that are packed into one tensor.

It runs by PyTorch's FlashAttention, or by what is active in its place. So a policy is kept or not, and the kernel is
PyTorch's in either case: what is replaced here are operators that look the policy up and go on to the native kernel.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.nn import attention as torch_attention

from xpuruntime.pytorch.attention.entry_points import VARLEN, left
from xpuruntime.pytorch.dispatch import call_state
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.dispatch.overrides.grad_mode import call_context, track_grad_mode
from xpuruntime.pytorch.dispatch.overrides.native import Override
from xpuruntime.pytorch.dispatch.route import facts_of_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.overrides.native import Native
    from xpuruntime.pytorch.dispatch.route import Route

__all__ = ["OVERRIDES"]

_MODULE = "torch.nn.attention.varlen"
#: What PyTorch's registry calls FlashAttention 3, and implementations that leave packed sequences as they are.
_FLASH_V3 = "FA3"
_LEAVE_PACKED = (None, "xpuruntime")


def _decided(name: str, query_at: int) -> Callable[[Native], Callable[..., Any]]:
    """Return what makes an operator's override.

    Parameters
    ----------
    name : str
        With its namespace.
    query_at : int
        Where the queries are among its arguments.
    """
    backward = name.endswith("_backward")

    def make(native: Native) -> Callable[..., Any]:
        def varlen(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            active = active_policy()
            route = None
            if active is not None and "varlen_attn" in active.overrides:
                route = _route(active, args[query_at], backward=backward)
            if CONTEXT.observer is None:
                return native(keyset, *args, **kwargs)
            route = left(VARLEN) if route is None else route
            return CONTEXT.observer.call(name, "attention", route, native, (keyset, *args), kwargs)

        return varlen

    return make


def _route(active: CompiledPolicy, query: Tensor, *, backward: bool) -> Route:
    phase, module = call_context(active)
    implementation = torch_attention.current_flash_attention_impl()
    by_cudnn = _by_cudnn(query)
    key = ("varlen_attn", query.dtype, query.device, query.shape[1:], backward, phase, module, implementation, by_cudnn)
    found = active.routes.get(key)
    if found is not None:
        return found
    description = (
        f"varlen_attn of {list(query.shape)} {call_state.DTYPES.get(query.dtype, query.dtype)} on {query.device}"
    )
    facts = facts_of_call(
        "attention", device=query.device, dtype=query.dtype, phase=phase, module=module,
        sizes={"head_dim": int(query.shape[-1])},
    )  # fmt: skip
    skip = tuple(_reasons(implementation, by_cudnn=by_cudnn))
    descriptions = (description, f"the gradient of {description}")
    if phase == "train":  # what the gradient cannot have is refused before anything is computed
        mark = (*key[:4], True, "backward", *key[6:])
        gradient = facts._replace(phase="backward")
        active.resolve(mark, gradient, entry=VARLEN, skip=skip, description=descriptions[True])
    return active.resolve(key, facts, entry=VARLEN, skip=skip, description=descriptions[backward])


def _by_cudnn(query: Tensor) -> bool:
    """Say whether PyTorch gives such calls to cuDNN; up to 2.13 it never does."""
    asks = getattr(sys.modules.get(_MODULE), "_should_use_cudnn", None)
    return bool(query.is_cuda and asks is not None and asks(query.device.index))


def _reasons(implementation: str | None, *, by_cudnn: bool) -> list[tuple[str, str]]:
    """Return the words for kernels that do not serve now, each with the reason."""
    if by_cudnn:
        why = "this PyTorch gives varlen_attn to cuDNN, and a call has no option for it"
        return [(kernel_name, why) for kernel_name in ("flash_v2", "torch.flash", "flash_v3")]
    found = [(name, "this PyTorch has cuDNN turned off for varlen_attn") for name in ("cudnn", "torch.cudnn")]
    if implementation not in _LEAVE_PACKED:
        why = f"{implementation} is active in its place; torch.nn.attention.restore_flash_attention_impl() restores it"
        found += [(name, why) for name in ("flash_v2", "torch.flash")]
    if implementation != _FLASH_V3:
        found.append(("flash_v3", "FlashAttention 3 is not active in PyTorch's registry"))
    return found


_KEYS = ("CPU", "CUDA")
#: Operators, and where the queries are among their arguments. PyTorch 2.11 has no form that writes into `out`.
_OPERATORS = (("_varlen_attn", 0), ("_varlen_attn_out", 1), ("_varlen_attn_backward", 1))

OVERRIDES = (
    *(
        Override(f"torch_attn::{name}", "attention", _KEYS, _decided(f"torch_attn::{name}", at), _MODULE)
        for name, at in _OPERATORS
    ),
    Override("torch_attn::_varlen_attn", "attention", tuple(f"Autograd{k}" for k in _KEYS), track_grad_mode, _MODULE),
)
