# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overrides that change no kernel: they report a call of `UNSERVED` that a policy cannot serve, or refuse it.

`coverage_gaps` finds such functions in a model or a graph before they run. What it cannot see is a call: arguments such
as ``need_weights``, the dtype under autocast, a function called directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention.call import left, sizes_of
from xpuruntime.pytorch.call_scope import function_phases, module_paths
from xpuruntime.pytorch.coverage.operation_table import (
    names_operation,
    of_unknown_package,
    operation_of_function,
    unserved_operators,
)
from xpuruntime.pytorch.coverage.unserved import UNSERVED, unserved_row
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.dispatch.overrides.native import HIGHER_ORDER, IN_PYTHON, Override, skip_in_dynamo
from xpuruntime.pytorch.dispatch.route import facts_of_call

if TYPE_CHECKING:
    from xpuruntime.pytorch.coverage.unserved import Unserved, UnservedCall
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.route import Route


def _call_context(active: CompiledPolicy) -> tuple[str, str]:
    phase = context.phase() if active.by_phase else ""
    if phase == "infer" and CONTEXT.thread.recorded:
        phase = "train"
    module = module_paths.current(recorded=CONTEXT.thread.recorded or None) if active.by_module else ""
    return phase, module


def _track_grad_mode(native: Callable[..., Any]) -> Callable[..., Any]:
    # Return what stands for a kernel at a key of autograd: the native one, inside of which `_call_context` knows it.
    # Inside of an ``autograd.Function`` it is of no use, since the forward there runs under ``no_grad``.

    def autograd(*args: Any, **kwargs: Any) -> Any:
        active = active_policy()
        if active is None or not active.by_call or not torch.is_grad_enabled() or not _needs_grad(args):
            return native(*args, **kwargs)
        before, CONTEXT.thread.recorded = CONTEXT.thread.recorded, True
        try:
            return native(*args, **kwargs)
        finally:
            CONTEXT.thread.recorded = before

    return autograd


def _needs_grad(args: tuple[Any, ...]) -> bool:
    return any(
        x.requires_grad if isinstance(x, torch.Tensor) else isinstance(x, tuple) and _needs_grad(x) for x in args
    )


def _route(unserved: Unserved, active: CompiledPolicy, call: UnservedCall) -> Route:
    """Return the route of a call that a policy decides: it warns, once for a policy, or raises under ``strict``."""
    phase, module = _call_context(active)
    like, dtype, sizes = call
    skip = unserved.reasons(like)
    key = (unserved.title, dtype, like.device, sizes, phase, module, skip)
    route = active.routes.get(key)
    if route is not None:
        return route
    op = unserved.entry.op
    operands = f"{sizes_of(like)} {context.DTYPES.get(dtype, dtype)} on {like.device}"
    facts = facts_of_call(
        op, device=like.device, dtype=dtype, phase=phase, module=module,
        sizes=None if sizes is None else dict(sizes),
    )  # fmt: skip
    if phase == "train" and unserved.gradient:  # what the gradient cannot have is refused before anything is computed
        mark = (unserved.gradient, *key[1:4], "backward", *key[5:])
        gradient = facts._replace(phase="backward")
        active.resolve(mark, gradient, entry=unserved.entry, skip=skip, description=unserved.gradient.format(operands))
    return active.resolve(key, facts, entry=unserved.entry, skip=skip, description=unserved.title.format(operands))


def _operator(unserved: Unserved) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    higher = unserved.keys[0] in HIGHER_ORDER
    name = f"higher_order::{unserved.name}" if higher else unserved.name

    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        def report(*args: Any, **kwargs: Any) -> Any:
            active, observer = active_policy(), CONTEXT.observer if unserved.recorded else None
            decides = active is not None and unserved.group in active.overrides
            if not decides and observer is None:
                return native(*args, **kwargs)
            call = unserved.call(*(args if higher else args[1:]), **kwargs)
            if call is None:
                return native(*args, **kwargs)
            route = _route(unserved, active, call) if decides and active is not None else left(unserved.entry)
            if observer is None:
                return native(*args, **kwargs)
            return observer.call(name, unserved.entry.op, route, native, args, kwargs)

        return report

    return make


def _function(unserved: Unserved) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(native: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(native)
        def report(*args: Any, **kwargs: Any) -> Any:
            active = active_policy()
            if active is not None and unserved.group in active.overrides and not context.is_compiling():
                call = unserved.call(*args, **kwargs)
                route = None if call is None else _route(unserved, active, call)
                if route is not None and CONTEXT.observer is not None and route.status == "substituted":
                    # A row without time: that is in the rows of the products.
                    CONTEXT.observer.call(f"nn::{unserved.name}", unserved.entry.op, route, _nothing, args[:1], {})
            return native(*args, **kwargs)

        # As torch.jit.script_if_tracing does: what TorchScript and Dynamo look at is PyTorch's own.
        report.__original_fn = native  # type: ignore[attr-defined]
        report.__script_if_tracing_wrapper = True  # type: ignore[attr-defined]
        return report

    return make


def _nothing(*_: Any) -> None:
    """Stand for what a recorder runs."""


def _overrides(unserved: Unserved) -> Iterator[Override]:
    make = _function(unserved) if unserved.keys == (IN_PYTHON,) else _operator(unserved)
    yield Override(unserved.name, unserved.entry.op, unserved.keys, make, unserved.module, unserved.group)
    if unserved.autograd_keys:
        yield Override(
            unserved.name, unserved.entry.op, unserved.autograd_keys, _track_grad_mode, unserved.module, unserved.group
        )


_IMPLICIT, _EXPLICIT = "CompositeImplicitAutograd", "CompositeExplicitAutograd"


def overrides_of_operators(op: str, operators: tuple[str, ...]) -> tuple[Override, ...]:
    """Return overrides of all those of some operators, of other packages too, that compute an operation.

    They refuse calls under ``strict``; see `operation_table.unserved_operators`. Of a package that is not known, those
    for all devices pass, since `torch.library.custom_op` makes them of Python: operators in it obey or are refused.
    What such Python computes without operators, in NumPy or by a kernel of its own, is not seen before it runs.
    """
    overrides: list[Override] = []
    for name in unserved_operators(operators).get(op, ()):
        implicit = _private_api.has_kernel(name, _IMPLICIT)
        if of_unknown_package(name.partition(".")[0]) and (implicit or _private_api.has_kernel(name, _EXPLICIT)):
            continue
        keys = (_IMPLICIT,) if implicit else ("CPU", "CUDA")
        overrides += _overrides(unserved_row(name.removeprefix("aten::"), keys, op))
    return tuple(overrides)


def refuse_function(kind: type[torch.autograd.Function], args: tuple[Any, ...]) -> None:
    """Refuse under ``strict`` an autograd function of another package that computes an operation of the policy's."""
    active = active_policy()
    if active is None or not active.strict:
        return
    unserved = _row_of_function(kind)  # type: ignore[arg-type]
    call = None if unserved is None or unserved.group not in active.overrides else unserved.call(*args)
    if unserved is not None and call is not None:
        _route(unserved, active, call)


skip_in_dynamo(refuse_function.__code__)
function_phases.CHECKS.append(refuse_function)


@functools.lru_cache(maxsize=1024)
def _row_of_function(kind: type[torch.autograd.Function]) -> Unserved | None:
    op = operation_of_function(kind)
    if op is None or names_operation(kind, op):
        return None
    return unserved_row(kind.__name__, (), op, f"{kind.__module__}.{kind.__qualname__}")


OVERRIDES = tuple(override for unserved in UNSERVED for override in _overrides(unserved))
