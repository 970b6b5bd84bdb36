# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Invocation of a call by its route: by a kernel of xpuruntime, or by PyTorch's own."""

from __future__ import annotations

import contextlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch._private_api import lookup
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import CONTEXT
from xpuruntime.pytorch.dispatch.overrides.native import qualified
from xpuruntime.pytorch.dispatch.route import facts_of_call
from xpuruntime.pytorch.dispatch.tuning import settle
from xpuruntime.pytorch.providers.bound import BoundKernel, automatic_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.route import Route

__all__ = ["call_native", "invoke", "is_native", "prefer_native_error"]


def is_native(route: Route | None) -> bool:
    """Say whether a route is known to lead to PyTorch's own kernel, and nobody watches: then `invoke` is not needed."""
    return route is not None and route.place is None and not route.open and CONTEXT.observer is None


@contextlib.contextmanager
def prefer_native_error(natively: Callable[[], Any]) -> Iterator[None]:
    """Where a strict policy refuses a call that PyTorch refuses as well, let PyTorch's error be raised."""
    try:
        yield
    except UnsupportedOperationError as refused:
        try:
            natively()
        except NotImplementedError:  # which is no fault of the arguments
            pass
        except RuntimeError as error:
            if not lookup.has_no_sdp_backend(error):  # which the policy has turned off
                raise
        raise refused


def call_native(
    name: str,
    op: str,
    native: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    route: Route | None = None,
) -> Any:
    """Serve a call by PyTorch's own kernel; `route` where a policy decides it."""
    if CONTEXT.observer is not None:
        return CONTEXT.observer.call(name, op, route, native, args, kwargs)
    return native(*args, **kwargs)


def invoke(
    active: CompiledPolicy,
    key: Any,
    route: Route | None,
    name: str,
    op: str,
    like: Tensor,
    native: Callable[..., Any],
    xrt_kernel: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    phase: str = "",
    module: str = "",
    allow_tf32: bool = False,
    deterministic: bool = False,
    unsupported_reason: str = "",
    text: Callable[[], str] | None = None,
    quick: Callable[[], bool] | None = None,
) -> Any:
    """Serve a call by the kernel that a policy asks for."""
    skip: tuple[tuple[str, str], ...] = ()
    while True:
        if route is None:
            kind = (name, like.dtype, like.device, phase, module, allow_tf32, deterministic, unsupported_reason)
            route = None if skip else active.of_kind(key, kind)
            if route is None:
                with prefer_native_error(lambda: native(*args)):
                    facts = facts_of_call(
                        op, device=like.device, dtype=like.dtype, phase=phase, module=module, sizes={}
                    )  # fmt: skip
                    route = active.resolve(
                        key, facts, skip=skip, description=_description(name, like), allow_tf32=allow_tf32,
                        deterministic=deterministic, unsupported_reason=unsupported_reason,
                    )  # fmt: skip
                active.keep_kind(kind, route)
            _set_quick(route, quick)
        if route.open:
            exact = deterministic or active.policy.execution.deterministic
            route = settle(
                active, key, route, f"{name};{key!r}" if text is None else text(), lambda: native(*args),
                lambda target: xrt_kernel(target, phase, *args[1:]), like.device, allow_tf32=allow_tf32,
                deterministic=deterministic,
                packages=automatic_kernels(op, like.device, deterministic=exact, skip=skip),
            )  # fmt: skip
            _set_quick(route, quick)
        if route.place is None:
            return call_native(name, op, native, args, route=route)
        try:
            if CONTEXT.observer is not None:
                return CONTEXT.observer.call(name, op, route, xrt_kernel, (route.place, phase, *args[1:]), {})
            return xrt_kernel(route.place, phase, *args[1:])
        except (UnsupportedOperationError, InputError) as error:
            if isinstance(error, InputError):
                native(*args)  # raises where the arguments are wrong, in PyTorch's words
            skip, route = active.refused(route, error), None


def _set_quick(route: Route, quick: Callable[[], bool] | None) -> None:
    route.quick = not (quick is None or route.place is None or isinstance(route.place, BoundKernel)) and quick()


def _description(name: str, like: Tensor) -> str:
    return f"{qualified(name)} of {list(like.shape)} {context.DTYPES.get(like.dtype, like.dtype)} on {like.device}"
