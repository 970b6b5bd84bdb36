# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Selection of a kernel for an attention call: the route by its policy, and calls to be measured."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from xpuruntime import _core
from xpuruntime.ops import tuned_records
from xpuruntime.ops.call_context import prepare
from xpuruntime.policies import KernelPolicy, Policy
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention import advised, sdpa_backends
from xpuruntime.pytorch.attention.call import SDPA, AttentionCall, EntryPoint, last_of_range
from xpuruntime.pytorch.attention.sdpa_backends import BACKENDS, is_enabled, rejection, static_size
from xpuruntime.pytorch.dispatch import context, tuning
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy, thread_policy
from xpuruntime.pytorch.dispatch.fast_path import fast_path
from xpuruntime.pytorch.dispatch.route import BY_CALL, NATIVE_NAMES, Route
from xpuruntime.pytorch.dispatch.step_cost import time_on_cuda
from xpuruntime.pytorch.providers.bound import BoundKernel, automatic_kernels, call_of
from xpuruntime.pytorch.providers.canary import COMPARISON_ENDED

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.ops.call_context import CallContext


def call_by_backend(call: AttentionCall, kernel: str | None, run: Callable[[], Tensor]) -> None:
    """Do a call by `run`, where PyTorch can choose nothing but one of its kernels; ``None``: what it has enabled."""

    def by_this_one() -> Tensor:
        with sdpa_backends.by_backend(kernel):
            return run()

    _with_gradient(call, by_this_one)


