# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``auto_strategy: best_performance`` on PyTorch's operations: measured once, kept, and never slower than PyTorch's."""

from __future__ import annotations

import functools
import itertools
import json
import math
import threading
import time

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.measuring.rounds import KernelTiming, by_memory, replacing
from xpuruntime.measuring.tuning_watch import watch_tuning
from xpuruntime.ops import tuned_records
from xpuruntime.policies import TuningPolicy

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")
tuning = pytest.importorskip("xpuruntime.pytorch.dispatch.tuning")
step_cost = pytest.importorskip("xpuruntime.pytorch.dispatch.step_cost")
CONTEXT = pytest.importorskip("xpuruntime.pytorch.dispatch.context").CONTEXT
CompiledPolicy = pytest.importorskip("xpuruntime.pytorch.dispatch.compiled_policy").CompiledPolicy
Route = pytest.importorskip("xpuruntime.pytorch.dispatch.route").Route

pytestmark = pytest.mark.torch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def store(nothing_is_tuned):
    xt.clear_kernel_policy()
    xrt.clear_decisions()
    yield nothing_is_tuned
    xt.clear_kernel_policy()


def forget(monkeypatch):
    """As a process that starts."""
    monkeypatch.setattr(CONTEXT, "times", {})
    monkeypatch.setattr(tuned_records, "_open_store", functools.cache(tuned_records._open_store.__wrapped__))


def replacement(times, *, seconds=3.0, undecided=False):
    """What is measured where kernels take these microseconds, PyTorch's own first."""
    (native, least), *others = times.items()
    found = [KernelTiming(native, "", least)]
    for name, one in others:
        verdict = "faster" if one < 0.98 * least else "inconclusive" if undecided else "not_faster"
        found.append(KernelTiming(name, "", one, one / least, one / least, one / least, verdict))
    return replacing(found, rounds=11, seconds=seconds)


def takes(monkeypatch, *, undecided=False, **microseconds):
    """Let the clock say what each candidate takes, ``native`` and ``ours``, and count how often it is asked."""
    asked = []
    real = tuning._measure
    monkeypatch.setattr(tuning, "route_cost", lambda *_: 0.0)

    def measure(candidates, device, eager, costs, rule, *_):
        asked.append([name for name, _ in candidates])
        kernels = real(
            candidates, device, eager, costs, TuningPolicy(budget=0.001), None, {}
        ).candidates  # which runs them
        times = {name: microseconds["ours" if name == "auto" else "native"] for name, _ in candidates}
        assert {kernel.kernel for kernel in kernels} <= times.keys()
        return replacement(times, seconds=rule.budget, undecided=undecided)

    monkeypatch.setattr(tuning, "_measure", measure)
    return asked


def routes():
    from xpuruntime.pytorch.dispatch.context import active_policy

    return list(active_policy().routes.values())


def policy():
    return xrt.KernelPolicy(auto_strategy="best_performance")


@pytest.mark.parametrize(("ours", "kernel"), [(5.0, "auto"), (9.9, "torch.mm"), (20.0, "torch.mm")])
def test_the_faster_serves_and_a_tie_is_pytorchs(ours, kernel, monkeypatch):
    asked = takes(monkeypatch, native=10.0, ours=ours)
    a, b = torch.randn(4, 5), torch.randn(5, 3)
    with xt.kernel_policy(policy()):
        for _ in range(3):
            torch.testing.assert_close(torch.mm(a, b), a.double().mm(b.double()).float())
        (route,) = [one for one in routes() if one.tuned and one.asked == ("auto",)][:1]
        assert route.kernel == kernel
        assert route.native is (kernel != "auto")
        assert route.status == "default"
    assert asked[0] == ["torch.mm", "auto"]
    assert len(asked) == 2  # fp32, and the fp64 that the comparison multiplied


def test_real_measuring_finds_one_of_them_and_changes_no_result():
    a, b, bias = torch.randn(16, 16), torch.randn(16, 16), torch.randn(16)
    expected = torch.addmm(bias, a, b)
    with xt.kernel_policy(policy()):
        torch.testing.assert_close(torch.addmm(bias, a, b), expected)
        torch.testing.assert_close(torch.addmm(bias, a, b), expected)
        (route,) = routes()
    assert route.tuned
    assert route.kernel in ("torch.mm", "auto")


