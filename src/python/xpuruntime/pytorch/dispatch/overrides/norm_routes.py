# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Routes of norms and of their gradients, and the call by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch import call_state
from xpuruntime.pytorch.dispatch.context import active_policy
from xpuruntime.pytorch.dispatch.overrides.invoke import call_native, invoke, is_native

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from xpuruntime.pytorch.dispatch.overrides.native import Native

__all__ = ["run_norm"]


def run_norm(
    native: Native,
    op: str,
    xrt_kernel: Callable[..., Any],
    args: tuple[Any, ...],
    x: Tensor,
    shape: Sequence[int],
    arrays: tuple[Tensor | None, ...],
    fits: Callable[[], bool],
    quick: Callable[[], bool],
    mask: Sequence[bool] | None = None,
) -> Any:
    """Do one call by the kernel of its route, which is found where it is not known."""
    name = native.name
    active = active_policy()
    if active is None:
        return call_native(name, op, native, args)
    phase = ""
    if active.by_phase:
        phase = call_state.phase() if mask is None else "backward"
    module = module_paths.current() if active.by_module else ""
    wanted = "" if mask is None else "".join("1" if one else "0" for one in mask) + ";"
    mark = f"{name};{wanted}{';'.join(map(str, shape))}"
    key: Any = call_state.call_key(mark, *arrays)
    if key is None:  # an array that cannot be seen
        key = (mark, *map(_like, arrays))
    if active.by_call:
        key = (key, phase, module)
    route = active.routes.get(key)
    if is_native(route):
        return native(*args)
    if route is None and not (active.decides(op) and fits()):
        route = active.keep_native(key, op)
    return invoke(
        active, key, route, name, op, x, native, xrt_kernel, args, phase=phase, module=module, quick=quick,
        text=lambda: f"{mark};{list(map(_like, arrays))};{phase};{module}",
    )  # fmt: skip


def _like(array: Tensor | None) -> Any:
    return None if array is None else (tuple(array.shape), array.dtype, array.device)