def call_xrt_kernel(
    call: AttentionCall, target: CallContext | BoundKernel, operands: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Do a call by the kernel at a place; `operands` are query, key and value in four dimensions.

    Its gradient comes by way of autograd, as the native one's does: going there costs either of them the same.
    """
    _with_gradient(call, lambda: _XrtCall.apply(*operands, call, target))


def _with_gradient(call: AttentionCall, run: Callable[[], Tensor]) -> None:
    with torch.set_grad_enabled(call.needs_grad):
        out = run()
        if call.needs_grad:
            torch.autograd.grad(out, [x for x in call[:3] if x.requires_grad], torch.ones_like(out))


class _XrtCall(_private_api.SingleLevelFunction):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, target: CallContext | BoundKernel
    ) -> Tensor:
        if isinstance(target, BoundKernel):
            out, lse = target.attention(q, k, v, call.mask, call.is_causal, call.scale, call.needs_grad, call.phase)
        else:
            out = torch.empty_like(q)
            result = _core.op_attention(
                target, q, k, v, call.mask, None, out, call.needs_grad, _causal(call), call.scale, 0.0, None, None
            )
            lse = result[1] if call.needs_grad else None  # without it, `result` is the output alone
        if call.needs_grad:
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.options = (call, target)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        call, target = ctx.options
        if isinstance(target, BoundKernel):
            operands = (grads[0], q, k, v, out, lse, call.mask, call.is_causal, call.scale)
            return (*target.attention_backward(*operands), None, None)
        of_q, of_k, of_v = (torch.empty_like(x) for x in (q, k, v))
        _core.op_attention_backward(
            target, grads[0], q, k, v, out, lse, call.mask, None, of_q, of_k, of_v, _causal(call), call.scale, 0.0, None
        )
        return of_q, of_k, of_v, None, None


def _causal(call: AttentionCall) -> Any:
    return "top_left" if call.is_causal else False


#: What serves `fused_attention` and compiled graphs without a policy: xpuruntime where it can, else PyTorch's.
DEFAULT_NAMES = ("cuda_raw.flash_attention_v2", "auto")


def deterministic(active: CompiledPolicy) -> bool:
    """Say whether kernels have to give the same bits in each run, by PyTorch's switch or by the policy."""
    return torch.are_deterministic_algorithms_enabled() or active.policy.execution.deterministic


#: Seconds of the host that the operator of a kernel outside of PyTorch takes in compiled code at least, and the calls
#: by which that is measured.
_OPERATOR_S, _HOST_CALLS = 75e-6, 20
#: Bytes that kernels read at once.
_ALIGNED = 16

_lock = threading.Lock()
_MOST = 256


def policy_by_call(kernel: str, under: CompiledPolicy | None) -> CompiledPolicy:
    """Return the policy `under`, but asking for the kernels that a call itself names, joined by commas.

    Strictly, unless there is a question mark after them: that is said where the policy itself has led to this kernel.
    """
    key = (0 if under is None else under.number, kernel)
    compiled = CONTEXT.policies_by_call.get(key)
    if compiled is None:
        kernels = KernelPolicy(attention=tuple(kernel.removesuffix("?").split(",")))
        base = Policy() if under is None else under.policy
        named = not kernel.endswith("?")
        compiled = CompiledPolicy(
            base.replace(kernels=kernels, mode="strict" if named else base.mode),
            None if under is None else under.log,
            source=BY_CALL if named else "",
        )
        with _lock:
            if len(CONTEXT.policies_by_call) >= _MOST:
                CONTEXT.policies_by_call.clear()
            compiled = CONTEXT.policies_by_call.setdefault(key, compiled)
    return compiled


@functools.cache
def default_policy() -> CompiledPolicy:
    """Return the policy of xpuruntime operators where the active one leaves attention free."""
    return CompiledPolicy(Policy(kernels=KernelPolicy(attention=DEFAULT_NAMES)))


def policy_for_xrt(kernel: str) -> CompiledPolicy:
    """Return the policy of an xpuruntime operator: of the call, the active one, or else `default_policy`."""
    active = active_policy()
    if kernel:
        return policy_by_call(kernel, active)
    if active is None or ("attention" not in active.ops and active.policy.kernels.get("attention") in (None, "auto")):
        return default_policy()
    return active


def find_route(
    active: CompiledPolicy,
    key: Any,
    call: AttentionCall,
    natively: Callable[[], Any],
    skip: tuple[tuple[str, str], ...] = (),
) -> Route:
    """Return which kernel serves a call, found by asking each that the policy names whether it can."""
    exact = deterministic(active)
    entry = _entry_of(call)
    while True:
        route = active.resolve(
            key, call.facts(), deterministic=exact, skip=skip, description=str(call), entry=entry, keep=False
        )
        if route.kernel == SDPA.default:
            advised.warn_of_own_choice(active, call, route.asked)
        if route.open:
            return _settle(active, key, route, call, natively, exact, {kernel_name for kernel_name, _ in skip})
        if route.place is None:
            reason, kernel_name = native_rejection(route.kernel, call), _word_of(route)
        elif isinstance(route.place, BoundKernel):
            reason, kernel_name = call.unfit or provider_rejection(route.place, call, exact), route.place.word
        else:
            reason, kernel_name = call.unfit or xrt_rejection(route.kernel, call, exact), route.kernel
        if not reason or not kernel_name:
            active.keep(key, route)
            return route
        skip = (*skip, *(rejected for rejected in route.passed_over if rejected not in skip), (kernel_name, reason))


def four(x: Tensor) -> Tensor:
    """Return a view of 4 dimensions, ``[batch, heads, length, head_dim]``; `RuntimeError` where there is none."""
    if x.dim() == 4:
        return x
    if x.dim() < 4:
        return x[(None,) * (4 - x.dim())]
    return x.view(-1, *x.shape[-3:])


def _entry_of(call: AttentionCall) -> EntryPoint:
    """Return `SDPA`, its default another kernel of PyTorch's where the one that it chooses is known to be wrong."""
    if not advised.rows_on(call.q.device) or advised.advisory_of(own := advised.own_choice(call), call) is None:
        return SDPA
    kernels = ("torch.flash", "torch.efficient", "torch.math")
    able = [id_ for id_ in kernels if id_ != own and not native_rejection(id_, call)]
    return SDPA._replace(default=next(filter(is_enabled, able), able[0])) if able else SDPA


def _word_of(route: Route) -> str:
    passed = {name for name, _ in route.passed_over}
    names = NATIVE_NAMES["attention"]
    return next((name for name in route.asked if name not in passed and names.get(name) == route.kernel), "")


def native_rejection(kernel: str, call: AttentionCall) -> str:
    """Return why a kernel of PyTorch's cannot serve a call; empty where it can, or it is whatever PyTorch chooses."""
    if kernel not in BACKENDS:
        return ""
    if call.backward and call.dropout_p > 0:
        return "with dropout, the gradient is by the kernel of the forward"
    if (advisory := advised.advisory_of(kernel, call)) is not None:
        return str(advisory)
    return rejection(
        kernel, call.q, call.k, call.v, call.mask, call.dropout_p, call.is_causal,
        scale=call.scale, enable_gqa=call.enable_gqa,
    )  # fmt: skip


def xrt_rejection(kernel_name: str, call: AttentionCall, exact: bool) -> str:
    """Return why no xpuruntime kernel that a name means can serve; empty where one can, or the core is to say it."""
    prepare()
    registry = _core.KernelRegistry.instance()
    for op in ("attention_backward",) if call.backward else ("attention", "attention_backward"):
        if op == "attention_backward" and not (call.backward or call.needs_grad):
            continue
        ids = registry.find("attention", kernel_name.partition("@")[0])
        if not ids:
            return _core.why_not_built(kernel_name)
        try:
            answers = registry.supports(_description(op, call, exact))
        except ValueError:
            return ""
        wrong = {name: str(row) for name in ids if (row := advised.advisory_of(name, call)) is not None}
        verdicts = [
            (ok and name not in wrong, wrong.get(name, reason) if ok else reason)
            for name, ok, reason in answers
            if name in ids
        ]
        if not any(ok for ok, _ in verdicts):
            said = "; ".join(dict.fromkeys(reason for _, reason in verdicts)) or "it has no such kernel"
            return said if op == "attention" or call.backward else f"its gradient: {said}"
    return ""


def provider_rejection(kernel: BoundKernel, call: AttentionCall, exact: bool) -> str:
    """Return why a kernel of another package cannot serve a call and its gradient; empty where it can."""
    if call.dropout_p > 0:
        return "it has no dropout"
    operands = {"q": four(call.q), "k": four(call.k), "v": four(call.v)}
    if call.mask is not None:
        operands["mask"] = four(call.mask)
    attributes = {"causal": call.is_causal, "scale": call.scale}
    phases = ["backward"] if call.backward else [call.phase, *(["backward"] if call.needs_grad else [])]
    for phase in phases:
        tensors = {**operands, "grad": operands["q"]} if phase == "backward" else operands
        reason = kernel.rejection(call_of("attention", phase, tensors, attributes, deterministic=exact))
        if reason:
            return reason if phase == call.phase or call.backward else f"its gradient: {reason}"
    return ""


_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.bool: "bool",
}