def test_what_is_written_in_place_is_written_once():
    a, b, c = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    expected = c + a @ b
    out = torch.empty(4, 4)
    with xt.kernel_policy(policy()):
        torch.addmm(c, a, b, out=out)
        torch.testing.assert_close(out, expected)
        c.addmm_(a, b)
    torch.testing.assert_close(c, expected)


def test_measured_times_are_kept_on_disk(store, monkeypatch):
    asked = takes(monkeypatch, native=10.0, ours=5.0)
    a = torch.randn(4, 4)
    with xt.kernel_policy(policy()):
        a @ a
    assert len(asked) == 1
    entries = json.loads(store.read_text())["entries"]
    mine = [entry for key, entry in entries.items() if key.startswith("torch;matmul;aten::mm of [4, 4] and [4, 4]")]
    assert [time["kernel"] for time in mine[0]["times"]] == ["auto", "torch.mm"]
    assert mine[0]["validators"]["torch"] == torch.__version__
    forget(monkeypatch)
    with xt.kernel_policy(policy()):
        a @ a
        assert routes()[0].kernel == "auto"
    assert len(asked) == 1


def test_nothing_is_measured_during_a_capture_and_it_is_asked_again(monkeypatch):
    asked = takes(monkeypatch, native=10.0, ours=5.0)
    a = torch.randn(4, 4)
    with xt.kernel_policy(policy()):
        with monkeypatch.context() as capturing:
            capturing.setattr(tuning.context, "capturing", lambda: True)
            a @ a
        assert routes() == asked == []
        a @ a
        assert [route.kernel for route in routes()] == ["auto"]
    assert len(asked) == 1


def test_other_words_come_before_auto(monkeypatch):
    asked = takes(monkeypatch, native=10.0, ours=5.0)
    kernels = xrt.KernelPolicy(matmul=["cpu.blas", "auto"], auto_strategy="best_performance")
    a = torch.randn(4, 4)
    with xt.kernel_policy(kernels):
        a @ a
        assert asked == []
        half = a.bfloat16()
        half @ half
    assert len(asked) == 1


def test_what_cannot_serve_is_out():
    def cannot():
        raise UnsupportedOperationError("no")

    assert tuning.pick("matmul", "cannot", [("torch.mm", lambda: None), ("auto", cannot)], CPU) == "torch.mm"


@pytest.mark.parametrize(
    ("native", "ours", "kernel"),
    [
        # microseconds of the host, and of the device, where a call costs 25 on its way
        ((12.0, 5.0), (10.0, 2.0), "torch.mm"),  # the device waits for the host, with either
        ((38.0, 30.0), (23.0, 29.0), "torch.mm"),  # less than a call costs more in a step
        ((60.0, 5.0), (36.0, 2.0), "torch.mm"),
        ((60.0, 5.0), (20.0, 2.0), "auto"),
        ((12.0, 90.0), (13.0, 60.0), "auto"),  # the device is behind
        ((12.0, 90.0), (70.0, 60.0), "torch.mm"),  # then it would wait
        ((12.0, 60.0), (13.0, 40.0), "torch.mm"),  # it may wait for what is beside such calls
        ((12.0, 20.0), (13.0, 10.0), "torch.mm"),
        ((45.0, 40.0), (13.0, 42.0), "auto"),
        ((45.0, 40.0), (13.0, 60.0), "torch.mm"),  # what the host gains, the device loses
    ],
)
def test_where_the_host_is_what_a_call_costs_a_faster_kernel_alone_is_no_reason(native, ours, kernel, monkeypatch):
    times = {"torch.mm": native, "auto": ours}
    assert chosen(monkeypatch, times, eager=True, route=25.0) == kernel
    assert chosen(monkeypatch, times, eager=False, route=25.0) == ("auto" if ours[1] < native[1] else "torch.mm")


