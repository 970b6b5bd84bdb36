# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Phase rules in fast kernels: a rule of a phase matches, and only a new call reaches Python."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from fast_kernel_calls import F  # noqa: E402 - it needs PyTorch

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


@pytest.mark.usefixtures("route")
@by_addon
def test_python_is_asked_of_new_calls_alone_where_pytorchs_kernels_serve(asked):
    step = net()
    expected = step()
    with xt.kernel_policy(rules=rules("infer")):
        step()  # the routes are found
        step()  # and kept
        first = len(asked)
        assert set(asked) == {"train", "backward"}
        for _ in range(3):
            for one, other in zip(step(), expected, strict=True):
                assert torch.equal(one, other)
        assert len(asked) == first
        step(recorded=False)
        assert asked[-1] == "infer"


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


@pytest.mark.usefixtures("route")
@by_addon
def test_kernels_of_ours_serve_without_python_and_their_phase_is_recorded(asked):
    step = net()
    expected = step(recorded=False)
    with xt.kernel_policy(rules=rules(["train", "infer", "backward"])), torch.no_grad():
        step(recorded=False)
        step(recorded=False)
        first = len(asked)
        xrt.clear_decisions()
        for _ in range(3):
            torch.testing.assert_close(step(recorded=False), expected)
        assert len(asked) == first
        counts = Counter[tuple[str, str]]()
        for decision in xrt.decisions():
            counts[decision.op, decision.phase] += decision.count
        assert counts == {(op, "infer"): 3 for op in ("matmul", "layer_norm", "attention")}


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