def _operand(x: Tensor, *, strided: bool = True) -> dict[str, Any]:
    description: dict[str, Any] = {
        "dtype": _NAMES.get(x.dtype, str(x.dtype)),
        "shape": tuple(static_size(n) for n in x.shape),
    }
    if strided:
        description["strides"] = tuple(static_size(n) for n in x.stride())
    return description


def _description(op: str, call: AttentionCall, exact: bool) -> dict[str, Any]:
    q, k, v = four(call.q), four(call.k), four(call.v)
    like_q = _operand(q, strided=False)
    operands: dict[str, Any] = {"q": _operand(q), "k": _operand(k), "v": _operand(v)}
    if call.mask is not None:
        operands["mask"] = _operand(four(call.mask))
    if call.dropout_p > 0:
        operands["rng"] = {"dtype": "int64", "shape": (2,)}
    lse = {"dtype": "float32", "shape": like_q["shape"][:3]}
    if op == "attention":
        operands["out"] = like_q
        if call.needs_grad:
            operands["lse"] = lse
    else:
        operands.update(grad_out=like_q, out=like_q, lse=lse, grad_q=like_q)
        operands.update(grad_k=_operand(k, strided=False), grad_v=_operand(v, strided=False))
    return {
        "op": op,
        "phase": "backward" if op == "attention_backward" else call.phase or "infer",
        "device": f"cuda:{q.device.index or 0}" if q.device.type == "cuda" else "cpu",
        "operands": operands,
        "attributes": {
            "dropout_p": float(call.dropout_p),
            "causal": "top_left" if call.is_causal else "none",
            "deterministic": exact,
        },
    }


