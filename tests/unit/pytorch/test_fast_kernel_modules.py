# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Module rules in fast kernels: a rule of a module matches, and only a new call reaches Python."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.call_scope import module_paths  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("no_policy_is_left"),
    # Rules of modules that there are not are what some of these compare with.
    pytest.mark.filterwarnings("ignore:.*matched no call:xpuruntime.errors.XpuRuntimeWarning"),
]
by_addon = pytest.mark.parametrize("route", ["addon"], indirect=True)

F = torch.nn.functional


class Mixing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8, bias=False)

    def forward(self, x):
        q = self.inner(x).reshape(1, 2, 4, 8)
        return F.scaled_dot_product_attention(q, q, q).reshape(8, 8)


def stack():
    """Modules of the same shapes: what tells their calls apart is their path."""
    return torch.nn.Sequential(
        *(torch.nn.Sequential(Mixing(), torch.nn.Linear(8, 8, bias=False), torch.nn.LayerNorm(8)) for _ in range(2))
    )


def stepping(model):
    x = torch.randn(8, 8, requires_grad=True)

    def step(recorded=True):
        with torch.set_grad_enabled(recorded):
            out = model(x)
        return torch.autograd.grad(out.square().sum(), (x, *model.parameters())) if recorded else (out,)

    return step


def rules(module, **more):
    return [
        {"match": {"op": op, "module": module, **more}, "use": "cpu.reference"}
        for op in ("matmul", "layer_norm", "attention")
    ]


def counts():
    result = Counter()
    for decision in xrt.decisions():
        result[decision.op, decision.module] += decision.count
    return result


#: Of one step: a product and its two gradients, a norm and its gradient, an attention and its gradient.
IN_LINEAR, IN_NORM = {("matmul", "1.1"): 3}, {("layer_norm", "1.2"): 1, ("layer_norm_backward", "1.2"): 1}
IN_MIXING = {("attention", "1.0"): 1, ("attention_backward", "1.0"): 1, ("matmul", "1.0.inner"): 3}


@pytest.mark.usefixtures("route")
@by_addon
@pytest.mark.parametrize(
    ("module", "expected"),
    [("1.1", IN_LINEAR), ("1.2", IN_NORM), ("1.0*", IN_MIXING), ("1.*", IN_LINEAR | IN_NORM | IN_MIXING)],
)
def test_rules_of_a_module_hold_also_when_calls_of_others_are_known(module, expected):
    step = stepping(stack())
    wanted = step()
    with xt.kernel_policy(rules=rules(module)):
        for _ in range(4):
            xrt.clear_decisions()
            for one, other in zip(step(), wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            assert counts() == expected


@pytest.mark.usefixtures("route")
@by_addon
@pytest.mark.parametrize("more", [{}, {"phase": "infer"}], ids=["of any phase", "of a phase"])
def test_python_is_asked_of_new_calls_alone_where_pytorchs_kernels_serve(asked, more):
    step = stepping(stack())
    expected = step()
    with xt.kernel_policy(rules=rules("nowhere", **more)):
        step()  # the routes are found
        step()  # and kept
        assert set(asked) == {"train", "backward"}
        first = len(asked)
        for _ in range(3):
            for one, other in zip(step(), expected, strict=True):
                assert torch.equal(one, other)
        assert len(asked) == first
        step(recorded=False)
        assert asked[-1] == "infer"


@pytest.mark.usefixtures("route")
@by_addon
def test_kernels_of_ours_serve_without_python_and_their_module_is_recorded(asked):
    step = stepping(stack())
    expected = step(recorded=False)
    with xt.kernel_policy(rules=rules("1.*")), torch.no_grad():
        step(recorded=False)
        step(recorded=False)
        first = len(asked)
        xrt.clear_decisions()
        for _ in range(3):
            torch.testing.assert_close(step(recorded=False), expected)
        assert len(asked) == first
        served = {("matmul", "1.0.inner"), ("attention", "1.0"), ("matmul", "1.1"), ("layer_norm", "1.2")}
        assert counts() == dict.fromkeys(served, 3)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("route", ["stable", "python"], indirect=True)
def test_without_the_addon_python_says_the_module_each_time(asked):
    step = stepping(stack())
    step()
    with xt.kernel_policy(rules=rules("1.1")):
        step()
        step()
        first = len(asked)
        xrt.clear_decisions()
        step()
        assert len(asked) > first
        # Of the backward too, unless nodes that other threads made in this process have the same numbers.
        assert counts()["matmul", "1.1"] in (1, 3)


@pytest.mark.parametrize("name", ["stable", "python"])
def test_without_the_addon_the_backward_of_one_thread_knows_its_modules(name):
    code = """
import xpuruntime as xrt, xpuruntime.pytorch as xt
from test_fast_kernel_modules import IN_LINEAR, counts, rules, stack, stepping
step = stepping(stack())
with xt.kernel_policy(rules=rules("1.1")):
    step()
    step()
    xrt.clear_decisions()
    step()
    assert counts() == IN_LINEAR, counts()
"""
    environment = {**os.environ, "XPURUNTIME_TORCH_FAST_PATH": name}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


class Pair(torch.nn.Module):
    """Two products of which one learns nothing, and comes right after the other."""

    def __init__(self):
        super().__init__()
        self.learning = torch.nn.Linear(8, 8, bias=False)
        self.frozen = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)

    def forward(self, x):
        learnt = self.learning(x)
        return learnt + self.frozen(x)


