# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Override of ``flex_attention`` where it is computed operator by operator, as in eager code.

There it is unfused, whatever its option says. Which kernel compiled code takes is decided in `flex_options`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch.attention.entry_points import FLEX, left
from xpuruntime.pytorch.dispatch import call_state
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.dispatch.overrides.grad_mode import call_context, track_grad_mode
from xpuruntime.pytorch.dispatch.overrides.native import Override
from xpuruntime.pytorch.dispatch.route import facts_of_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.route import Route

__all__ = ["OVERRIDES"]

_MODULE = "torch._higher_order_ops.flex_attention"
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: What runs where no kernel is compiled.
_UNFUSED = "torch.math"
_ENTRY = FLEX._replace(
    kernel_names={name: _UNFUSED if one == FLEX.default else one for name, one in FLEX.kernel_names.items()},
    default=_UNFUSED,
)
_WHY = "without torch.compile, flex_attention is unfused; compile the code that calls it, by Inductor"
_SKIP = tuple((name, _WHY) for name, kernel in _ENTRY.kernel_names.items() if kernel != _UNFUSED)


def _decided(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    backward = name.endswith("_backward")

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def flex_attention(query: Tensor, *args: Any, **kwargs: Any) -> Any:
            if type(query) not in _PLAIN:  # nothing is computed, or what wraps it comes here again
                return native(query, *args, **kwargs)
            active = active_policy()
            route = None
            if active is not None and "flex_attention" in active.overrides:
                route = _route(active, query, backward=backward)
            if CONTEXT.observer is None:
                return native(query, *args, **kwargs)
            route = left(FLEX, _UNFUSED) if route is None else route
            name_ = f"higher_order::{name}"
            return CONTEXT.observer.call(name_, "attention", route, native, (query, *args), kwargs)

        return flex_attention

    return make


def _route(active: CompiledPolicy, query: Tensor, *, backward: bool) -> Route:
    phase, module = call_context(active)
    head_dim = int(query.shape[-1])
    key = ("flex_attention", query.dtype, query.device, head_dim, backward, phase, module)
    found = active.routes.get(key)
    if found is not None:
        return found
    what = "the gradient of flex_attention" if backward else "flex_attention"
    description = f"{what} of {list(query.shape)} {call_state.DTYPES.get(query.dtype, query.dtype)} on {query.device}"
    facts = facts_of_call(
        "attention", device=query.device, dtype=query.dtype, phase=phase, module=module, sizes={"head_dim": head_dim}
    )
    return active.resolve(key, facts, entry=_ENTRY, skip=_SKIP, description=description)


OVERRIDES = (
    *(
        Override(name, "attention", ("HigherOrderDense",), _decided(name), _MODULE)
        for name in ("flex_attention", "flex_attention_backward")
    ),
    Override("flex_attention", "attention", ("HigherOrderAutograd",), track_grad_mode, _MODULE),
)
