# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which kernel serves a call of a norm or of its gradient, and the call of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.pytorch import calls, module_paths
from xpuruntime.pytorch.held import current
from xpuruntime.pytorch.overriding.serving import is_native, leave, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from xpuruntime.pytorch.overriding.native import Native

__all__ = ["run_norm"]


def run_norm(
    native: Native,
    op: str,
    ours: Callable[..., Any],
    args: tuple[Any, ...],
    x: Tensor,
    shape: Sequence[int],
    arrays: tuple[Tensor | None, ...],
    fits: Callable[[], bool],
    quick: Callable[[], bool],
    mask: Sequence[bool] | None = None,
) -> Any:
    """Do one call by the kernel of its route, which is found where it is not known.

    Parameters
    ----------
    native : Native
    op : str
        Operation of a `KernelPolicy`.
    ours, args
        As for `serving.serve`.
    x : Tensor
        What is normalized.
    shape : sequence of int
        The sizes that are normalized.
    arrays : tuple
        All tensors among the arguments, in their order.
    fits : callable
        Says whether the call is one that a policy speaks of; PyTorch's own kernel serves any other.
    quick : callable
        As for `serving.serve`.
    mask : sequence of bool, optional
        Of a gradient, which ones are asked for.
    """
    name = native.name
    held = current()
    if held is None:
        return leave(name, op, native, args)
    phase = ""
    if held.by_phase:
        phase = calls.phase() if mask is None else "backward"
    module = module_paths.current() if held.by_module else ""
    wanted = "" if mask is None else "".join("1" if one else "0" for one in mask) + ";"
    mark = f"{name};{wanted}{';'.join(map(str, shape))}"
    key: Any = calls.call_key(mark, *arrays)
    if key is None:  # an array that cannot be seen
        key = (mark, *map(_like, arrays))
    if held.by_call:
        key = (key, phase, module)
    route = held.routes.get(key)
    if is_native(route):
        return native(*args)
    if route is None and not (held.decides(op) and fits()):
        route = held.leave(key, op)
    return serve(
        held, key, route, name, op, x, native, ours, args, phase=phase, module=module, quick=quick,
        text=lambda: f"{mark};{list(map(_like, arrays))};{phase};{module}",
    )  # fmt: skip


def _like(array: Tensor | None) -> Any:
    return None if array is None else (tuple(array.shape), array.dtype, array.device)