def test_a_call_that_records_no_node_does_not_take_that_of_another_module():
    pair, x = Pair(), torch.randn(8, 8)
    with xt.kernel_policy(rules=[{"match": {"op": "matmul", "module": "frozen"}, "use": "cpu.reference"}]):
        for _ in range(3):
            xrt.clear_decisions()
            pair(x).sum().backward()
            assert counts() == {("matmul", "frozen"): 1}


def test_a_backward_in_another_thread_belongs_to_the_modules_of_its_forward():
    step_model, x = stack(), torch.randn(8, 8)
    with xt.kernel_policy(rules=rules("1.1")):
        for _ in range(3):
            loss = step_model(x).square().sum()
            xrt.clear_decisions()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            assert counts() == {("matmul", "1.1"): 2}


def test_modules_of_threads_are_their_own():
    model, wanted = stack(), Counter()
    barrier, errors = threading.Barrier(4), []

    def work():
        try:
            x = torch.randn(8, 8)
            with torch.no_grad():
                expected = model(x)
                for _ in range(50):
                    barrier.wait()
                    torch.testing.assert_close(model(x), expected)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    with xt.kernel_policy(rules=rules("1.1")):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        wanted["matmul", "1.1"] = 4 * 51
        assert counts() == wanted


@pytest.mark.parametrize(("times", "known"), [(65_000, True), (66_000, False)])
def test_the_last_131072_changes_of_module_are_kept(times, known):
    first, x = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False)), torch.randn(8, 8)
    more = torch.ones(1, requires_grad=True)
    with xt.kernel_policy(rules=[{"match": {"op": "matmul", "module": "0"}, "use": "cpu.reference"}]):
        loss = first(x)
        for _ in range(times):
            with module_paths.inside("another"):
                more * 1
            more * 1
        xrt.clear_decisions()
        loss.sum().backward()
        assert counts() == ({("matmul", "0"): 1} if known else {})


def test_a_model_that_has_run_is_not_kept():
    with xt.kernel_policy(rules=rules("nowhere")):
        model = stack()
        model(torch.randn(8, 8))
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


def test_a_forward_that_raises_leaves_no_module_behind():
    class Raising(torch.nn.Module):
        def forward(self, x):
            raise LookupError("on purpose")

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Raising())
    with xt.kernel_policy(rules=rules("nowhere")):
        with pytest.raises(LookupError):
            model(torch.randn(8, 8))
        assert module_paths.running() == ""
        assert module_paths.current() == ""