def test_a_gradient_goes_the_way_twice(monkeypatch):
    times = {"torch.mm": (100.0, 20.0), "auto": (60.0, 20.0)}
    assert chosen(monkeypatch, times, eager=True, route=25.0) == "auto"
    assert chosen(monkeypatch, times, eager=True, route=50.0) == "torch.mm"


@pytest.mark.parametrize(
    ("native", "ours", "route", "kernel"),
    [
        (9.0, 1.0, 10.0, "torch.mm"),
        (90.0, 60.0, 10.0, "auto"),
        (9.0, 1.0, 2.0, "auto"),  # on a machine where the way costs less
        (90.0, 60.0, math.inf, "torch.mm"),  # where it is not known
    ],
)
def test_the_way_to_a_kernel_has_to_be_gained_first(native, ours, route, kernel, monkeypatch):
    times = {"torch.mm": (native, 0.0), "auto": (ours, 0.0)}
    assert chosen(monkeypatch, times, eager=True, route=route, device=CPU) == kernel


def test_a_measured_kernel_that_is_no_candidate_any_more_is_out():
    both = [("torch.mm", lambda: time.sleep(0.002)), ("auto", lambda: None)]
    assert tuning.pick("matmul", "fewer", both, CPU) == "auto"
    assert tuning.pick("matmul", "fewer", both[:1], CPU) == "torch.mm"


def chosen(monkeypatch, times, *, eager, route, device=CUDA):
    """Return what is chosen where calls take these microseconds of the host and of the device."""
    monkeypatch.setattr(step_cost, "time_on_cuda", lambda run, *_: tuple(1e-6 * one for one in times[run()]))
    monkeypatch.setattr(step_cost, "time_calls", lambda run, calls, samples: [1e-6 * times[run()][0] * calls] * samples)
    candidates = [(name, lambda name=name: name) for name in times]
    found = tuning._measure(candidates, device, eager, {"auto": route * 1e-6}, TuningPolicy(), None, {})
    assert found.rounds < 15 or route == math.inf
    return found.chosen.kernel


def test_what_is_undecided_stays_native_and_is_measured_again_with_more_time(monkeypatch):
    asked = takes(monkeypatch, native=10.0, ours=9.9, undecided=True)
    a = torch.randn(4, 4)
    for budget, times in (("1s", 1), ("1s", 1), ("5s", 2), ("1s", 2)):
        kernels = xrt.KernelPolicy(auto_strategy="best_performance", tuning={"budget": budget})
        forget(monkeypatch)
        with xt.kernel_policy(kernels):
            a @ a
            assert [route.kernel for route in routes()] == ["torch.mm"]
        assert len(asked) == times, budget


def test_another_margin_is_another_record(monkeypatch):
    asked = takes(monkeypatch, native=10.0, ours=5.0)
    a = torch.randn(4, 4)
    for effect, times in ((0.02, 1), (0.1, 2), (0.02, 2), (0.1, 2)):
        forget(monkeypatch)
        with xt.kernel_policy(xrt.KernelPolicy(auto_strategy="best_performance", tuning={"min_effect": effect})):
            a @ a
        assert len(asked) == times


def test_a_cancelled_measurement_leaves_pytorchs_and_nothing_is_kept(store, monkeypatch):
    monkeypatch.setattr(tuning, "route_cost", lambda *_: 0.0)
    a = torch.randn(4, 4)
    seen = []

    def note(progress):  # the core measures its kernels against each other where they first run
        seen.extend([progress] * (progress.tuner == "torch"))

    with xt.kernel_policy(policy()):
        with watch_tuning(progress=note, cancel=lambda: len(seen) > 1):
            torch.testing.assert_close(a @ a, a.double().mm(a.double()).float())
            assert not [route for route in routes() if route.tuned]
        assert [(one.rounds, one.most_rounds) for one in seen[:2]] == [(0, 0), (0, 61)]
        assert not store.exists() or "aten::mm of [4, 4] and [4, 4]" not in store.read_text()
        a @ a
        assert next(route.tuned for route in routes() if route.op == "matmul")


