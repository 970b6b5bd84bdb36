# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention of ``nn.MultiheadAttention`` that calls no function for attention: what a policy asks for is reported.

With ``need_weights=True``, its default, it multiplies, takes a softmax and multiplies again; those products obey the
rules for products. Its fast path is an operator of its own. While a policy names kernels of attention that is turned
off, and what is here is for programs that have it, or turn it on again.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention.call import sizes_of
from xpuruntime.pytorch.attention.entry_points import FAST_PATH, WITH_WEIGHTS
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch import call_state
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.dispatch.overrides.native import IN_PYTHON, Override
from xpuruntime.pytorch.dispatch.route import facts_of_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.pytorch.attention.entry_points import EntryPoint
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.overrides.native import Native
    from xpuruntime.pytorch.dispatch.route import Route

__all__ = ["OVERRIDES"]

_NAME = "multi_head_attention_forward"
#: Of its arguments, in their order.
_LOOKED_AT = ("query", "embed_dim_to_check", "num_heads", "need_weights")


def _with_weights(native: Callable[..., Any]) -> Callable[..., Any]:
    takes = inspect.signature(native).parameters
    places = {name: (place, takes[name].default) for place, name in enumerate(takes) if name in _LOOKED_AT}
    last, by_default = places.pop("need_weights")

    @functools.wraps(native)
    def multi_head_attention_forward(*args: Any, **more: Any) -> Any:
        wanted = more["need_weights"] if "need_weights" in more else args[last] if last < len(args) else by_default
        if wanted and (active := _asking()) is not None and not _is_compiling():
            query, width, heads = (
                more[name] if name in more else args[place] if place < len(args) else default
                for name, (place, default) in places.items()
            )
            # What wraps it comes here again.
            if not torch.overrides.has_torch_function((query,)):
                route = _say(active, WITH_WEIGHTS, query, width // heads)
                if CONTEXT.observer is not None and route.status == "substituted":
                    # A row without time: that is in the rows of the products.
                    CONTEXT.observer.call(f"nn::{_NAME}", "attention", route, _nothing, (query,), {})
        return native(*args, **more)

    # As torch.jit.script_if_tracing does: what TorchScript and Dynamo look at is PyTorch's own.
    multi_head_attention_forward.__original_fn = native  # type: ignore[attr-defined]
    multi_head_attention_forward.__script_if_tracing_wrapper = True  # type: ignore[attr-defined]
    return multi_head_attention_forward


def _fast_path(native: Native) -> Callable[..., Any]:
    def native_multi_head_attention(
        keyset: Any, query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *args: Any, **more: Any
    ) -> Any:
        if (active := _asking()) is not None:
            _say(active, FAST_PATH, query, width // heads)
        return native(keyset, query, key, value, width, heads, *args, **more)

    return native_multi_head_attention


def _is_compiling() -> bool:
    """Say whether nothing runs yet, so that `gaps_in_graph` looks at the call."""
    # 2.11 and 2.12 do not say that they compile once AOTAutograd traces.
    return torch.compiler.is_compiling() or _private_api.tracing_context.try_get() is not None


def _nothing(*_: Any) -> None:
    """Stand for what a recorder runs."""


def _asking() -> CompiledPolicy | None:
    active = active_policy()
    return active if active is not None and "multi_head_attention" in active.overrides else None


def _say(active: CompiledPolicy, entry: EntryPoint, query: Tensor, head_dim: int) -> Route:
    """Warn, once for a policy, where it asks for kernels that cannot serve; under ``strict`` raise."""
    phase = call_state.phase() if active.by_phase else ""
    module = module_paths.running() if active.by_module else ""
    dtype, kind = query.dtype, query.device.type
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    key = (entry.name, dtype, query.device, head_dim, phase, module)
    found = active.routes.get(key)
    if found is not None:
        return found
    description = (
        f"attention of {sizes_of(query)} {call_state.DTYPES.get(dtype, dtype)} on {query.device} in {entry.name}"
    )
    facts = facts_of_call(
        "attention", device=query.device, dtype=dtype, phase=phase, module=module, sizes={"head_dim": head_dim}
    )
    if phase == "train":  # what the gradient cannot have is refused before anything is computed
        mark = (*key[:4], "backward", module)
        gradient = facts._replace(phase="backward")
        active.resolve(mark, gradient, entry=entry, description=f"the gradient of {description}")
    return active.resolve(key, facts, entry=entry, description=description)


OVERRIDES = (
    Override(_NAME, "attention", (IN_PYTHON,), _with_weights, "torch.nn.functional"),
    Override(
        "_native_multi_head_attention", "attention", ("CPU", "CUDA", "NestedTensorCPU", "NestedTensorCUDA"), _fast_path
    ),
)
