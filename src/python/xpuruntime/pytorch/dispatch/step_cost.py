# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a call costs a step: the time of host and device, and of its way to an xpuruntime kernel, calibrated here."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.measuring.rounds import KernelTiming, Replacement, rotated, time_calls
from xpuruntime.measuring.statistics import paired_ratio
from xpuruntime.measuring.tuning_watch import TuningStep
from xpuruntime.ops import tuned_records
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch.context import CONTEXT, thread_policy
from xpuruntime.pytorch.dispatch.fast_path import fast_path
from xpuruntime.pytorch.dispatch.route import Route
from xpuruntime.runtime.cpu_and_memory import second_level_bytes

if TYPE_CHECKING:
    from xpuruntime.measuring.rounds import Sampler
    from xpuruntime.ops.call_context import CallContext
    from xpuruntime.policies import TuningPolicy
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.providers.bound import BoundKernel

#: Fewest and most launches that are queued before the device may begin with them.
_FEWEST, _MOST = 3, 50
#: How many times as long as the host a call has to take on the device for the step to surely wait for the device: it
#: has some others beside it, casts and additions, that need the host more than the device.
_AHEAD = 2.0
#: Launches by which that is found out.
_PROBE = 10


def host_sampler(run: Callable[[], Any], route: float) -> Sampler:
    """Return a sampler of the seconds that a call takes here, and `route` on its way. No policy holds inside of it."""

    def sample(calls: int, samples: int) -> Sequence[float]:
        with thread_policy(None):
            return [seconds + route * calls for seconds in time_calls(run, calls, samples)]

    return sample


def on_device(run: Callable[[], Any], device: Any, known: list[float]) -> Sampler:
    """Return a sampler of the seconds that a call takes on a CUDA device, whatever the host needs: first those `known`.

    What was timed before for the cost of a step need not be timed again.
    """
    timed = _sampler(run, device, lambda _, on_device: on_device)

    def sample(calls: int, samples: int) -> Sequence[float]:
        return [known.pop(0) * calls] if known else timed(calls, samples)

    return sample


def _sampler(run: Callable[[], Any], device: Any, cost: Callable[[float, float], float]) -> Sampler:
    def sample(calls: int, samples: int) -> Sequence[float]:
        with thread_policy(None):
            host, seconds = time_on_cuda(run, device, calls * samples)
        return [cost(host, seconds) * calls]  # one sample: the median of all of these calls

    return sample


class StepCost(NamedTuple):
    """What calls cost an eager step on a CUDA device, by how PyTorch's own kernel does.

    Where that one keeps the device for much longer than the host, the step waits for the device, and a call costs its
    time there, or so much of the host's as would end that. Otherwise a step may wait for the host, where a kernel that
    is faster on the device alone gains nothing: a call costs the host's time, and what it keeps the device for longer
    than PyTorch's own. `StepLag` observes which of both steps do.
    """

    native: float
    ahead: bool

    @classmethod
    def probe(cls, run: Callable[[], Any], device: Any) -> StepCost:
        """Find out by PyTorch's own kernel."""
        with thread_policy(None):
            host, seconds = time_on_cuda(run, device, _PROBE)
        return cls(seconds, seconds >= _AHEAD * host)

    def of(self, host: float, on_device: float, route: float = 0.0) -> float:
        """Return the seconds of a call that takes these, and `route` of the host on its way to a kernel."""
        host += route
        return max(_AHEAD * host, on_device) if self.ahead else host + max(0.0, on_device - self.native)

    def sampler(self, run: Callable[[], Any], device: Any, route: float, timed: list[float]) -> Sampler:
        """Return a sampler of that, which adds the seconds on the device to those `timed`."""

        def cost(host: float, on_device: float) -> float:
            timed.append(on_device)
            return self.of(host, on_device, route)

        return _sampler(run, device, cost)


