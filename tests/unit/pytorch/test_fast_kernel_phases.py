# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Phase rules in fast kernels: a rule of a phase matches, and only a new call reaches Python."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from fast_kernel_calls import F, call  # noqa: E402 - it needs PyTorch

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.measuring.rounds import KernelTiming, replacing  # noqa: E402
from xpuruntime.pytorch.dispatch import context, fast_path, tuning  # noqa: E402
from xpuruntime.pytorch.dispatch.overrides import attention  # noqa: E402

pytestmark = pytest.mark.torch
by_addon = pytest.mark.parametrize("route", ["addon"], indirect=True)

OPS = ("matmul", "layer_norm", "attention")


def rules(phase):
    return [{"match": {"op": op, "phase": phase}, "use": "cpu.reference"} for op in OPS]


def served():
    return {decision.op for decision in xrt.decisions()}


def phases():
    return {(decision.op, decision.phase) for decision in xrt.decisions()}


class Doubled(torch.autograd.Function):
    """Twice its argument, and notes in which phase its gradient is computed."""

    seen: list[str] = []  # noqa: RUF012 - shared on purpose

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        Doubled.seen.append(context.phase())
        return 2 * grad


@pytest.mark.usefixtures("route")
def test_the_phase_of_a_call_is_known_on_each_route():
    assert context.phase() == "train"
    with torch.no_grad():
        assert context.phase() == "infer"
    Doubled.seen.clear()
    x = torch.ones(3, requires_grad=True)
    hooked = []
    x.register_hook(lambda grad: hooked.append(context.phase()))
    torch.autograd.grad(Doubled.apply(x).sum(), x, create_graph=True)
    torch.autograd.grad(Doubled.apply(x).sum(), x)
    assert Doubled.seen == ["train", "backward"]
    assert hooked == Doubled.seen
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(context.phase()))
    thread.start()
    thread.join()
    assert elsewhere == ["train"]


def net():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    weight, columns = torch.randn(8, 8, requires_grad=True), torch.ones(8, requires_grad=True)

    def step(recorded=True):
        with torch.set_grad_enabled(recorded):
            mixed = F.scaled_dot_product_attention(q, q, q)
            out = F.layer_norm(mixed.reshape(-1, 8) @ weight, (8,), columns, columns)
        return torch.autograd.grad(out.square().sum(), (q, weight, columns)) if recorded else (out,)

    return step


TRAINED = {("matmul", "train"), ("layer_norm", "train"), ("attention", "train")}
DERIVED = {("matmul", "backward"), ("layer_norm_backward", "backward"), ("attention_backward", "backward")}


@pytest.mark.usefixtures("route")
@by_addon
@pytest.mark.parametrize(
    ("phase", "training", "inferring"),
    [
        ("train", TRAINED, set()),
        ("infer", set(), {("matmul", "infer"), ("layer_norm", "infer"), ("attention", "infer")}),
        ("backward", DERIVED, set()),
        (["train", "backward"], TRAINED | DERIVED, set()),
    ],
    ids=("train", "infer", "backward", "both"),
)
def test_rules_of_each_phase_hold_also_when_calls_of_other_phases_are_known(phase, training, inferring):
    step = net()
    expected = step(), step(recorded=False)
    with xt.kernel_policy(rules=rules(phase)):
        for _ in range(3):
            xrt.clear_decisions()
            found = step()
            assert phases() == training
            xrt.clear_decisions()
            inferred = step(recorded=False)
            assert phases() == inferring
            for one, other in zip((*found, *inferred), (*expected[0], *expected[1]), strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("phase", "kernel", "apart"),
    [("infer", "cpu.reference", False), ("backward", "torch", False), ("backward", "cpu.reference", True)],
)
def test_recorded_attention_takes_the_python_route_if_its_gradient_is_by_xpuruntime(phase, kernel, apart, monkeypatch):
    looked = []
    real = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *args: (looked.append(1), real(*args))[1])
    q = torch.randn(2, 2, 4, 8, requires_grad=True)

    def gradient():
        return torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).square().sum(), q)[0]

    expected = gradient()
    with xt.kernel_policy(rules=[{"match": {"op": "attention", "phase": phase}, "use": kernel}]):
        torch.testing.assert_close(gradient(), expected)
        first = len(looked)
        xrt.clear_decisions()
        for _ in range(3):
            torch.testing.assert_close(gradient(), expected)
        assert (len(looked) > first) is (apart or fast_path.fast_path().route != "addon")
        assert served() == ({"attention_backward"} if apart else set())
        xrt.clear_decisions()
        with torch.no_grad():  # another kind of call
            F.scaled_dot_product_attention(q, q, q)
        assert served() == ({"attention"} if phase == "infer" else set())


