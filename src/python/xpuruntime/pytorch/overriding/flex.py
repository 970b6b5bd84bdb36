# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``flex_attention`` where it is computed operator by operator: in eager code, and under backends for debugging.

There it is unfused, whatever its option says. Which kernel compiled code takes is decided in `flex_options`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import calls
from xpuruntime.pytorch.attention.entries import FLEX, left
from xpuruntime.pytorch.held import current
from xpuruntime.pytorch.overriding.forwards import circumstances, keep_recording
from xpuruntime.pytorch.overriding.native import Override

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.pytorch.held import Held
    from xpuruntime.pytorch.routing import Route

__all__ = ["OVERRIDES"]

_MODULE = "torch._higher_order_ops.flex_attention"
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: What runs where no kernel is compiled.
_UNFUSED = "torch.math"
_ENTRY = FLEX._replace(
    words={word: _UNFUSED if kernel == FLEX.default else kernel for word, kernel in FLEX.words.items()},
    default=_UNFUSED,
)
_WHY = "without torch.compile, flex_attention is unfused; compile the code that calls it, by Inductor"
_SKIP = tuple((word, _WHY) for word, kernel in _ENTRY.words.items() if kernel != _UNFUSED)


def _decided(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    backward = name.endswith("_backward")

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def flex_attention(query: Tensor, *args: Any, **kwargs: Any) -> Any:
            if type(query) not in _PLAIN:  # nothing is computed, or what wraps it comes here again
                return native(query, *args, **kwargs)
            held = current()
            route = None
            if held is not None and "flex_attention" in held.overrides:
                route = _route(held, query, backward=backward)
            if calls.recorder is None:
                return native(query, *args, **kwargs)
            route = left(FLEX, _UNFUSED) if route is None else route
            name_ = f"higher_order::{name}"
            return calls.recorder.call(name_, "attention", route, native, (query, *args), kwargs)

        return flex_attention

    return make


def _route(held: Held, query: Tensor, *, backward: bool) -> Route:
    phase, module = circumstances(held)
    head_dim = int(query.shape[-1])
    key = ("flex_attention", query.dtype, query.device, head_dim, backward, phase, module)
    found = held.routes.get(key)
    if found is not None:
        return found
    what = "the gradient of flex_attention" if backward else "flex_attention"
    doing = f"{what} of {list(query.shape)} {calls.DTYPES.get(query.dtype, query.dtype)} on {query.device}"
    return held.route(
        key, "attention", device=query.device, dtype=query.dtype, entry=_ENTRY, skip=_SKIP, phase=phase, module=module,
        doing=doing, head_dim=head_dim,
    )  # fmt: skip


OVERRIDES = (
    *(
        Override(name, "attention", ("HigherOrderDense",), _decided(name), _MODULE)
        for name in ("flex_attention", "flex_attention_backward")
    ),
    Override("flex_attention", "attention", ("HigherOrderAutograd",), keep_recording, _MODULE),
)
