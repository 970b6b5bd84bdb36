# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tuning of PyTorch's operators: its own kernel and xpuruntime's on the operands of a real call, and their clocks."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.errors import InputError, UnsupportedOperationError, warn
from xpuruntime.measuring.rounds import KernelTiming, Replacement, alike, by_memory, choose
from xpuruntime.measuring.tuning_watch import TuningStep
from xpuruntime.ops import tuned_records
from xpuruntime.ops.plugins import facts_of_kernel
from xpuruntime.ops.torch_kernels import automatic_torch_kernels, environment_values, is_torch_kernel
from xpuruntime.policies import TuningPolicy
from xpuruntime.printable import error_line
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import CONTEXT, forget_tuned_routes
from xpuruntime.pytorch.dispatch.route import Route
from xpuruntime.pytorch.dispatch.step_cost import StepCost, host_sampler, lag_of, on_device, peak_bytes, route_cost
from xpuruntime.runtime import profiler as trace_events
from xpuruntime.runtime.telemetry import log_decision

if TYPE_CHECKING:
    from xpuruntime.ops.call_context import CallContext
    from xpuruntime.ops.torch_kernels import TorchKernel
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.dispatch.route import Measured
    from xpuruntime.pytorch.dispatch.step_cost import StepLag
    from xpuruntime.pytorch.providers.bound import BoundKernel

_USUAL = TuningPolicy()
#: Seconds of the calls that are timed on a CUDA device in one turn, beside those that it waits for them to be queued.
_BLOCK = 5e-4
#: Seconds from which on a comparison or a measurement is logged.
_LOGGED = 1.0
#: Share of its cost by both times that a call counts for where steps wait for the device.
_HOST_SHARE = 0.1
#: What the text of a call has that is measured with its gradient.
_WITH_GRADIENT = ";grad=True"
#: Libraries of PyTorch's own kernels that it loads when it is imported.
_LIBRARIES = ("libtorch_cpu.so", "libtorch_cuda.so", "libcublas.so*", "libcublasLt.so*", "libcudnn.so*")

_CANCELLED = Replacement((), 0, 0.0, undecided=True, cancelled=True)
_lock = threading.RLock()
_measuring = threading.RLock()


def measuring() -> bool:
    """Say whether kernels are being measured in this thread: what is called then is no call of the program's."""
    return CONTEXT.thread.measuring


def may_measure() -> bool:
    """Say whether a kernel may be measured now: not while a CUDA graph is captured, nor while this thread traces."""
    if _private_api.tracing_context.try_get() is not None or context.capturing():
        return False
    return bool(_private_api.dispatch_modes() == 0)


