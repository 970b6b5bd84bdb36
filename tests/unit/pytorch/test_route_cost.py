# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a call costs on its way to an xpuruntime kernel: measured here, found where it is planted, and never guessed."""

from __future__ import annotations

import json
import math
import time

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")
tuning = pytest.importorskip("xpuruntime.pytorch.dispatch.tuning")
route_cost = pytest.importorskip("xpuruntime.pytorch.dispatch.step_cost")
CONTEXT = pytest.importorskip("xpuruntime.pytorch.dispatch.context").CONTEXT
active_policy = pytest.importorskip("xpuruntime.pytorch.dispatch.context").active_policy

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_tuned")]

F = torch.nn.functional
CPU = torch.device("cpu")
HELD_BY = {"torch": "this one"}


def spinning(microseconds):
    def spin():
        end = time.perf_counter() + microseconds * 1e-6
        while time.perf_counter() < end:
            pass

    return spin


def best(op):
    return xt.kernel_policy(xrt.KernelPolicy(**{op: "auto"}, auto_strategy="best_performance"))


@pytest.mark.parametrize("op", ["matmul", "layer_norm", "rms_norm", "conv"])
def test_it_is_measured_for_each_operation_once_and_kept(op, nothing_is_tuned, monkeypatch):
    with best(op):
        active = active_policy()
        before = dict(active.routes)
        cost = route_cost.route_cost(active, op, CPU, HELD_BY)
        assert 0 <= cost < math.inf
        assert active.routes == before, "the routes of the calibration are forgotten"
        assert CONTEXT.thread.route_pin is None
        (entry,) = (
            entry
            for key, entry in json.loads(nothing_is_tuned.read_text())["entries"].items()
            if key.startswith(f"torch;route;{op};cpu")
        )
        assert entry["times"][0]["microseconds"] == pytest.approx(max(cost * 1e6, 1e-3))

        def never(*_):
            raise AssertionError("it is calibrated again")

        monkeypatch.setattr(route_cost, "_calibrate", never)
        assert route_cost.route_cost(active, op, CPU, HELD_BY) == cost
        monkeypatch.setattr(CONTEXT, "route_costs", {})  # as another process
        assert route_cost.route_cost(active, op, CPU, HELD_BY) == pytest.approx(cost, abs=1e-9)
        monkeypatch.setattr(CONTEXT, "route_costs", {})
        with pytest.raises(AssertionError, match="again"):
            route_cost.route_cost(active, op, CPU, {"torch": "another"})


def least_cost(*calls):
    """The least of three calibrations: a busy machine makes the upper end of their interval larger."""
    return min(route_cost._cost(*calls, CPU, 5.0).chosen.microseconds for _ in range(3))


@pytest.mark.parametrize(("way", "low", "high"), [(0, 0, 60), (200, 150, 320)])
def test_what_the_way_costs_is_found(way, low, high):
    """Through the policy each takes 50 us, ours `way` more; directly ours takes 20 and PyTorch's 30."""
    assert low <= least_cost(spinning(40 + way), spinning(50), spinning(20), spinning(30)) <= high


def test_a_direct_call_that_costs_more_than_the_real_one_is_made_up_for():
    """Where measuring adds 100 us to PyTorch's own kernel alone, that is no gain of ours."""
    assert 90 <= least_cost(spinning(60), spinning(50), spinning(50), spinning(150)) <= 200


def test_where_it_cannot_be_measured_no_kernel_is_worth_its_way(monkeypatch, nothing_is_tuned):
    def refused(*_, **__):
        def call():
            raise UnsupportedOperationError("no such kernel")

        return call

    monkeypatch.setattr(route_cost, "_smallest", refused)
    with best("matmul"):
        a, b = torch.randn(64, 64), torch.randn(64, 64)
        torch.testing.assert_close(a @ b, torch.matmul(a, b))
        (route,) = active_policy().routes.values()
    assert route.tuned
    assert route.kernel == "torch.mm"
    assert set(CONTEXT.route_costs.values()) == {math.inf}
    assert not nothing_is_tuned.exists() or "torch;matmul" not in nothing_is_tuned.read_text()


def test_where_our_kernels_refuse_the_smallest_call_nothing_is_concluded(monkeypatch):
    def of_integers(op, device, *, swapped):
        a, b = torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 4 + swapped, dtype=torch.int64)
        return lambda: torch.mm(a, b)

    with best("matmul"):
        active = active_policy()
        with torch.autocast("cpu", torch.bfloat16):  # which would have products computed in a type that is not served
            assert route_cost.route_cost(active, "matmul", CPU, HELD_BY) < math.inf
        monkeypatch.setattr(CONTEXT, "route_costs", {})
        monkeypatch.setattr(route_cost, "_smallest", of_integers)
        assert route_cost.route_cost(active, "matmul", CPU, {"torch": "another"}) == math.inf


def test_a_watch_sees_it_and_ends_it(nothing_is_tuned):
    from xpuruntime.measuring.tuning_watch import watch_tuning

    seen = []

    def calibrating(step):  # the core may choose the kernel of the smallest product meanwhile
        if step.tuner == "torch":
            seen.append(step)

    with best("matmul"):
        active = active_policy()
        with watch_tuning(progress=calibrating, cancel=lambda: len(seen) > 2):
            assert route_cost.route_cost(active, "matmul", CPU, HELD_BY) is None
        assert not CONTEXT.route_costs
        assert {one.operation for one in seen} == {"the way to kernels of matmul"}
        assert [one.rounds for one in seen] == [0, 1, 2]
        assert route_cost.route_cost(active, "matmul", CPU, HELD_BY) < math.inf


def test_rules_of_the_policy_do_not_reach_the_calibration():
    rules = [{"match": {"op": "matmul", "m": "<=64"}, "use": "torch.mm"}]
    with xt.kernel_policy(xrt.KernelPolicy(rules=rules, matmul="auto", auto_strategy="best_performance")):
        assert route_cost.route_cost(active_policy(), "matmul", CPU, HELD_BY) < math.inf
        torch.mm(torch.ones(8, 24), torch.ones(24, 8))
        (route,) = active_policy().routes.values()
        assert (route.kernel, route.source) == ("torch.mm", "kernels.rules[0]")


@pytest.mark.timed
def test_a_step_bound_by_the_host_is_not_slower_under_a_tuned_policy():
    from xpuruntime.measuring.rounds import measure, timed
    from xpuruntime.measuring.statistics import Margin, RatioVerdict

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
    x = torch.randn(4, 16)

    def step():
        model(x).sum().backward()

    step()
    inner = timed(step)

    def under_policy(calls, samples):
        with xt.kernel_policy(policy):
            step()
            return inner(calls, samples)

    policy = xrt.KernelPolicy(matmul="auto", auto_strategy="best_performance")
    try:
        measurement = measure(
            {"none": inner, "tuned": under_policy}, control="none", margin=Margin(0.05, 0.0), rounds=(9, 31),
            budget=30.0, widen=True,
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    assert measurement.comparisons["tuned"].verdict is not RatioVerdict.SLOWER, measurement.comparisons