def _settle(
    active: CompiledPolicy,
    key: Any,
    route: Route,
    call: AttentionCall,
    natively: Callable[[], Any],
    exact: bool,
    skip: set[str],
) -> Route:
    """Let measured times choose; of a call whose gradient will be asked for, forward and backward together."""
    # Among xpuruntime kernels, those of installed packages, and those that PyTorch has beside its own choice. A call
    # with dropout stays PyTorch's, and so does one under `torch.func`.
    # Inside of transforms nothing can be measured.
    moved = bool(context.transforms()) or _private_api.forward_level() >= 0
    fixed = bool(call.unfit) or call.dropout_p > 0 or moved
    xrt_kernel = [] if fixed else [id_ for id_ in _xpuruntime_kernels_for(call, exact) if id_ not in skip]
    packages = [] if fixed or call.backward else automatic_kernels("attention", call.q.device, deterministic=exact)
    with tuning.as_tuning():
        rejections = {bound_kernel: provider_rejection(bound_kernel, call, exact) for bound_kernel in packages}
    if any(reason.endswith(COMPARISON_ENDED) for reason in rejections.values()):
        active.keep(key, None)
        return route
    bound = {bound_kernel.kernel.id: bound_kernel for bound_kernel, reason in rejections.items() if not reason}
    others = [] if fixed or call.backward else [id_ for id_ in others_of_pytorch(call) if id_ != route.kernel]
    best: str | None = route.kernel
    text = ""
    if call.backward:  # of a graph that has the xpuruntime operator: the forward is done
        best = xrt_kernel[0] if xrt_kernel else route.kernel
    elif xrt_kernel or others or bound:
        places: dict[str, CallContext | BoundKernel] = {
            id_: active.place("attention", id_, route.source, call.module, allow_tf32=False, deterministic=exact)
            for id_ in xrt_kernel
        }
        places |= {id_: target for id_, target in bound.items() if id_ not in skip}
        own = route.kernel if route.kernel in BACKENDS else None

        def candidates_for(
            call: AttentionCall, natively: Callable[[], Any]
        ) -> Sequence[tuple[str, Callable[[], None]]]:
            by_torch = {route.kernel: own, **{id_: id_ for id_ in others}}
            runs = [
                (id_, functools.partial(call_by_backend, call, backend, natively)) for id_, backend in by_torch.items()
            ]
            operands = tuple(map(four, call[:3]))
            return runs + [(id_, functools.partial(call_xrt_kernel, call, at, operands)) for id_, at in places.items()]

        pin = CONTEXT.thread.route_pin
        if pin is not None:
            candidates = candidates_for(call, natively)
            chosen = [*xrt_kernel, *others, *bound][0]
            run = dict(candidates)[chosen]
            return pin.settle(active, key, route, candidates[0][1], (chosen, places.get(chosen), run))
        text = f"{_text_of(call)};deterministic={exact}"
        passes = dict.fromkeys(others, 0 if fast_path().route == "addon" else 1)  # 0: fast kernels call it
        passes |= dict.fromkeys(places, 2 if call.needs_grad else 1)  # PyTorch's gradient is PyTorch's to call

        def pick(*of: Any) -> str | None:
            return tuning.pick("attention", text, candidates_for(*of), call.q.device, passes=passes, active=active)

        if is_lowered():
            outside = {name for name, place in places.items() if not is_traceable(place, call[:4])}

            def decide(real: AttentionCall, natively: Callable[[], Any]) -> str | None:
                best = pick(real, natively)
                if best not in outside or CONTEXT.replays > 1 or call.q.device.type != "cuda":
                    return best
                # What is not captured may wait for the host, which has to gain more on the device than it costs here.
                times = {name: us for name, us, _ in tuning.measured("attention", text, call.q.device, active=active)}
                native = min(times.keys() - outside, key=times.__getitem__, default=route.kernel)
                mark = ("operator", f"{best} beside {native}", text)
                if mark not in CONTEXT.route_costs:
                    runs = dict(candidates_for(real, natively))
                    CONTEXT.route_costs[mark] = _operator_cost(runs[best], runs[native], real)
                return best if times.get(native, 0.0) - times[best] > CONTEXT.route_costs[mark] * 1e6 else native

            with tuning.replayed():  # by the time of the device
                best = _pick_while_compiling(call, decide)
        else:
            best = pick(call, natively)
    if best is None:
        active.keep(key, None)
        return route
    target: CallContext | BoundKernel | None = bound.get(best)
    if best in xrt_kernel:
        target = active.place("attention", best, route.source, call.module, allow_tf32=False, deterministic=exact)
    return tuning.keep_tuned(active, key, route, best, target, text, call.q.device)


def _operator_cost(kernel: Callable[[], Any], native: Callable[[], Any], call: AttentionCall) -> float:
    """Return the seconds of the host that a call costs more by a kernel outside of PyTorch, or are assumed."""
    # Ranks, which share the times of kernels, go by what is assumed, so that all of them choose alike.
    least = _OPERATOR_S * (2 if call.needs_grad else 1)
    if tuned_records.SharedTimes.current() is not None:
        return least
    with thread_policy(None):
        host, native_host = (time_on_cuda(run, call.q.device, _HOST_CALLS)[0] for run in (kernel, native))
    return max(least, host - native_host)


