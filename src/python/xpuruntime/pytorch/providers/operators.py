# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One operator for each operation, through which kernels of other packages serve it.

``xpuruntime::swiglu.decided`` lets the active policy choose: it becomes PyTorch's own operations, or
``xpuruntime::swiglu.served``, a single node of autograd and of a compiled graph whose kernel is a constant. A new
operation is one more row of `operations.OPERATIONS`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.ops.torch_kernels import Saved
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention.call import traits
from xpuruntime.pytorch.attention.limits import transforms_and_tangents
from xpuruntime.pytorch.call_scope import module_paths
from xpuruntime.pytorch.dispatch import context, tuning
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.dispatch.route import BY_CALL, Route, facts_of_call
from xpuruntime.pytorch.ops.attention_gradient import Recorded, autograd_kernel, is_put_off, is_watched, redispatch
from xpuruntime.pytorch.providers.bound import (
    BoundKernel,
    alignment_of,
    automatic_kernels,
    bound_kernel,
    call_of,
    rejection_of_word,
)
from xpuruntime.pytorch.providers.calls import (
    CallPlan,
    are_plain,
    call_by,
    call_text,
    gradients_like,
    options_of,
    outputs_like,
    reference,
    text_of,
    with_gradient,
    without_data,
)
from xpuruntime.pytorch.providers.canary import COMPARISON_ENDED
from xpuruntime.pytorch.providers.operations import OPERATIONS, laid_out, rms_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.route import Measured
    from xpuruntime.pytorch.providers.operations import Operation

__all__ = ["define", "perform", "rms_norm", "takes"]

_library = torch.library.Library("xpuruntime", "FRAGMENT")
_KINDS = _private_api.transform_kinds


