# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Recurrent layers whose products are inside kernels of their own: what a policy asks of these is said, or refused.

On the CPU that is oneDNN's for ``nn.LSTM``, on CUDA cuDNN's for all of them. Where PyTorch multiplies step by step
instead, as with ``nn.GRU`` on the CPU, the products pass their own overrides, and none of these operators is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.pytorch import calls
from xpuruntime.pytorch.attention.entries import EntryPoint
from xpuruntime.pytorch.held import current
from xpuruntime.pytorch.overriding.native import Override

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.pytorch.held import Held
    from xpuruntime.pytorch.overriding.native import Native

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
        held = current()
        if held is not None and "matmul" in held.ops:
            _say(held, name, x)
        return native(keyset, x, *args, **more)

    return recurrent


def _say(held: Held, name: str, x: Tensor) -> None:
    """Warn, once for a policy, where it asks for kernels that cannot serve; under ``strict`` raise."""
    phase, module = held.circumstances()
    key = (name, x.device, x.dtype, phase, module)
    if held.routes.get(key) is None:
        doing = f"aten::{name} of {list(x.shape)} {calls.DTYPES.get(x.dtype, x.dtype)} on {x.device}"
        held.route(key, "matmul", device=x.device, dtype=x.dtype, phase=phase, module=module, doing=doing, entry=_LAYER)


#: The first argument of each is the input.
OVERRIDES = (
    *(Override(f"mkldnn_rnn_layer{form}", "matmul", ("CPU",), _recurrent) for form in ("", "_backward")),
    *(Override(f"_cudnn_rnn{form}", "matmul", ("CUDA",), _recurrent) for form in ("", "_backward")),
)