@pytest.mark.usefixtures("nothing_is_tuned")
def test_attention_that_could_not_be_measured_is_measured_later(monkeypatch):
    def last_is_fastest(candidates, *_):
        (native, _), *others = candidates
        timings = [
            KernelTiming(name, "", 1.0, 1 / at, 1 / at, 1 / at, "faster") for at, (name, _) in enumerate(others, 2)
        ]
        return replacing([KernelTiming(native, "", 9.0), *timings], rounds=11, seconds=3.0)

    monkeypatch.setattr(tuning, "route_cost", lambda *_: 0.0)
    monkeypatch.setattr(tuning, "_measure", last_is_fastest)
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    tuned = {"auto_strategy": "best_performance"}
    xrt.clear_decisions()
    with xt.kernel_policy(rules=[{"match": {"op": "attention", "phase": "backward"}, "use": "torch"}], **tuned):
        with monkeypatch.context() as patch:
            patch.setattr(tuning, "may_measure", lambda: False)
            for _ in range(3):
                F.scaled_dot_product_attention(q, q, q)
            assert not any(decision.op == "attention" for decision in xrt.decisions())
        F.scaled_dot_product_attention(q, q, q)
        assert "attention" in served()


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("route", ["stable", "python"], indirect=True)
def test_without_the_addon_products_of_a_phase_are_known_too(asked):
    a = torch.randn(3, 3)
    xrt.clear_decisions()
    with xt.kernel_policy(rules=rules("infer")):
        for _ in range(3):
            a @ a
        with torch.no_grad():
            for _ in range(3):
                a @ a
    assert asked == ["train", "infer"]
    assert phases() == {("matmul", "infer")}
    assert sum(decision.count for decision in xrt.decisions()) == 3


OURS = {"matmul": "cpu.reference", "layer_norm": "cpu.reference", "rms_norm": "cpu.reference"}


BACKWARD = [{"match": {"op": op, "phase": "backward", "module": "nowhere"}, "use": "cpu.reference"} for op in OURS]


def product():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    return lambda: torch.mm(a, b)


RUNS = {"mm": product, "layer_norm": lambda: call("layer_norm"), "rms_norm": lambda: call("rms_norm")}


def forget_routes():
    active = context.active_policy()
    for key in list(active.routes):
        active.keep(key, None)


@pytest.mark.parametrize(
    ("form", "route"),
    # Without the addon, norms have no fast kernel that could have kept what held before.
    [*(("mm", route) for route in ("addon", "stable", "python")), ("layer_norm", "addon"), ("rms_norm", "addon")],
    indirect=["route"],
)
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.usefixtures("route")
def test_it_is_obeyed_by_the_next_call(form, at, monkeypatch):
    run = RUNS[form]()
    asked = []
    real = context.phase

    def phase():  # which is asked for on the way
        asked.append(1)
        if len(asked) == at:
            context.set_process_policy(ours)
        return real()

    monkeypatch.setattr(context, "phase", phase)
    with torch.no_grad(), xt.kernel_policy(**OURS):
        ours = context.active_policy()
        with xt.kernel_policy(rules=BACKWARD):
            while context.active_policy() is not ours:
                forget_routes()
                run()
            for _ in range(3):
                xrt.clear_decisions()
                run()
                assert [decision.kernel for decision in xrt.decisions()] == ["cpu.reference"]
