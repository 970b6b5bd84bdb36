# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Native` and `Override`: a kernel of PyTorch's dispatcher, and what stands in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch._private_api import lookup
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import CONTEXT
from xpuruntime.pytorch.dispatch.route import facts_of_call
from xpuruntime.pytorch.dispatch.tuning import settle
from xpuruntime.pytorch.providers.bound import BoundKernel, automatic_kernels

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.route import Route

#: In place of a dispatch key: the function stands in for an operator only while `torch.compile` traces.
TRACING = "Tracing"

#: In place of a dispatch key: the function stands in for one of a module's, by its name there.
IN_PYTHON = "Python"

#: In place of a dispatch key: the function stands in for a higher-order operator's, at this key of the dispatcher.
HIGHER_ORDER = {"HigherOrderDense": "CompositeExplicitAutograd", "HigherOrderAutograd": "Autograd"}

#: In place of a dispatch key: the override adapts classes of models, by itself; see `xpuruntime.pytorch.adapters`.
CLASSES = "Classes"

#: An alias of many dispatch keys has no kernel of its own, but that of this one is the same.
ALIASES = {"CompositeImplicitAutograd": "CPU"}


def qualified(name: str) -> str:
    """Return the name of an operator with its namespace, which is ``aten`` where it states none."""
    return name if "::" in name else f"aten::{name}"


def native_kernel(name: str, key: str) -> Any:
    """Return the kernel that is registered now for an operator. Raises `RuntimeError` if none is."""
    return torch.library.get_kernel(qualified(name), ALIASES.get(key, key))


def has_native_kernel(name: str, key: str) -> bool:
    """Say whether `native_kernel` finds one. PyTorch takes a hundred times as long to say that there is none."""
    operator, at = qualified(name), ALIASES.get(key, key)
    try:
        return _private_api.computes_at(operator, at)
    except RuntimeError:  # there is no such operator
        return False


def never_compile(make: Callable[..., Any]) -> None:
    """Have Dynamo leave alone the functions that `make` defines, and all that they call.

    PyTorch's dispatcher calls them. After a graph break `torch.compile` follows whatever runs in Python, functions
    behind an operator included. A PyTorch without this switch of Dynamo's warns where it does so.
    """
    for code in make.__code__.co_consts:
        if isinstance(code, CodeType):
            skip_in_dynamo(code)


def skip_in_dynamo(code: CodeType, *, within: bool = True) -> None:
    """Have Dynamo leave alone one function, by its code, and `within` all that it calls, as far as this PyTorch can."""
    _private_api.skip_frames(code, within=within)


class Native:
    """The kernel that an operator had at a dispatch key before an override replaced it.

    Called with the keyset of the dispatcher, then the operator's own arguments.
    """

    __slots__ = ("call", "key", "name", "refresh")

    def __init__(self, name: str, key: str, refresh: Callable[[Native], None]) -> None:
        self.name = name
        self.key = key
        self.refresh = refresh
        #: The bare kernel. What calls it hands an error to `again`.
        self.call: Any = None
        self.take()

    def take(self) -> None:
        """Take the kernel that is registered now. The override must not be in place."""
        self.call = native_kernel(self.name, self.key).call_boxed

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        try:
            return self.call(keyset, *args, **kwargs)
        except RuntimeError as error:
            return self.again(error, keyset, *args, **kwargs)

    def again(self, error: RuntimeError, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what is below the override now, where `error` states that the former kernel is gone. Else raise it."""
        if not lookup.is_kernel_gone(error):
            raise error
        self.refresh(self)
        return self.call(keyset, *args, **kwargs)


class Override(NamedTuple):
    """One xpuruntime kernel over one of PyTorch's."""

    name: str
    op: str
    keys: tuple[str, ...]
    make: Callable[[Any], Any]
    module: str = ""
    group: str = ""


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
