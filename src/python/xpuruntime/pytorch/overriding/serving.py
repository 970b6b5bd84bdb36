# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Serving a call by its route: by a kernel of ours, or by PyTorch's own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch import calls
from xpuruntime.pytorch.overriding.native import qualified
from xpuruntime.pytorch.tuning import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from xpuruntime.pytorch.held import Held
    from xpuruntime.pytorch.routing import Route

__all__ = ["in_words_of_pytorch", "is_native", "leave", "serve"]


def is_native(route: Route | None) -> bool:
    """Say whether a route is known to lead to PyTorch's own kernel, and nobody watches: then `serve` is not needed."""
    return route is not None and route.place is None and not route.open and calls.recorder is None


#: How PyTorch begins where none of the backends of attention that are enabled can serve.
_NO_BACKEND = ("No available kernel", "No viable backend")


@contextlib.contextmanager
def in_words_of_pytorch(natively: Callable[[], Any]) -> Iterator[None]:
    """Where a strict policy refuses a call that PyTorch refuses as well, let PyTorch's error be raised.

    Parameters
    ----------
    natively : callable
        Does the call by PyTorch's own kernel. What it returns is left.
    """
    try:
        yield
    except UnsupportedOperationError as refused:
        try:
            natively()
        except NotImplementedError:  # which is no fault of the arguments
            pass
        except RuntimeError as error:
            if not str(error).startswith(_NO_BACKEND):  # which the policy has turned off
                raise
        raise refused


def leave(name: str, op: str, native: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Serve a call that no policy decides by PyTorch's own kernel."""
    if calls.recorder is not None:
        return calls.recorder.call(name, op, None, native, args, {})
    return native(*args)


def serve(
    held: Held,
    key: Any,
    route: Route | None,
    name: str,
    op: str,
    like: Tensor,
    native: Callable[..., Any],
    ours: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    phase: str = "",
    module: str = "",
    allow_tf32: bool = False,
    deterministic: bool = False,
    unable: str = "",
    text: Callable[[], str] | None = None,
    quick: Callable[[], bool] | None = None,
) -> Any:
    """Serve a call by the kernel that a policy asks for.

    Parameters
    ----------
    held : Held
        The policy.
    key : hashable
        Everything that the route depends on, the operator included.
    route : Route or None
        What `held` keeps under `key`.
    name : str
        The operator, such as ``"native_layer_norm"``.
    op : str
        Operation of a `KernelPolicy`.
    like : Tensor
        Its device and dtype are those of the call.
    native : callable
        Called with `args`.
    ours : callable
        Called with a place for `_core`, `phase`, and `args` without the first, which is the dispatcher's keyset.
    args : tuple
        The keyset, and the arguments of the operator.
    phase, module, allow_tf32, deterministic, unable
        As for `Held.route`.
    text : callable, optional
        Gives what measured times are kept under, in place of `key`.
    quick : callable, optional
        Says whether kernels of ours take the arrays of such calls as they are, for `Route.quick`.

    Raises
    ------
    UnsupportedOperationError
        The policy is strict and nothing that it asks for can serve.
    """
    skip: tuple[tuple[str, str], ...] = ()
    while True:
        if route is None:
            with in_words_of_pytorch(lambda: native(*args)):
                route = held.route(
                    key, op, device=like.device, dtype=like.dtype, skip=skip, phase=phase, module=module,
                    doing=_doing(name, like), allow_tf32=allow_tf32, deterministic=deterministic,
                    unable=unable,
                )  # fmt: skip
            _mark_quick(held, route, quick)
        if route.open:
            route = settle(
                held, key, route, f"{name};{key!r}" if text is None else text(), lambda: native(*args),
                lambda place: ours(place, phase, *args[1:]), like.device,
                allow_tf32=allow_tf32, deterministic=deterministic,
            )  # fmt: skip
            _mark_quick(held, route, quick)
        if route.place is None:
            if calls.recorder is not None:
                return calls.recorder.call(name, op, route, native, args, {})
            return native(*args)
        try:
            if calls.recorder is not None:
                return calls.recorder.call(name, op, route, ours, (route.place, phase, *args[1:]), {})
            return ours(route.place, phase, *args[1:])
        except UnsupportedOperationError as error:
            skip = held.refused(route, error)
            route = None
        except InputError:
            return native(*args)  # which says in PyTorch's words what is wrong


def _mark_quick(held: Held, route: Route, quick: Callable[[], bool] | None) -> None:
    route.quick = quick is not None and route.place is not None and held.in_gates and quick()


def _doing(name: str, like: Tensor) -> str:
    return f"{qualified(name)} of {list(like.shape)} {calls.DTYPES.get(like.dtype, like.dtype)} on {like.device}"