class replayed:  # noqa: N801 - used like a function
    """Calls tuned inside this block will be replayed from a CUDA graph, so that the time of the host does not count.

    It holds in all threads, since backward runs in others. For the warm-up before a capture, and the capture itself.
    """

    def __enter__(self) -> None:
        self._count(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._count(-1)

    def _count(self, step: int) -> None:
        with _lock:
            CONTEXT.replays += step
        forget_tuned_routes()


def settle(
    active: CompiledPolicy,
    key: Any,
    route: Route,
    text: str,
    native: Callable[[], Any],
    xrt_kernel: Callable[[Any], Any],
    device: torch.device,
    *,
    packages: Sequence[BoundKernel] = (),
    allow_tf32: bool = False,
    deterministic: bool = False,
) -> Route:
    """Return the route for a call whose choice is left to measured times, and keep it under `key`."""
    call_context = active.place(
        route.op, "auto", route.source, route.module, allow_tf32=allow_tf32, deterministic=deterministic
    )
    places: dict[str, CallContext | BoundKernel] = {
        "auto": call_context,
        **{bound.kernel.id: bound for bound in packages},
    }
    candidates = [(route.kernel, native)]
    candidates += [(name, functools.partial(xrt_kernel, where)) for name, where in places.items()]
    pin = CONTEXT.thread.route_pin
    if pin is not None:
        return pin.settle(active, key, route, native, ("auto", call_context, candidates[1][1]))
    text = f"{text};tf32={allow_tf32};deterministic={deterministic}"
    best = pick(route.op, text, candidates, device, active=active)
    if best is None:
        active.keep(key, None)
        return route
    return keep_tuned(active, key, route, best, places.get(best), text, device)


def keep_tuned(
    active: CompiledPolicy,
    key: Any,
    route: Route,
    kernel: str,
    target: CallContext | BoundKernel | None,
    text: str,
    device: Any,
    *,
    asked: bool = False,
) -> Route:
    """Return a route by the kernel that measured times of `text` have chosen.

    It is kept unless that was for a graph, or other calls are to be observed before. Of a route that is `asked` each
    time the device is observed anyway; others may serve without Python.
    """
    tuned = Route(
        route.op, route.asked, route.source, kernel, place=target, passed_over=route.passed_over, module=route.module,
        phase=route.phase, tuned=True, times=measured(route.op, text, device, active=active),
    )  # fmt: skip
    rule = active.policy.kernels.tuning
    tuned.lags = _lags(_mark(route.op, text, device, rule), device, rule)
    later = not (asked or not tuned.lags or any(lag.settled for lag in tuned.lags))
    active.keep(key, None if later or context.capturing() else tuned)
    if later:
        active.keep_later(key, tuned)
    return tuned


def pick(
    op: str,
    key: str,
    candidates: Sequence[tuple[str, Callable[[], Any]]],
    device: Any,
    *,
    passes: Mapping[str, int] = MappingProxyType({}),
    active: CompiledPolicy | None = None,
) -> str | None:
    """Return the id of the candidate that is to run, measured once for each kind of call and kept on disk.

    ``None`` where that is not known yet.
    """
    rule = _USUAL if active is None else active.policy.kernels.tuning
    mark = _mark(op, key, device, rule)
    times = _known(CONTEXT.times.get(mark), rule) or tuned_records.recall(_text(mark), held_by(op, device.type), rule)
    if times is None:
        if not may_measure():
            return None
        # Who holds PyTorch's switches, or a thread of autograd, does not wait for one that may be waiting for them.
        here = _core.in_sdp_backend_scope() or _private_api.running_backward() != -1
        if here and not _measuring.acquire(blocking=False):
            tuned_records.settle(_text(mark))
            return None
        try:
            times = _measured_once(f"{op}: {key}", mark, candidates, device, passes, active, rule)
        finally:
            tuned_records.settle(_text(mark))
            if here:
                _measuring.release()
        if times.cancelled:
            return None
    CONTEXT.times[mark] = times
    if lags := _lags(mark, device, rule):
        CONTEXT.observe_device(device)
        if any(lag.behind for lag in lags):
            times = _on_device(times, CONTEXT.times[*mark[:2], False], rule)
    can = {name for name, _ in candidates}  # another process may have had more
    return next((candidate.kernel for candidate in times.candidates if candidate.kernel in can), candidates[0][0])


def _lags(mark: tuple[str, str, bool], device: Any, rule: TuningPolicy) -> tuple[StepLag, ...]:
    """Return by what it is decided which times a step goes by, where those of the device choose another kernel."""
    # A call whose gradient is measured with it is a part of two passes, of which one may wait for the host and the
    # other one for the device: then it is worth most what the device gains. Ranks go by the same times, which they
    # share.
    if not mark[2] or device.type != "cuda" or tuned_records.SharedTimes.current() is not None:
        return ()
    times, other = CONTEXT.times.get(mark), (*mark[:2], False)
    by_device = CONTEXT.times.get(other) or tuned_records.recall(_text(other), held_by(mark[0], device.type), rule)
    if times is None or by_device is None or _on_device(times, by_device, rule).chosen.kernel == times.chosen.kernel:
        return ()
    CONTEXT.times[other] = by_device
    lags = [lag_of(device, backward=backward) for backward in (False, True)]
    return tuple(lags) if _WITH_GRADIENT in mark[1] else (lags[_private_api.running_backward() != -1],)


def _on_device(times: Replacement, by_device: Replacement, rule: TuningPolicy) -> Replacement:
    """Return times on the device, the kernel first that is to run in steps that wait for it."""
    # The host has some time to spare there, of which a call takes its share: a kernel that needs far more of the host
    # than another one has to gain a part of that on the device.
    costs = {candidate.kernel: candidate.microseconds for candidate in times.candidates}
    surely = [c for c in by_device.candidates if c.verdict in ("faster", "control") and c.kernel in costs]
    if not surely:
        return times
    chosen = min(surely, key=lambda candidate: candidate.microseconds + _HOST_SHARE * costs[candidate.kernel])
    ordered = by_device._replace(candidates=(chosen, *(c for c in by_device.candidates if c is not chosen)))
    return by_memory(ordered, {c.kernel: c.peak_bytes for c in ordered.candidates if c.peak_bytes}, rule)


def _known(replacement: Replacement | None, rule: TuningPolicy) -> Replacement | None:
    return None if replacement is None or (replacement.undecided and replacement.seconds < rule.budget) else replacement


def _measured_once(
    what: str,
    mark: tuple[str, str, bool],
    candidates: Sequence[tuple[str, Callable[[], Any]]],
    device: Any,
    passes: Mapping[str, int],
    active: CompiledPolicy | None,
    rule: TuningPolicy,
) -> Replacement:
    with _measuring:  # one at a time, so that none meets the load of another
        begun = time.perf_counter()
        once = _known(CONTEXT.times.get(mark), rule)
        if once is None:
            CONTEXT.prepared += 1
            with trace_events.mark("tuning", what, candidates=[name for name, _ in candidates]), as_tuning():
                step = TuningStep("torch", what)
                route: float | None = None if step(len(candidates), 0, 0, 0.0) else 0.0
                other_way = any(passes.get(name, 1) for name, _ in candidates[1:])
                if route is not None and active is not None and mark[2] and other_way:
                    route = route_cost(active, mark[0], device, held_by(mark[0], device.type))
                if route is None:
                    return _CANCELLED
                costs = {name: route * n for name, _ in candidates[1:] if (n := passes.get(name, 1))}
                peaks: dict[str, int] = {}
                timed: dict[str, list[float]] = {}
                once = _measure(candidates, device, mark[2], costs, rule, step, timed)
                once = _by_memory(once, candidates, device, rule, peaks)
                if mark[2] and device.type == "cuda" and not once.cancelled:  # a graph may be captured of it later on
                    by_device = _measure(candidates, device, False, {}, rule, TuningStep("torch", what), timed)
                    by_device = _by_memory(by_device, candidates, device, rule, peaks)
                    _keep((*mark[:2], False), by_device, device, known=True)
                _keep(mark, once, device, known=route < math.inf)  # last, since other ranks go on then
            result = "cancelled" if once.cancelled else once.chosen.kernel
            log_long("measurement", f"measuring {what}", time.perf_counter() - begun, result=result)
    return once


def log_long(event: str, what: str, seconds: float, **facts: Any) -> None:
    """Log what a step has waited for, where that was long."""
    if seconds >= _LOGGED:
        log_decision("tuning", "INFO", event, f"{what} took {seconds:.1f} s", seconds=seconds, **facts)


def _by_memory(
    replacement: Replacement,
    candidates: Sequence[tuple[str, Callable[[], Any]]],
    device: Any,
    rule: TuningPolicy,
    peaks: dict[str, int],
) -> Replacement:
    """Let memory decide among the candidates that take about as long, or among all; `peaks` are those known by now."""
    wanted = [] if replacement.cancelled else [candidate.kernel for candidate in alike(replacement, rule)]
    if len(wanted) > 1:
        peaks |= {name: peak_bytes(run, device) for name, run in candidates if name in wanted and name not in peaks}
    return by_memory(replacement, peaks, rule) if len(wanted) > 1 else replacement


def _keep(mark: tuple[str, str, bool], replacement: Replacement, device: Any, *, known: bool) -> None:
    if not replacement.cancelled:
        CONTEXT.times[mark] = replacement
        if known:
            tuned_records.keep(_text(mark), held_by(mark[0], device.type), replacement)


@contextmanager
def as_tuning() -> Iterator[None]:
    """Have what runs inside known as no call of the program's: by `measuring`, and in PyTorch's profiler.

    The range is that of an operator: the profiler links no kernel to an annotation, and Triton and CuTe launch theirs
    in no other operator.
    """
    before, CONTEXT.thread.measuring = CONTEXT.thread.measuring, True
    try:
        with _private_api.RecordFunctionFast(trace_events.TUNING), _hooks_hidden():
            yield
    finally:
        CONTEXT.thread.measuring = before


def _hooks_hidden() -> AbstractContextManager[Any]:
    # Keep what is measured from hooks on saved tensors, as of activation checkpointing, which would run a layer again.
    # A hook that returned the tensor itself would keep it alive in a cycle.
    if _private_api.saved_tensor_hooks(True) is None:
        return nullcontext()
    hidden: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda x: x)
    return hidden


