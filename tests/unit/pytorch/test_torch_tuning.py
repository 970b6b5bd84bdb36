# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``auto_strategy: best_performance`` on PyTorch's operations: measured once, kept, and never slower than PyTorch's."""

from __future__ import annotations

import functools
import json
import threading
import time

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")
tuning = pytest.importorskip("xpuruntime.pytorch.dispatch.tuning")
CONTEXT = pytest.importorskip("xpuruntime.pytorch.dispatch.context").CONTEXT

pytestmark = pytest.mark.torch

FASTEST = {"schema": "xpuruntime.policy/1", "kernels": {}, "auto_strategy": "best_performance"}
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
    monkeypatch.setattr(tuning, "_open_store", functools.cache(tuning._open_store.__wrapped__))


def takes(monkeypatch, **microseconds):
    """Let the clock say what each candidate takes, ``native`` and ``ours``, and count how often it is asked."""
    asked = []
    real = tuning._measure

    def measure(candidates, device, eager, passes):
        asked.append([name for name, _ in candidates])
        times = real(candidates, device, eager, passes)  # which runs them
        return {name: microseconds["ours" if name == "auto" else "native"] for name in times}

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
            capturing.setattr(tuning.call_state, "capturing", lambda: True)
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
        # microseconds of the host, and of the device
        ((12.0, 5.0), (10.0, 2.0), "torch.mm"),  # the device waits for the host, with either
        ((38.0, 30.0), (23.0, 29.0), "torch.mm"),  # less than a call costs more in a step
        ((60.0, 5.0), (20.0, 2.0), "auto"),
        ((12.0, 60.0), (13.0, 40.0), "auto"),  # the device is behind
        ((12.0, 60.0), (70.0, 40.0), "torch.mm"),  # then it would wait
        ((12.0, 40.0), (13.0, 20.0), "torch.mm"),  # it may wait for what is beside such calls
        ((45.0, 40.0), (13.0, 42.0), "auto"),
        ((45.0, 40.0), (13.0, 60.0), "torch.mm"),  # what the host gains, the device loses
    ],
)
def test_where_the_host_is_what_a_call_costs_a_faster_kernel_alone_is_no_reason(native, ours, kernel, monkeypatch):
    times = {"torch.mm": native, "auto": ours}
    assert chosen(monkeypatch, times, eager=True) == kernel
    assert chosen(monkeypatch, times, eager=False) == ("auto" if ours[1] < native[1] else "torch.mm")


def test_a_gradient_goes_the_way_twice(monkeypatch):
    times = {"torch.mm": (100.0, 20.0), "auto": (60.0, 20.0)}
    assert chosen(monkeypatch, times, eager=True) == "auto"
    assert chosen(monkeypatch, times, eager=True, passes={"auto": 2}) == "torch.mm"


@pytest.mark.parametrize(("native", "ours", "kernel"), [(9.0, 1.0, "torch.mm"), (90.0, 60.0, "auto")])
def test_on_the_cpu_a_few_microseconds_do_not_pay_for_the_way(native, ours, kernel, monkeypatch):
    times = {"torch.mm": (native, 0.0), "auto": (ours, 0.0)}
    assert chosen(monkeypatch, times, eager=True, device=CPU) == kernel


def test_a_measured_kernel_that_is_no_candidate_any_more_is_out():
    both = [("torch.mm", lambda: time.sleep(0.002)), ("auto", lambda: None)]
    assert tuning.pick("matmul", "fewer", both, CPU) == "auto"
    assert tuning.pick("matmul", "fewer", both[:1], CPU) == "torch.mm"


def chosen(monkeypatch, times, *, eager, passes=None, device=CUDA):
    """Return what is chosen where calls take these microseconds of the host and of the device."""
    monkeypatch.setattr(tuning, "_time_cuda", lambda run, _: times[run()])
    monkeypatch.setattr(tuning, "_time_host", lambda run: times[run()][0])
    candidates = [(name, lambda name=name: name) for name in times]
    return tuning._best(tuning._measure(candidates, device, eager, passes or {}), "torch.mm")


def test_inside_replayed_the_times_of_replays_decide(monkeypatch):
    runs = []

    def measure(candidates, device, eager, passes):
        runs.append(eager)
        return {"torch.mm": 10.0, "auto": 20.0 if eager else 1.0}

    monkeypatch.setattr(tuning, "_measure", measure)
    cuda = type("Device", (), {"type": "cuda"})()
    monkeypatch.setattr(tuning, "_device_name", lambda device: "a GPU")
    candidates = [("torch.mm", lambda: None), ("auto", lambda: None)]
    assert tuning.pick("matmul", "x", candidates, cuda) == "torch.mm"
    with tuning.replayed():
        assert tuning.pick("matmul", "x", candidates, cuda) == "auto"
    assert tuning.pick("matmul", "x", candidates, cuda) == "torch.mm"
    assert runs == [True, False]


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


def test_forward_and_backward_of_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x = torch.randn(3, 8)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    with xt.kernel_policy(policy()):
        found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        tuned = [route for route in routes() if route.op == "matmul"]
    torch.testing.assert_close(found, expected)
    assert len(tuned) >= 4
    assert all(route.tuned for route in tuned)


def test_nobody_waits_for_measuring_inside_of_an_attention():
    """Who measures may be waiting for the turn with PyTorch's switches that this thread has."""
    from xpuruntime.pytorch.attention.sdpa_backends import by_backend

    ran, found = [], []
    candidates = [("torch.mm", lambda: ran.append(1)), ("auto", lambda: ran.append(1))]

    def ask():
        with by_backend(None):
            found.append(tuning.pick("matmul", "of this test", candidates, CPU))

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