def time_on_cuda(run: Callable[[], Any], device: Any, count: int, *, cold: bool = True) -> tuple[float, float]:
    """Return the seconds of the host, and those of the device, of a call that is queued about so often.

    The device is timed by events around each call, which finds nothing of the call before in the device's cache, as in
    a step, where other weights have passed meanwhile: they were read, since lines that were written would go back to
    memory at the expense of the call. The launches are queued behind a kernel that waits, so that the host's time is
    not in it. What reads far more than the cache holds need not be made `cold`.
    """
    count = min(max(count, _FEWEST), _MOST)
    clock = time.perf_counter
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        others = torch.zeros(_cache_bytes(device) // 2 if cold else 1, device=device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        run()  # the first call may compile or plan for seconds, and the stream would wait many times as long below
        stream.synchronize()
        start = clock()
        others.amax()
        run()
        seconds = clock() - start
        stream.synchronize()
        # The stream waits while the launches are queued: about 2 cycles for each nanosecond that the host needs.
        _private_api.occupy_stream(int(2e9 * (seconds * (count + 1) + 1e-4)))
        host = []
        for before, after in events:
            others.amax()
            before.record(stream)
            start = clock()
            run()
            host.append(clock() - start)
            after.record(stream)
        stream.synchronize()
    on_device = statistics.median(before.elapsed_time(after) for before, after in events)
    return statistics.median(host), max(on_device * 1e-3, 1e-9)


def _cache_bytes(device: Any) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def peak_bytes(run: Callable[[], Any], device: Any) -> int:
    """Return the most bytes of tensors that a call makes and holds on a device; zero where that cannot be seen.

    PyTorch's profiler tells of each allocation, those in threads of autograd included, and one runs at a time.
    """
    from xpuruntime.pytorch.profiling.kineto_recording import Profiler

    if _private_api.profiler_flag() or _private_api.profiler_enabled():
        return 0
    recorder = Profiler([torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with thread_policy(None), recorder:
        run()
    sizes = [
        (event.start_ns(), event.nbytes())
        for event in recorder.events()
        if event.name() == "[memory]" and (event.device_type().name == "CUDA") is (device.type == "cuda")
    ]
    held = itertools.accumulate(size for _, size in sorted(sizes, key=operator.itemgetter(0)))
    return max(held, default=0)


class StepLag:
    """Whether the device is behind the host where a program makes its calls, observed at some of them.

    It is where the device has not even got to a call when the host makes another one long after: then some time of the
    host costs the step nothing. Nothing waits for it. What follows on the preparation of a kernel counts for nothing,
    since the device was idle meanwhile. Steps that change are noticed, each time by twice as many observations.

    Attributes
    ----------
    behind : bool
    settled : bool
        Whether enough was observed since the last preparation.
    """

    #: Seconds between observations at least, which cost the host more than most calls.
    _APART = 5e-4
    #: Observations in a row, and seconds without any after them, once enough was observed.
    _TURN, _REST = 8, 2e-2

    def __init__(self, device: Any) -> None:
        self.device = device
        self.behind = self.settled = False
        #: Observations in a row by which it is behind, and how many there are without such a row where it is not.
        self._row, self._most = 3, 24
        self._seen = self._count = 0
        self._last: tuple[float, Any] | None = None
        self._prepared = -1
        self._until, self._left = 0.0, self._TURN

    def observe(self) -> bool:
        """Observe the device at a call. Returns whether `behind` is another one now."""
        now, before = time.perf_counter(), self.behind
        if self._prepared != CONTEXT.prepared:
            self._prepared, self._last, self._seen, self._count = CONTEXT.prepared, None, 0, 0
            self.settled = self.behind
        if now < self._until or (self._last is not None and now < self._last[0] + self._APART):
            return False
        if self._last is not None:
            self._count += 1
            self._seen = 0 if self._last[1].query() else self._seen + 1
            self.settled |= self._count >= self._most
            if self._seen >= self._row:
                self.behind, self.settled, self._count = True, True, 0
            elif self.behind and self._count >= self._most:
                self.behind, self._row, self._most = False, 2 * self._row, 2 * self._most
        self._left -= 1
        if self.settled and self._left <= 0:
            self._last, self._seen, self._until, self._left = None, 0, now + self._REST, self._TURN
        else:
            self._last = now, _queued(self.device)
        return self.behind is not before


def lag_of(device: torch.device, *, backward: bool) -> StepLag:
    """Return what observes the forward or backward passes on a device."""
    key = (device.index or 0, backward)
    return CONTEXT.lags.get(key) or CONTEXT.lags.setdefault(key, StepLag(device))


def waits_for_host(device: torch.device) -> bool:
    """Say whether steps are known to wait for the host, where what spares the device alone makes them slower."""
    if device.type != "cuda":
        return False
    lag = lag_of(device, backward=False)
    CONTEXT.observe_device(device)
    return lag.settled and not lag.behind


def _queued(device: Any) -> Any:
    """Return an event that says when a device gets to what is queued from now on."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


#: Calls of either kernel with cold caches; one round of each takes about a millisecond.
_ROUNDS = 61
#: Calls of a round with warm caches, and its rounds.
_CALLS, _WARM_ROUNDS = 50, 15
#: The bound is the upper end of an interval of this confidence: a cost that is too low would make a policy slower.
_CONFIDENCE = 0.99


class RoutePin:
    """Has the smallest calls of an operation served by a stated kernel, through the override as all others are.

    `tuning.settle` asks it while `CONTEXT.thread.route_pin` is it.
    """

    def __init__(self, *, xrt: bool) -> None:
        self.xrt = xrt
        self.direct: Callable[[], Any] | None = None
        self._kept: list[tuple[CompiledPolicy, Any, Route]] = []

    def settle(
        self,
        active: CompiledPolicy,
        key: Any,
        route: Route,
        native: Callable[[], Any],
        xrt: tuple[str, CallContext | BoundKernel | None, Callable[[], Any]],
    ) -> Route:
        """Return the route for a call, and keep it under `key` until `forget`."""
        kernel, target, self.direct = xrt if self.xrt else (route.kernel, None, native)
        settled_route = Route(
            route.op,
            route.asked,
            route.source,
            kernel,
            place=target,
            module=route.module,
            phase=route.phase,
            tuned=True,
        )
        active.keep(key, settled_route)
        self._kept.append((active, key, settled_route))
        return settled_route

    @property
    def held(self) -> bool:
        """Whether calls went by the stated kernel, and none refused them."""
        return bool(self._kept) and all(active.routes.get(key) is route for active, key, route in self._kept)

    def forget(self) -> None:
        """Forget the routes."""
        for active, key, _ in self._kept:
            active.keep(key, None)


def route_cost(active: CompiledPolicy, op: str, device: torch.device, held_by: Mapping[str, str]) -> float | None:
    """Return the seconds that a call costs a step on its way to an xpuruntime kernel, beside what a tuner measures.

    Measured once for each process, device, operation and way, and kept on disk unless calls are recorded meanwhile.
    Infinite where it cannot be measured: then no kernel is worth its way. ``None`` where a watch ended it.
    """
    name = str(torch.cuda.get_device_name(device)) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"
    watched = CONTEXT.observer is not None
    # Where a thread has a policy of its own, fast kernels leave all calls to Python.
    path = fast_path().route + (";own" if CONTEXT.thread.policy is not None else "") + (";watched" if watched else "")
    mark = (op, name, path)
    known = CONTEXT.route_costs.get(mark)
    if known is not None:
        return known
    key = ";".join(("torch", "route", *mark))
    rule = active.policy.kernels.tuning
    timing = None if watched else tuned_records.recall(key, held_by, rule)
    if timing is None:
        timing = _calibrate(op, device, rule)
        if timing is not None and timing.cancelled:
            return None
        if timing is not None and not watched:
            tuned_records.keep(key, held_by, timing)
    cost = math.inf if timing is None else timing.chosen.microseconds * 1e-6
    CONTEXT.route_costs[mark] = cost
    return cost


def _calibrate(op: str, device: torch.device, rule: TuningPolicy) -> Replacement | None:
    xrt, native = RoutePin(xrt=True), RoutePin(xrt=False)
    try:
        calls = {}
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for pinned, swapped in ((xrt, False), (native, True)):
                CONTEXT.thread.route_pin = pinned
                call = _smallest(op, device, swapped=swapped)
                for _ in range(3):
                    call()
                calls[pinned.xrt] = call
            CONTEXT.thread.route_pin = None
            if not (xrt.held and native.held) or xrt.direct is None or native.direct is None:
                return None
            step = TuningStep("torch", f"the way to kernels of {op}")
            return _cost(calls[True], calls[False], xrt.direct, native.direct, device, rule.budget, step)
    except (UnsupportedOperationError, InputError):
        return None
    finally:
        CONTEXT.thread.route_pin = None
        xrt.forget()
        native.forget()


def _cost(
    full: Callable[[], Any],
    full_native: Callable[[], Any],
    direct: Callable[[], Any],
    direct_native: Callable[[], Any],
    device: torch.device,
    budget: float,
    step: TuningStep | None = None,
) -> Replacement:
    """Return the cost as the time of a candidate: cold and through the policy, less what is measured directly."""
    others = _OtherWork(device)
    cases = {"xrt": full, "native": full_native}
    times: dict[str, list[float]] = {name: [] for name in cases}
    clock, began = time.perf_counter, time.monotonic()
    for number in range(_ROUNDS):
        if step is not None and step(len(cases), number, _ROUNDS, time.monotonic() - began):
            return Replacement((), number, budget, undecided=True, cancelled=True)
        for name in rotated(list(cases), number):
            others()
            start = clock()
            cases[name]()
            times[name].append(clock() - start)
        others.finish()
        if number > 9 and time.monotonic() - began > budget:
            break
    ratio = paired_ratio(times["xrt"], times["native"], confidence=_CONFIDENCE)
    upper = (ratio.high - 1) * statistics.median(times["native"])
    warm: dict[str, list[float]] = {name: [] for name in cases}
    direct_calls = {"xrt": direct, "native": direct_native}
    with thread_policy(None):
        for number in range(_WARM_ROUNDS):
            for name in rotated(list(cases), number):
                time_calls(direct_calls[name], _CALLS, 1)
                others.finish()
                warm[name].append(statistics.median(time_calls(direct_calls[name], 1, _CALLS)))
                others.finish()
    if step is not None:
        step.end(time.monotonic() - began)
    measured = statistics.median(warm["xrt"]) - statistics.median(warm["native"])
    cost = max(upper - measured, 0.0)
    return Replacement((KernelTiming("route", "", cost * 1e6),), len(times["xrt"]), budget, undecided=False)


class _OtherWork:
    """Work such as a step has between two calls of an operation: it takes the caches of the host."""

    def __init__(self, device: torch.device) -> None:
        self._x = torch.ones(8, 8, device=device)
        self._memory = np.zeros(2 * second_level_bytes() // 8)
        self._device = device

    def __call__(self) -> None:
        self._memory += 1.0
        x = (self._x + 1.0).relu().to(torch.float16).to(torch.float32).mul(0.5)
        torch.cat((x, x)).sum(0).reshape(2, -1).t().contiguous()

    def finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _smallest(op: str, device: torch.device, *, swapped: bool) -> Callable[[], Any]:
    """Return a call of an operation on small operands; `swapped` gives another kind of the same size."""
    functional = torch.nn.functional
    low = torch.float16 if device.type == "cuda" else torch.float32
    rows, columns = (24, 8) if swapped else (8, 24)
    if op == "matmul":
        a, b = torch.ones(8, rows, device=device), torch.ones(rows, columns, device=device)
        return lambda: torch.mm(a, b)
    if op == "conv":
        x = torch.ones(1, 8, 2 + rows // 8, 2 + columns // 8, device=device)
        weight = torch.ones(8, 8, 3, 3, device=device)
        return lambda: functional.conv2d(x, weight)
    if op == "attention":
        q = torch.ones(1, rows // 8, columns, 64, device=device, dtype=low)
        return lambda: functional.scaled_dot_product_attention(q, q, q)
    x, weight = torch.ones(rows // 8, columns // 8, 16, device=device), torch.ones(16, device=device)
    if op == "layer_norm":
        return lambda: functional.layer_norm(x, (16,), weight, weight)
    return lambda: functional.rms_norm(x, (16,), weight)