def is_lowered() -> bool:
    """Say whether a graph is traced that Dynamo has captured before, in which masks are what kernels will get."""
    kinds = (_private_api.mode_keys.PROXY, _private_api.mode_keys.FUNCTIONAL)
    return context.is_compiling() and any(_private_api.dispatch_mode(kind) is not None for kind in kinds)


def is_traceable(place: CallContext | BoundKernel | None, tensors: Sequence[Any]) -> TypeGuard[BoundKernel]:
    """Say whether a graph may have the operators of a kernel themselves; nothing asks for limits when they run."""
    if not isinstance(place, BoundKernel) or not place.kernel.traceable or not is_lowered():
        return False
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    fixed = all(isinstance(n, int) for x in tensors for n in (*x.shape, *x.stride(), x.storage_offset()))
    return fixed and not any(x.storage_offset() * x.element_size() % _ALIGNED for x in tensors if x.dtype != torch.bool)


def _pick_while_compiling(
    call: AttentionCall, pick: Callable[[AttentionCall, Callable[[], Any]], str | None]
) -> str | None:
    """Have a traced call measured by real tensors that lie as its own do, in a thread in which nothing is traced."""

    def run() -> str | None:
        generator = torch.Generator(call.q.device).manual_seed(0)  # the program's random numbers stay as they are

        def like(x: Tensor) -> Tensor:
            sizes, strides = ([static_size(n) for n in numbers] for numbers in (x.shape, x.stride()))
            count = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
            if x.dtype == torch.bool:
                return torch.ones(count, dtype=x.dtype, device=x.device).as_strided(sizes, strides)
            numbers = torch.randn(count, generator=generator, device=x.device).to(x.dtype)
            return numbers.as_strided(sizes, strides).requires_grad_(x.requires_grad)

        q, k, v = (like(x) for x in call[:3])
        real = call._replace(q=q, k=k, v=v, mask=None if call.mask is None else like(call.mask))

        def natively() -> Tensor:
            with thread_policy(None):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, real.mask, is_causal=call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa
                )

        with torch.autograd.set_multithreading_enabled(False):
            return pick(real, natively)

    def on_device() -> str | None:
        if call.q.device.type != "cuda":
            return run()
        with torch.cuda.device(call.q.device):
            return run()

    with ThreadPoolExecutor(1, "xpuruntime-measuring") as pool:
        return pool.submit(on_device).result()


def others_of_pytorch(call: AttentionCall) -> list[str]:
    """Return the kernels of PyTorch's that can serve a call beside the one that it chooses, but for the unfused one.

    That one keeps the weights of all pairs, so that a long call could not even be measured. Backends that are
    switched off in PyTorch are left out.
    """
    own = advised.own_choice(call)
    rest = (id_ for id_ in BACKENDS if id_ not in ("torch.math", own) and is_enabled(id_))
    return [id_ for id_ in rest if not native_rejection(id_, call)]


def _xpuruntime_kernels_for(call: AttentionCall, exact: bool) -> list[str]:
    prepare()
    kernels = _core.KernelRegistry.instance().kernels("attention")
    return [kernel["id"] for kernel in kernels if kernel["automatic"] and not xrt_rejection(kernel["id"], call, exact)]


def _text_of(call: AttentionCall) -> str:
    """Return what is measured once; of an inference, for all lengths of keys in one range, however they lie."""
    q, k, v = (four(x) for x in call[:3])
    ranged = not call.needs_grad and static_size(q.shape[2]) != static_size(k.shape[2])
    shapes = ",".join((_layout_of(q), _layout_of(k, -2 if ranged else None), _layout_of(v, -2 if ranged else None)))
    mask = "" if call.mask is None else _layout_of(call.mask, -1 if ranged else None) + str(call.mask.dtype)
    return f"sdpa;{shapes};{call.q.dtype};mask={mask};causal={call.is_causal};grad={call.needs_grad}"


def _layout_of(x: Tensor, length: int | None = None) -> str:
    sizes, strides = [static_size(n) for n in x.shape], [static_size(n) for n in x.stride()]
    if length is None:
        return f"{sizes}{strides}"
    sizes[length] = last_of_range(sizes[length])
    return f"{sizes} by {sorted(range(len(strides)), key=strides.__getitem__)}"