def test_inside_replayed_the_times_of_replays_decide(monkeypatch):
    runs = []

    def measure(candidates, device, eager, *_):
        runs.append(eager)
        return replacement({"torch.mm": 10.0, "auto": 20.0 if eager else 1.0})

    monkeypatch.setattr(tuning, "_measure", measure)
    cuda = type("Device", (), {"type": "cuda", "index": 0})()
    monkeypatch.setattr(tuning, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(step_cost.StepLag, "observe", lambda *_: False)
    monkeypatch.setattr(tuning.CONTEXT, "lags", {})
    candidates = [("torch.mm", lambda: None), ("auto", lambda: None)]
    assert tuning.pick("matmul", "x", candidates, cuda) == "torch.mm"
    with tuning.replayed():
        assert tuning.pick("matmul", "x", candidates, cuda) == "auto"
    assert tuning.pick("matmul", "x", candidates, cuda) == "torch.mm"
    with monkeypatch.context() as by_hand:
        by_hand.setattr(tuning.context, "capturing", lambda: True)
        assert tuning.pick("matmul", "x", candidates, cuda) == "auto"
    assert runs == [True, False]


@pytest.fixture
def device_that_waits(monkeypatch):
    """A CUDA device on which two kernels were measured, and a list of whether it is behind at the next observations."""

    def measure(candidates, device, eager, *_):
        return replacement({"torch.mm": 10.0, "auto": 20.0 if eager else 1.0})

    answers = []

    class Event:
        def query(self):
            return not answers.pop(0)

    monkeypatch.setattr(tuning, "_measure", measure)
    monkeypatch.setattr(tuning, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(tuning.CONTEXT, "lags", {})
    monkeypatch.setattr(step_cost, "_queued", lambda device: Event())
    monkeypatch.setattr(step_cost.time, "perf_counter", itertools.count().__next__)  # always later
    monkeypatch.setattr(step_cost.StepLag, "_TURN", 1 << 30)
    return type("Device", (), {"type": "cuda", "index": 0})(), answers


def _picked(device, count, key="y"):
    candidates = [("torch.mm", lambda: None), ("auto", lambda: None)]
    return [tuning.pick("matmul", key, candidates, device) for _ in range(count)]


def test_where_the_device_is_behind_its_times_decide(device_that_waits):
    device, answers = device_that_waits
    answers += [False, True, True, False, True, True, True]
    assert _picked(device, 8) == ["torch.mm"] * 7 + ["auto"]
    times = {name: spent for name, spent, _ in tuning.measured("matmul", "y", device)}
    assert times == {"torch.mm": 10.0, "auto": 1.0}


def test_a_gain_on_the_device_is_worth_a_part_of_the_time_of_the_host():
    def times(**microseconds):
        native, *others = microseconds.items()
        found = [KernelTiming(name, "", us, us / native[1], 0.5, 0.9, "faster") for name, us in others]
        return replacing([KernelTiming(native[0], "", native[1]), *found], rounds=9, seconds=3.0)

    by_device = times(torch=110.0, own=36.0, package=35.0)
    assert by_device.chosen.kernel == "package"
    for host, kernel in ((60.0, "package"), (400.0, "own")):
        chosen = tuning._on_device(times(torch=40.0, own=60.0, package=host), by_device, TuningPolicy())
        assert chosen.chosen.kernel == kernel
        assert {candidate.kernel for candidate in chosen.candidates} == {"torch", "own", "package"}
    found = tuning._on_device(times(torch=40.0, package=2000.0), times(torch=110.0, package=35.0), TuningPolicy())
    assert found.chosen.kernel == "torch"


@pytest.mark.parametrize(("objective", "peak", "kernel"), [
    ("time", 90, "less"), ("time", 99, "torch"), ("memory", 90, "least"),
])  # fmt: skip
def test_where_the_device_is_behind_memory_decides_as_it_does_elsewhere(objective, peak, kernel):
    timings = [
        KernelTiming("torch", "", 100.0),
        KernelTiming("less", "", 101.0, 1.01, 1.0, 1.015, "tied"),
        KernelTiming("least", "", 150.0, 1.5, 1.4, 1.6, "slower"),
    ]
    rule, peaks = TuningPolicy(objective=objective), {"torch": 100, "less": peak, "least": 10}
    by_device = by_memory(replacing(timings, rounds=9, seconds=1.0), peaks, rule)
    assert tuning._on_device(by_device, by_device, rule).chosen.kernel == kernel


def test_what_follows_on_a_preparation_does_not_decide(device_that_waits):
    device, answers = device_that_waits
    answers += [True, True]
    assert _picked(device, 3) == ["torch.mm"] * 3
    answers += [True, True, True]
    assert _picked(device, 4, "another") == ["torch.mm"] * 3 + ["auto"]  # the first call measures
    assert not answers


def test_a_route_is_kept_when_enough_was_observed(device_that_waits):
    device, answers = device_that_waits
    active = CompiledPolicy(xrt.Policy(kernels=policy()))
    route = Route("matmul", ("auto",), "default", "torch.mm", tuned=True)
    tuning.CONTEXT.lags[0, False] = step_cost.StepLag(device)
    route.lags = (tuning.CONTEXT.lags[0, False],)
    active.keep_later("a call", route)
    answers += [False] * 24
    for left in range(24, -1, -1):
        assert active.of_kind("a call", None) is route
        assert ("a call" in active.routes) is (left == 0)
    active.keep_later("another", route)
    active.forget_tuned()
    assert active.of_kind("another", None) is None
    assert not active.routes


def test_the_device_is_left_alone_for_a_while_once_enough_was_observed(device_that_waits, monkeypatch):
    device, answers = device_that_waits
    monkeypatch.setattr(step_cost.StepLag, "_TURN", 8)
    monkeypatch.setattr(step_cost.StepLag, "_REST", 100)
    lag = tuning.CONTEXT.lags[0, False] = step_cost.StepLag(device)
    answers += [False] * 24
    for _ in range(25):
        tuning.CONTEXT.observe_device(device)
    assert lag.settled
    answers += [True] * 7
    for _ in range(99):  # one a second
        tuning.CONTEXT.observe_device(device)
    assert len(answers) == 7
    for _ in range(8):
        tuning.CONTEXT.observe_device(device)
    assert lag.behind


def test_steps_are_known_to_wait_for_the_host_when_enough_was_observed(device_that_waits):
    device, answers = device_that_waits
    answers += [False] * 24
    assert [step_cost.waits_for_host(device) for _ in range(25)] == [False] * 24 + [True]
    answers += [True] * 3
    assert [step_cost.waits_for_host(device) for _ in range(3)] == [True, True, False]
    assert not step_cost.waits_for_host(torch.device("cpu"))


def test_a_call_with_its_gradient_goes_by_the_pass_that_waits(device_that_waits, monkeypatch):
    device, answers = device_that_waits
    answers += [False] * 2
    pair, alone = "y;grad=True", "y;grad=False"
    assert _picked(device, 2, pair) + _picked(device, 2, alone) == ["torch.mm"] * 4
    answers[:] = [True] * 3
    with monkeypatch.context() as inside:
        inside.setattr(tuning._private_api, "running_backward", lambda: 0)
        for _ in range(4):
            tuning.CONTEXT.observe_device(device)
    answers[:] = [False] * 2
    assert _picked(device, 1, pair) + _picked(device, 1, alone) == ["auto", "torch.mm"]


def test_a_step_that_changes_is_noticed_each_time_later(device_that_waits):
    device, answers = device_that_waits
    lag_of_step, changes = None, []
    for behind in (True, False, True, False):
        before = tuning.CONTEXT.lags[0, False].behind if tuning.CONTEXT.lags else False
        count = 0
        while (lag_of_step := tuning.CONTEXT.lags.get((0, False))) is None or lag_of_step.behind is before:
            answers[:] = [behind]
            _picked(device, 1)
            count += 1
        changes.append(count)
    assert changes[0] < changes[2]
    assert changes[1] < changes[3] <= 2 * changes[1]
    assert lag_of_step.settled


def test_routes_are_decided_anew_around_replayed(monkeypatch):
    takes(monkeypatch, native=10.0, ours=5.0)
    a = torch.randn(4, 4)
    with xt.kernel_policy(policy()):
        a @ a
        assert len(routes()) == 1
        with tuning.replayed():
            assert routes() == []
            a @ a
        assert routes() == []


def test_what_is_chosen_for_a_graph_is_not_kept_for_eager_calls(monkeypatch):
    takes(monkeypatch, native=10.0, ours=5.0)
    a = torch.randn(4, 4)
    with xt.kernel_policy(policy()):
        a @ a
        CONTEXT.forget_tuned_routes()  # as where a capture begins
        with monkeypatch.context() as capturing:
            capturing.setattr(tuning.context, "capturing", lambda: True)
            a @ a
            assert routes() == []
        a @ a
        assert [route.kernel for route in routes()] == ["auto"]


@pytest.mark.parametrize("grows", ["in place", "by a copy"])
def test_a_growing_kv_cache_is_measured_once_in_each_range_of_lengths(grows, monkeypatch):
    measured = []

    def measure(candidates, *_):
        measured.append(length)
        return replacement({name: 10.0 for name, _ in candidates})

    monkeypatch.setattr(tuning, "_measure", measure)
    monkeypatch.setattr(tuning, "route_cost", lambda *_: 0.0)
    q, cache = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 80, 16)
    with torch.no_grad(), xt.kernel_policy(attention="auto", auto_strategy="best_performance"):
        for length in range(20, 70):
            k = cache[:, :, :length] if grows == "in place" else cache[:, :, :length].contiguous()
            mask = torch.ones(1, length, dtype=torch.bool)
            torch.nn.functional.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)
    assert measured == [20, 33, 65]


