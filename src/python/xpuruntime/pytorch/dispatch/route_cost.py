# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Route cost: what a call costs a step on its way to an xpuruntime kernel, calibrated in this process.

A tuner makes a call again and again with warm caches, by a direct way. In a step the call comes through PyTorch's
dispatcher and a policy's override, between other work that has the caches. The difference is the same for calls of all
sizes, so it is measured on the smallest ones: through the override, with cold caches, by PyTorch's own kernel and by
xpuruntime's.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.measuring.rounds import KernelTiming, Replacement, rotated, time_calls
from xpuruntime.measuring.statistics import paired_ratio
from xpuruntime.measuring.tuning_watch import TuningStep
from xpuruntime.ops import tuned_records
from xpuruntime.pytorch.dispatch.context import CONTEXT, thread_policy
from xpuruntime.pytorch.dispatch.fast_path import fast_path
from xpuruntime.pytorch.dispatch.route import Route
from xpuruntime.runtime.cpu_and_memory import second_level_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xpuruntime.ops.call_context import CallContext
    from xpuruntime.policies import TuningPolicy
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.providers.bound import BoundKernel

__all__ = ["RoutePin", "route_cost"]

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