def measured(op: str, key: str, device: Any, *, active: CompiledPolicy | None = None) -> tuple[Measured, ...]:
    """Return what `pick` chooses by, as far as it is known; its arguments."""
    rule = _USUAL if active is None else active.policy.kernels.tuning
    mark = _mark(op, key, device, rule)
    times = CONTEXT.times.get(mark)
    if times is not None and any(lag.behind for lag in _lags(mark, device, rule)):
        times = _on_device(times, CONTEXT.times[*mark[:2], False], rule)
    return (
        ()
        if times is None
        else tuple((candidate.kernel, candidate.microseconds, candidate.peak_bytes) for candidate in times.candidates)
    )


def _mark(op: str, key: str, device: Any, rule: TuningPolicy) -> tuple[str, str, bool]:
    own = ";own" if CONTEXT.thread.policy is not None else ""  # another way to a kernel, which costs more
    text = f"{key};{device_name(device)}{own}{tuned_records.rule_suffix(rule)}"
    return op, text, device.type != "cuda" or not (CONTEXT.replays or context.capturing())


def _measure(
    candidates: Sequence[tuple[str, Callable[[], Any]]],
    device: Any,
    eager: bool,
    route_costs: Mapping[str, float],
    rule: TuningPolicy,
    step: TuningStep | None,
    timed: dict[str, list[float]],
) -> Replacement:
    """Measure the candidates that can serve; `route_costs` are seconds of the host on the way to all but the first."""
    # What they take on a CUDA device is `timed` once for both times: that of a step, and that of the device.
    working: dict[str, Callable[[], Any]] = {}
    for name, run in candidates:
        if route_costs.get(name, 0.0) == math.inf:
            continue
        try:
            for _ in range(2):  # what is made on the first calls is not measured
                run()
        except (UnsupportedOperationError, InputError):
            continue
        except Exception as error:
            if not is_torch_kernel(name):
                raise
            msg = f"{name} is not measured, since it raised {type(error).__name__}: {error_line(error)}"
            warn(msg)
            continue
        working[name] = run
    native = candidates[0][0]
    if not working:
        return Replacement((KernelTiming(native, "", 0.0),), 0, rule.budget, undecided=False)
    control = native if native in working else next(iter(working))
    if device.type != "cuda":
        samplers = {name: host_sampler(run, route_costs.get(name, 0.0)) for name, run in working.items()}
        return choose(samplers, control=control, rule=rule, step=step)
    times = {name: timed.setdefault(name, []) for name in working}
    if eager:
        cost = StepCost.probe(working[control], device)
        samplers = {
            name: cost.sampler(run, device, route_costs.get(name, 0.0), times[name]) for name, run in working.items()
        }
    else:
        samplers = {name: on_device(run, device, times[name]) for name, run in working.items()}
    return choose(samplers, control=control, rule=rule, block=_BLOCK, warm=eager, step=step)


def device_name(device: Any) -> str:
    """Return what measured times hold for of a device: its model, or the number of threads of the CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu x{torch.get_num_threads()}"


def held_by(op: str, device: str) -> dict[str, str]:
    """Return the validators of what is measured of an operation on a type of device."""
    kernels = automatic_torch_kernels(op, device)
    return _validators(op, device, tuple((kernel, tuple(environment_values(kernel).items())) for kernel in kernels))


@functools.lru_cache(maxsize=64)
def _validators(op: str, device: str, kernels: tuple[tuple[TorchKernel, Any], ...]) -> dict[str, str]:
    versions = {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    for kernel, _ in kernels:
        versions[kernel.id] = " ".join(f"{name}={value}" for name, value in facts_of_kernel(kernel).items())
    return tuned_records.validators(op, device, versions, _LIBRARIES)


def _text(mark: tuple[str, str, bool]) -> str:
    op, key, eager = mark
    return f"torch;{op};{key};{'eager' if eager else 'replayed'}"