def test_threads_measure_a_kind_of_call_once(monkeypatch):
    asked = takes(monkeypatch, native=10.0, ours=5.0)
    a = torch.randn(4, 4)
    with xt.kernel_policy(policy()):
        threads = [threading.Thread(target=lambda: a @ a) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(asked) == 1


@pytest.mark.parametrize("inside", ["attention", "backward"])
def test_nobody_waits_for_measuring_inside_of(inside):
    """Who measures may be waiting for the turn with PyTorch's switches that this thread has, or for its backward."""
    from xpuruntime.pytorch.attention.sdpa_backends import by_backend

    ran, found = [], []
    candidates = [("torch.mm", lambda: ran.append(1)), ("auto", lambda: ran.append(1))]

    def pick(*_):
        found.append(tuning.pick("matmul", f"of this test, in {inside}", candidates, CPU))

    def ask():
        if inside == "attention":
            with by_backend(None):
                pick()
        else:
            y = torch.ones(1, requires_grad=True) * 2
            y.register_hook(pick)
            y.backward()

    with tuning._measuring:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert found == [None]
    assert not ran
    ask()
    assert found[1] in ("torch.mm", "auto")
    assert ran


def test_a_checkpoint_does_not_see_what_is_measured_inside(monkeypatch):
    """Else the gradients that are measured run the block again, each time, and wait there for the measuring to end."""
    asked = takes(monkeypatch, native=10.0, ours=5.0)
    torch.manual_seed(0)
    x, project, calls = torch.randn(2, 2, 16, 8, requires_grad=True), torch.nn.Linear(8, 8), []

    def block(x):
        calls.append(1)
        y = project(x)
        return torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).sin()

    def gradient():
        return torch.autograd.grad(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum(), x)[0]

    want = gradient()
    calls.clear()
    with xt.kernel_policy(xrt.KernelPolicy(attention="auto", auto_strategy="best_performance")):
        torch.testing.assert_close(gradient(), want)
    assert asked
    assert len(calls) == 2


def test_what_is_measured_inside_of_a_measurement_does_not_end_it():
    with tuning.as_tuning():
        with tuning.as_tuning():
            assert tuning.measuring()
        assert tuning.measuring()  # else the rest would count as calls of the program
    assert not tuning.measuring()
