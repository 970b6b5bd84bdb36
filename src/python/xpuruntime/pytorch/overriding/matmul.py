# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Matrix products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime import _core
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch import calls, module_paths
from xpuruntime.pytorch.held import Held, current
from xpuruntime.pytorch.overriding.native import Native, Override

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from xpuruntime.pytorch.routing import Route

__all__ = ["OVERRIDES"]

_op_matmul = _core.op_matmul


def _mm(native: Native) -> Callable[..., Any]:
    def mm(keyset: Any, a: Tensor, b: Tensor) -> Any:
        held = current()
        if held is None or "matmul" not in held.ops:
            if calls.recorder is not None:
                return calls.recorder.call("mm", "matmul", None, native, (keyset, a, b), {})
            return native(keyset, a, b)
        phase = calls.phase() if held.by_phase else ""
        module = module_paths.current() if held.by_module else ""
        key = ("mm", a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.device, phase, module)
        route = held.routes.get(key)
        while True:
            if route is None:
                route = _route(held, key, a, b, phase, module)
            if route.place is None:
                if calls.recorder is not None:
                    return calls.recorder.call("mm", "matmul", route, native, (keyset, a, b), {})
                return native(keyset, a, b)
            args = (route.place, a.detach(), b.detach(), None, None, None, None, None, None, phase or None, None)
            try:
                if calls.recorder is not None:
                    return calls.recorder.call("mm", "matmul", route, _op_matmul, args, {})
                return _op_matmul(*args)
            except UnsupportedOperationError as error:
                route = _route(held, key, a, b, phase, module, skip=held.refused(route, error))
            except InputError:
                return native(keyset, a, b)  # which says in PyTorch's words what is wrong

    return mm


def _route(held: Held, key: Any, a: Tensor, b: Tensor, phase: str, module: str, skip: Any = ()) -> Route:
    m, k = a.shape
    return held.route(
        key, "matmul", device=a.device, dtype=a.dtype, skip=skip, phase=phase, module=module,
        doing=f"aten::mm of {list(a.shape)} and {list(b.shape)} {calls.DTYPES.get(a.dtype, a.dtype)} on {a.device}",
        m=m, n=b.shape[1], k=k,
    )  # fmt: skip


OVERRIDES = (Override("mm", "matmul", ("CPU", "CUDA"), _mm),)