def perform(
    op: str,
    operands: Mapping[str, Tensor | None],
    attributes: Mapping[str, Any],
    kernel: str = "",
    confirm: tuple[str, Callable[[], bool]] | None = None,
    own: Any = None,
) -> Any:
    """Return an operation of the table, by the kernel that a call names, or that the active policy gives it.

    An eager call may have an attribute that is only assumed: `confirm` is its name, and what finds it out at the cost
    of waiting for the device, for a kernel that may depend on it. Where measured times leave the call to PyTorch, that
    is kept as `own`, by which an adapter knows such calls; see `in_place.own_call`.

    A tensor, or a tuple of several, or of none where it writes its operands. Differentiable otherwise, and one operator
    where code is compiled.
    """
    present = {name: operands.get(name) for name in OPERATIONS[op].operands}
    tensors = [x for x in present.values() if x is not None]
    if torch.compiler.is_compiling():
        names = ",".join(name for name, x in present.items() if x is not None)
        text = text_of(op, attributes)
        decided, written = getattr(torch.ops.xpuruntime, op).decided, OPERATIONS[op].writes
        if written > 0:
            decided(tensors[:written], tensors[written:], names, text, kernel)
            return ()
        outputs = decided(tensors, names, text, kernel)
    else:
        names, text = call_text(op, tuple([x is not None for x in present.values()]), tuple(attributes.items()))
        outputs = _decide(op, tensors, names, text, kernel, confirm, own)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def takes(op: str, operands: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> bool:
    """Say whether the active policy leaves such a call to measured times, or first names a kernel that serves it."""
    active = active_policy()
    like = next(iter(operands.values()))
    if active is None or op not in active.ops:
        return False
    phase, module = active.call_context()
    facts = facts_of_call(op, device=like.device, dtype=like.dtype, phase=phase, module=module, sizes={})
    word = active.policy.kernels.compiled_rules.match(facts).use[0]
    if word == "auto":
        return active.tunes
    kernel = bound_kernel(word, op)
    if kernel is None or rejection_of_word(word, op):
        return False
    text = text_of(op, attributes)
    exact = torch.are_deterministic_algorithms_enabled() or active.policy.execution.deterministic
    return not _rejection(kernel, list(operands.values()), ",".join(operands), text, torch.is_grad_enabled(), exact)


def _decide(
    op: str,
    tensors: Sequence[Tensor],
    names: str,
    attributes: str,
    kernel: str,
    confirm: tuple[str, Callable[[], bool]] | None = None,
    own: Any = None,
) -> Sequence[Tensor]:
    """Let the policy choose, and go on to PyTorch's own operations or to the operator that has one kernel."""
    records = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if records and OPERATIONS[op].large:
        needed = tuple([name for name, x in zip(names.split(","), tensors, strict=True) if x.requires_grad])
        attributes += f"; needs={needed!r}"
    route = _route_of(op, tensors, names, attributes, kernel, records)
    if route is None or route.place is None:
        active = active_policy()
        if own is not None and route is not None and route.asked == ("auto",) and not route.open and active is not None:
            active.keep_own(own)
        return _by_torch(op, route, tensors, names, attributes)
    if confirm is not None and not (isinstance(route.place, BoundKernel) and route.place.kernel.alone):
        name, holds = confirm
        if not holds():
            return _decide(op, tensors, names, attributes.replace(f"{name}=True", f"{name}=False"), kernel)
    if isinstance(route.place, BoundKernel) and _is_unwatched(op, tensors):
        plan: CallPlan = route.plan or CallPlan(op, route.place, tensors, names, attributes, context.phase())
        route.plan = plan
        return _planned(plan, tensors, records)
    word = route.place.word if isinstance(route.place, BoundKernel) else route.kernel
    served = _served(op, tensors, names, attributes, word, context.phase())
    return served[: OPERATIONS[op].results]


def _is_unwatched(op: str, tensors: Sequence[Tensor]) -> bool:
    """Say whether nobody would see that a call goes past the dispatcher, which costs more than most kernels' host."""
    if OPERATIONS[op].writes or CONTEXT.observer is not None or is_watched() or _private_api.profiler_enabled():
        return False
    plain = are_plain(tensors) and not tensors[0].is_meta and not is_put_off(tensors)
    return plain and not torch.compiler.is_compiling()


def _planned(plan: CallPlan, tensors: Sequence[Tensor], records: bool) -> Sequence[Tensor]:
    if records:
        args = (plan.operation, plan, plan.names, plan.attributes, plan.word, "")
        return _Served.apply(*args, *tensors)[: plan.operation.results]  # type: ignore[no-any-return]
    return plan.forward(tensors)[: plan.operation.results]


def _served(op: str, tensors: Sequence[Tensor], names: str, attributes: str, word: str, phase: str) -> list[Tensor]:
    operator, written = getattr(torch.ops.xpuruntime, op).served, OPERATIONS[op].writes
    if written:
        operator(list(tensors[:written]), list(tensors[written:]), names, attributes, word, phase)
        return []
    return list(operator(list(tensors), names, attributes, word, phase))


def _by_torch(op: str, route: Route | None, tensors: Sequence[Tensor], names: str, attributes: str) -> list[Tensor]:
    part = functools.partial(_part, OPERATIONS[op].part) if OPERATIONS[op].part else None

    def run(*inputs: Tensor) -> list[Tensor]:
        return reference(op, inputs, names, attributes, part)

    if CONTEXT.observer is None or route is None:
        return run(*tensors)
    outputs: list[Tensor] = CONTEXT.observer.call(f"xpuruntime::{op}", op, route, run, tuple(tensors), {})
    return outputs


def _part(op: str, *tensors: Tensor, kernel: str = "", **attributes: Any) -> Any:
    return perform(op, dict(zip(OPERATIONS[op].operands, tensors, strict=False)), attributes, kernel)


def _route_of(
    op: str, tensors: Sequence[Tensor], names: str, attributes: str, kernel: str, records: bool
) -> Route | None:
    """Return the route of a call, each kernel that the policy names asked whether it can serve it."""
    if kernel:
        return _named(op, tensors, names, attributes, kernel, records)
    active = active_policy()
    if active is None or op not in active.ops:
        return None
    known = _key_of(active, op, tensors, names, attributes, records)
    phase, module, exact, traced, like = *known[4:7], known[8], tensors[0]
    if not traced:
        CONTEXT.observe_device(like.device)
    route = active.routes.get(known)
    if route is not None and not route.open:
        return route
    facts = facts_of_call(
        op, device=like.device, dtype=like.dtype, phase=phase if active.by_phase else "", module=module, sizes={}
    )
    skip: tuple[tuple[str, str], ...] = ()
    while True:
        description = f"{op} of {', '.join(str(list(x.shape)) for x in tensors)} {like.dtype} on {like.device}"
        route = active.resolve(known, facts, skip=skip, description=description, deterministic=exact, keep=False)
        if route.place is None:
            break
        if isinstance(route.place, BoundKernel):
            word, reason = route.place.word, _rejection(route.place, tensors, names, attributes, records, exact)
        else:
            word, reason = route.kernel, f"it is no kernel that {op} of this form can be given to"
        if not reason:
            break
        skip = (*skip, *(passed for passed in route.passed_over if passed not in skip), (word, reason))
    if route.open and not traced:
        return _settle(active, known, route, op, tensors, names, attributes, records, exact)
    route.open = False  # what is compiled is left to the compiler
    active.keep(known, route)
    return route


def _key_of(
    active: CompiledPolicy, op: str, tensors: Sequence[Tensor], names: str, attributes: str, records: bool
) -> tuple[Any, ...]:
    exact = torch.are_deterministic_algorithms_enabled() or active.policy.execution.deterministic
    traced = torch.compiler.is_compiling() or not are_plain(tensors)
    module = (module_paths.traced() or module_paths.current()) if active.by_module else ""
    return (
        op, names, attributes, records, context.phase(), module, exact, context.capturing(), traced,
        *_private_api.compile_stance(), transforms_and_tangents(tuple(tensors)), *map(alignment_of, tensors),
        (None if traced else context.call_key(op, *tensors)) or tuple(map(traits, tensors)),
    )  # fmt: skip


def _settle(
    active: CompiledPolicy, known: Any, route: Route, op: str, tensors: Sequence[Tensor], names: str, attributes: str,
    records: bool, exact: bool,
) -> Route:  # fmt: skip
    """Let measured times choose; of a call whose gradient will be asked for, forward and backward together."""
    device = tensors[0].device
    with tuning.as_tuning():
        rejections = {
            bound: _rejection(bound, tensors, names, attributes, records, exact)
            for bound in automatic_kernels(op, device, deterministic=exact)
        }
    if any(reason.endswith(COMPARISON_ENDED) for reason in rejections.values()):
        return route
    places = {bound.kernel.id: bound for bound, reason in rejections.items() if not reason}
    if not places:
        route.open = False
        active.keep(known, route)
        return route
    count = OPERATIONS[op].results

    def run(by: Callable[[list[Tensor]], Sequence[Tensor]]) -> None:
        with torch.set_grad_enabled(records):
            inputs = [x.detach().requires_grad_(records and x.requires_grad) for x in tensors]
            outputs = by(inputs)[:count]
            if records:
                torch.autograd.grad(outputs, [x for x in inputs if x.requires_grad], [*map(torch.ones_like, outputs)])

    phase = "train" if records else context.phase()
    plans = {word: CallPlan(op, bound, tensors, names, attributes, phase) for word, bound in places.items()}

    def served(word: str, inputs: list[Tensor]) -> Sequence[Tensor]:
        # What a call asks on its way to a kernel counts, of which code that is left to the model needs nothing.
        active.routes.get(_key_of(active, op, inputs, names, attributes, records))
        if _is_unwatched(op, inputs):
            return _planned(plans[word], inputs, records)
        return _served(op, inputs, names, attributes, word, phase)

    part = _kernel_of_part(op, tensors, names, attributes, records)
    if part is None:
        return route
    by = functools.partial(_part, OPERATIONS[op].part, kernel=part) if part else None
    candidates = [(route.kernel, lambda: run(lambda inputs: reference(op, inputs, names, attributes, by)))]
    candidates += [(word, functools.partial(run, functools.partial(served, word))) for word in places]
    layouts = ",".join(f"{list(x.shape)}{list(x.stride())}{x.dtype}" for x in tensors)
    text = f"{names};{attributes};{layouts};grad={records};deterministic={exact}{part and f';part={part}'}"
    best = tuning.pick(op, text, candidates, device, passes=dict.fromkeys(places, 0), active=active)
    if best is None:  # it could not be measured now
        return route
    tuned = tuning.keep_tuned(active, known, route, best, places.get(best), text, device, asked=True)
    tuned.plan = plans.get(best)
    return tuned


def _kernel_of_part(op: str, tensors: Sequence[Tensor], names: str, attributes: str, records: bool) -> str | None:
    """Return the kernel that the active policy gives a part of a call; empty for PyTorch's own."""
    # ``None`` where that is not known yet.
    words: list[str | None] = [""]

    def decide(*operands: Tensor, **stated: Any) -> Tensor:
        part = OPERATIONS[op].part
        own_names = ",".join(OPERATIONS[part].operands[: len(operands)])
        route = _route_of(part, operands, own_names, text_of(part, stated), "", records)
        if route is not None:
            words.append(None if route.open else route.place.word if isinstance(route.place, BoundKernel) else "")
        return operands[0]

    if OPERATIONS[op].part:
        with torch.set_grad_enabled(records):
            inputs = [x.detach().requires_grad_(records and x.requires_grad) for x in tensors]
            reference(op, inputs, names, attributes, decide)
    return words[-1]


def _named(op: str, tensors: Sequence[Tensor], names: str, attributes: str, kernel: str, records: bool) -> Route:
    bound = bound_kernel(kernel, op)
    reason = rejection_of_word(kernel, op) or ("" if bound is not None else "there is no such kernel")
    if bound is not None and not reason:
        reason = _rejection(bound, tensors, names, attributes, records, torch.are_deterministic_algorithms_enabled())
    if reason or bound is None:
        raise UnsupportedOperationError(f"kernel={kernel!r} cannot serve {op}: {reason}", engine="torch")
    return Route(op, (kernel,), BY_CALL, bound.kernel.id, place=bound)


def _rejection(
    bound: BoundKernel, tensors: Sequence[Tensor], names: str, attributes: str, records: bool, exact: bool
) -> str:
    options = {**options_of(attributes), "paired": True}
    operands = dict(zip(names.split(","), tensors, strict=True))
    around = transforms_and_tangents(tuple(tensors))
    if any(kind is True or kind in (_KINDS.Vmap, _KINDS.Jvp) for kind in around):
        return "its operator has no rule for vmap, and no forward-mode derivative"
    if records and (learned := [n for n in OPERATIONS[bound.kernel.op].without_gradient if operands[n].requires_grad]):
        return f"kernels of {bound.kernel.op} compute no gradient of {' and '.join(learned)}"
    for phase in ("train", "backward") if records else ("infer",):
        reason = bound.rejection(call_of(bound.kernel.op, phase, operands, options, deterministic=exact))
        if reason:
            return reason if phase != "backward" else f"its gradient: {reason}"
    return ""


def _placed(op: str, word: str) -> BoundKernel:
    bound = bound_kernel(word, op)
    if bound is None:
        raise InputError(f"xpuruntime::{op} is called with the kernel {word!r}, which is not registered any more")
    return bound


def _observed(
    op: str, name: str, phase: str, bound: BoundKernel, run: Callable[..., Any], tensors: Sequence[Tensor]
) -> Any:
    if CONTEXT.observer is None:
        return run(*tensors)
    active, source = active_policy(), BY_CALL
    words: tuple[str, ...] = (bound.word,)
    if active is not None:
        module = (module_paths.traced() or module_paths.current()) if active.by_module else ""
        like = tensors[0]
        facts = facts_of_call(op, device=like.device, dtype=like.dtype, phase=phase, module=module, sizes={})
        wanted = active.policy.kernels.compiled_rules.match(facts)
        if wanted.source != "default" and (bound.word in wanted.use or "auto" in wanted.use):
            words, source = wanted.use, wanted.source
    times = () if active is None else _times(active, op, bound, tensors)
    route = Route(op, words, source, bound.kernel.id, place=bound, times=times)
    return CONTEXT.observer.call(name, op, route, run, tuple(tensors), {})


def _times(active: CompiledPolicy, op: str, bound: BoundKernel, tensors: Sequence[Tensor]) -> tuple[Measured, ...]:
    kinds = [(tuple(map(int, x.shape)), str(x.dtype).removeprefix("torch.")) for x in tensors]
    times = (
        route.times
        for route in list(active.routes.values())
        if route.tuned and route.place is bound and route.op == op and isinstance(route.plan, CallPlan)
        and [(operand.shape, operand.dtype) for operand in route.plan.call.operands.values()] == kinds
    )  # fmt: skip
    return next(times, ())


class _Served(Recorded):
    """The node of an operation in a graph of autograd."""

    operation: Operation

    @classmethod
    def record(cls, keyset: Any, tensors: Sequence[Tensor], *stated: str) -> Any:
        return list(super().record(cls.operation, keyset, *stated, *tensors))

    @staticmethod
    def forward(
        ctx: Any, operation: Operation, plan: Any, names: str, attributes: str, kernel: str, phase: str,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.operation, ctx.names, ctx.attributes, ctx.kernel = operation, names, attributes, kernel
        ctx.count, ctx.plan = len(tensors), plan if isinstance(plan, CallPlan) else None
        ctx.set_materialize_grads(False)  # zeros like what is saved beside the outputs would be in vain
        inputs: Sequence[Tensor] = tensors
        if ctx.plan is not None:
            outputs: Sequence[Tensor] = ctx.plan.forward(tensors)
            of_inputs, of_outputs = ctx.plan.kept
            kept = outputs
            if of_outputs is not None:
                inputs = [x if other is None else other for x, other in zip(tensors, of_inputs, strict=True)]
                kept = [*of_outputs, *outputs[operation.results :]]
            if len(outputs) > operation.results:
                ctx.mark_non_differentiable(*outputs[operation.results :])
            ctx.save_for_backward(*inputs, *kept)
            return tuple(outputs)
        operator = getattr(torch.ops.xpuruntime, operation.name).served
        outputs = redispatch(operator, plan, list(tensors), names, attributes, kernel, phase)
        ctx.mark_non_differentiable(*outputs[operation.results :])
        kept = outputs
        if operation.linear:
            named = zip(names.split(","), tensors, strict=True)
            inputs = tuple(without_data(x) if name in operation.linear else x for name, x in named)
            kept = [*map(without_data, outputs[: operation.results]), *outputs[operation.results :]]
        ctx.save_for_backward(*inputs, *kept)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        operation, saved = ctx.operation, ctx.saved_tensors
        tensors, kept = saved[: ctx.count], saved[ctx.count :]
        if CONTEXT.lags and not torch.compiler.is_compiling() and not context.capturing():
            CONTEXT.observe_device(tensors[0].device)
        of_outputs = [
            torch.zeros_like(x) if grad is None else laid_out(grad, grad) if operation.linear else grad.contiguous()
            for grad, x in zip(grads[: operation.results], kept, strict=False)
        ]
        if torch.is_grad_enabled():
            with torch.enable_grad():
                outputs = reference(operation.name, tensors, ctx.names, ctx.attributes)
                gradients_of_torch = torch.autograd.grad(
                    outputs, [x for x in tensors if x.requires_grad], of_outputs, create_graph=True, allow_unused=True
                )
            each = iter(gradients_of_torch)
            return *(None,) * 6, *(next(each) if x.requires_grad else None for x in tensors)
        if ctx.plan is not None and not is_watched() and not _private_api.profiler_enabled() and not CONTEXT.observer:
            return *(None,) * 6, *ctx.plan.backward(of_outputs, tensors, kept)
        operator = getattr(torch.ops.xpuruntime, f"{operation.name}_backward").served
        values = iter(operator(of_outputs, list(tensors), list(kept), ctx.names, ctx.attributes, ctx.kernel))
        wanted = with_gradient(operation, ctx.names, ctx.attributes)
        return *(None,) * 6, *(next(values) if x else None for x in wanted)


def define(operation: Operation) -> None:
    """Register the operators of an operation. Once for each."""
    if operation.writes:
        _define_in_place(operation)
        return
    op = operation.name

    def decided(tensors: Sequence[Tensor], names: str, attributes: str, kernel: str) -> list[Tensor]:
        return list(_decide(op, tensors, names, attributes, kernel))

    def served(tensors: Sequence[Tensor], names: str, attributes: str, kernel: str, phase: str) -> list[Tensor]:
        bound = _placed(op, kernel)
        like = outputs_like(op, tensors, names, attributes)

        def run(*inputs: Tensor) -> list[Tensor]:
            outputs, extra = bound.forward(call_by(bound, phase, inputs, names, attributes), inputs, like)
            return [*outputs, *extra]

        results: list[Tensor] = _observed(op, f"xpuruntime::{op}", phase, bound, run, tensors)
        return results

    def fake(tensors: Sequence[Tensor], names: str, attributes: str, kernel: str, phase: str) -> list[Tensor]:
        bound = _placed(op, kernel)
        call = call_by(bound, phase, tensors, names, attributes)
        return [*outputs_like(op, tensors, names, attributes), *bound.saved_like(call, tensors)]

    def served_backward(
        grads: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor], names: str, attributes: str,
        kernel: str,
    ) -> list[Tensor]:  # fmt: skip
        bound, n = _placed(op, kernel), len(grads)

        def run(*inputs: Tensor) -> list[Tensor]:
            call = call_by(bound, "backward", inputs, names, attributes)
            like = gradients_like(operation, inputs, names, attributes, grads)
            gradients = bound.backward(call, Saved(tuple(inputs), tuple(kept[:n]), tuple(kept[n:])), tuple(grads), like)
            return [x for x in gradients if x is not None]

        gradients: list[Tensor] = _observed(op, f"xpuruntime::{op}_backward", "train", bound, run, tensors)
        return gradients

    def fake_backward(
        grads: Any, tensors: Sequence[Tensor], kept: Any, names: str, attributes: str, *_: Any
    ) -> list[Tensor]:
        del kept
        like = gradients_like(operation, tensors, names, attributes, grads)
        pairs = zip(tensors, like, strict=True)
        return [x.new_empty_strided(y.shape, y.stride()) for x, y in pairs if y is not None]

    _library.define(f"{op}.decided(Tensor[] tensors, str names, str attributes, str kernel) -> Tensor[]")
    _library.define(f"{op}.served(Tensor[] tensors, str names, str attributes, str kernel, str phase) -> Tensor[]")
    _library.define(
        f"{op}_backward.served(Tensor[] grads, Tensor[] tensors, Tensor[] kept, str names, str attributes, str kernel)"
        " -> Tensor[]"
    )
    _library.impl(f"{op}.decided", decided, "CompositeImplicitAutograd")
    _library.impl(f"{op}.served", served, "CompositeExplicitAutograd")
    _library.impl(f"{op}_backward.served", served_backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"xpuruntime::{op}.served", fake, lib=_library)
    torch.library.register_fake(f"xpuruntime::{op}_backward.served", fake_backward, lib=_library)
    node = type(f"xpuruntime_{op}", (_Served,), {"operation": operation})
    kernel = autograd_kernel(getattr(torch.ops.xpuruntime, op).served, node)
    _library.impl(f"{op}.served", kernel, "Autograd", with_keyset=True)


def _define_in_place(operation: Operation) -> None:
    """Register the operators of an operation that writes its first operands, which their schemas say."""
    op = operation.name

    def decided(written: Sequence[Tensor], tensors: Sequence[Tensor], names: str, attributes: str, kernel: str) -> None:
        _decide(op, [*written, *tensors], names, attributes, kernel)

    def served(
        written: Sequence[Tensor], tensors: Sequence[Tensor], names: str, attributes: str, kernel: str, phase: str
    ) -> None:
        bound = _placed(op, kernel)

        def run(*inputs: Tensor) -> None:
            bound.forward(call_by(bound, phase, inputs, names, attributes), inputs, (), saved=0)

        _observed(op, f"xpuruntime::{op}", phase, bound, run, [*written, *tensors])
        torch.autograd.graph.increment_version(written)

    written = "Tensor(a!)[] written, Tensor[] tensors, str names, str attributes, str kernel"
    _library.define(f"{op}.decided({written}) -> ()")
    _library.define(f"{op}.served({written}, str phase) -> ()")
    _library.impl(f"{op}.decided", decided, "CompositeImplicitAutograd")
    _library.impl(f"{op}.served", served, "CompositeExplicitAutograd")
    torch.library.register_fake(f"xpuruntime::{op}.served", lambda *_: None, lib=_library)


for _operation in OPERATIONS.values():
    define(_operation)
