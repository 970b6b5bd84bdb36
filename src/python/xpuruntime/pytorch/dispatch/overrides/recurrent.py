# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Recurrent layers whose products are inside kernels of their own: what a policy asks for is reported, or refused.

On the CPU that is oneDNN's for ``nn.LSTM``, on CUDA cuDNN's for all of them. Where PyTorch multiplies step by step
instead, as with ``nn.GRU`` on the CPU, the products pass their own overrides, and none of these operators is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.pytorch.attention.entry_points import EntryPoint
from xpuruntime.pytorch.dispatch import call_state
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.dispatch.overrides.native import Override
from xpuruntime.pytorch.dispatch.route import facts_of_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.overrides.native import Native

__all__ = ["OVERRIDES"]

_LAYER = EntryPoint(
    "a recurrent layer",
    {"torch": "torch.rnn", "torch.rnn": "torch.rnn"},
    "torch.rnn",
    "the products of a recurrent layer are inside one kernel of PyTorch's, and no other can serve there",
    "matmul",
)


def _recurrent(native: Native) -> Callable[..., Any]:
    name = native.name

    def recurrent(keyset: Any, x: Tensor, *args: Any, **more: Any) -> Any:
        active = active_policy()
        if active is not None and "matmul" in active.ops:
            _say(active, name, x)
        return native(keyset, x, *args, **more)

    return recurrent


def _say(active: CompiledPolicy, name: str, x: Tensor) -> None:
    """Warn, once for a policy, where it asks for kernels that cannot serve; under ``strict`` raise."""
    phase, module = active.call_context()
    key = (name, x.device, x.dtype, phase, module)
    if active.routes.get(key) is None:
        description = f"aten::{name} of {list(x.shape)} {call_state.DTYPES.get(x.dtype, x.dtype)} on {x.device}"
        facts = facts_of_call("matmul", device=x.device, dtype=x.dtype, phase=phase, module=module, sizes={})
        active.resolve(key, facts, description=description, entry=_LAYER)


OVERRIDES = (
    *(Override(f"mkldnn_rnn_layer{form}", "matmul", ("CPU",), _recurrent) for form in ("", "_backward")),
    *(Override(f"_cudnn_rnn{form}", "matmul", ("CUDA",), _recurrent) for form in ("", "_backward")),
)
