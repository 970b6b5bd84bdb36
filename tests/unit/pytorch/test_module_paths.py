# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One path for each module: however it is wrapped and called, in forward, backward and recomputation."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

import module_path_cases as cases  # noqa: E402 - it needs PyTorch

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime import _core  # noqa: E402
from xpuruntime.errors import PolicyError, UnsupportedOperationError, XpuRuntimeWarning  # noqa: E402
from xpuruntime.ops import plugins  # noqa: E402
from xpuruntime.pytorch.call_scope import module_names, module_paths  # noqa: E402

pytestmark = pytest.mark.torch


#: Each call and way of the bare model, and two ways and calls of each wrapper; GPUs have the rest.
CELLS = [
    (wrap, way, call)
    for wrap in cases.WRAPS
    for way in (cases.WAYS if wrap == "bare" else ("plain", "nested"))
    for call in (cases.CALLS if wrap == "bare" else ("training_step", "functional_call"))
    if cases.is_possible(wrap, call)
]


@pytest.mark.parametrize(("wrap", "way", "call"), CELLS)
def test_each_product_belongs_to_the_module_that_pytorch_runs_it_in(wrap, way, call):
    cases.check(wrap, way, call, "cpu", "cpu.reference")


class AddsNoBias(plugins.PythonKernel):
    """As ``cublas.cublas``: a product with a bias is refused, and made again with the bias added afterwards."""

    op, id, description, limits = "matmul", "testing_paths.product", "for tests", "no bias"

    def __init__(self):
        self.refused = []

    def supports(self, op):
        if "bias" in op["operands"]:
            self.refused.append(op["text"])
            return False, "it adds no bias"
        return True, ""

    def prepare(self, op, config):
        def run(operands, stream):
            operands["out"].numpy()[...] = operands["a"].numpy() @ operands["b"].numpy()

        return run


@pytest.fixture
def no_bias():
    kernel = AddsNoBias()
    plugins.register(plugins.KernelBackend("testing_paths", "cpu", "1"), kernel)
    yield kernel
    _core.KernelRegistry.instance().remove("testing_paths")


@pytest.mark.parametrize("call", cases.CALLS)
@pytest.mark.parametrize("way", cases.WAYS)
def test_a_product_that_a_kernel_refuses_at_first_counts_once(no_bias, way, call):
    cases.check("bare", way, call, "cpu", no_bias.id)
    assert no_bias.refused


def test_explain_counts_a_product_once_that_its_kernel_refuses_at_first(no_bias):
    linear, x = torch.nn.Linear(8, 11), torch.ones(3, 8)
    with xt.kernel_policy(rules=[{"match": {"op": "matmul"}, "use": no_bias.id}]), torch.no_grad():
        with xt.explain() as explanation:
            for _ in range(3):
                linear(x)
        assert no_bias.refused
    (row,) = (row for row in explanation.rows if row.operator == "aten::addmm")
    assert (row.count, row.resolved, row.status) == (3, no_bias.id, "honoured")


def rule(module, use="cpu.reference", **more):
    return {"match": {"op": "matmul", "module": module, **more}, "use": use}


def served():
    return {(decision.module, decision.chosen) for decision in xrt.decisions()}


@pytest.fixture(autouse=True)
def _no_decisions():
    xrt.clear_decisions()


def test_the_path_begins_at_the_largest_root_that_was_called():
    model, x = cases.Model(), torch.ones(2, 8)
    with xt.kernel_policy(rules=[rule("*")]):
        model.encoder(x)
        assert served() == {(f"layers_module.{n}.lin", "cpu.reference") for n in (0, 1)}
        xrt.clear_decisions()
        model(x)
        model.encoder(x)
        assert {path for path, _ in served()} == set(cases.SIZES)


def test_the_path_begins_at_the_root_that_the_policy_names_also_before_it_is_called():
    model, x = cases.Model(), torch.ones(2, 8)
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels={"rules": [rule("encoder.*")]}), root=model):
        model.encoder(x)
        assert {path for path, _ in served()} == set(list(cases.SIZES)[:2])
    outer = torch.nn.Sequential(model)
    outer(x)
    xrt.clear_decisions()
    with xt.kernel_policy(rules=[rule("encoder.*")], root=model):
        outer(x)
    assert {path for path, _ in served()} == set(list(cases.SIZES)[:2])


def test_filters_of_warnings_are_as_before_when_the_last_policy_by_module_ends():
    before = list(warnings.filters)
    with xt.kernel_policy({"kernels": {"rules": [{"match": {"module": "a"}, "use": "torch"}]}}):
        assert warnings.filters[0][0] == "ignore"
        assert len(warnings.filters) == len(before) + 1
        with xt.kernel_policy({"kernels": {"rules": [{"match": {"module": "b"}, "use": "torch"}]}}):
            assert len(warnings.filters) == len(before) + 1
    assert list(warnings.filters) == before


def test_a_root_that_is_no_module_and_one_without_a_policy_are_refused():
    with pytest.raises(TypeError, match="root"):
        xt.kernel_policy(matmul="cpu.blas", root="model")
    with pytest.raises(TypeError, match="root"):
        xt.explain(root="model")
    with pytest.raises(PolicyError, match="root"):
        xt.kernel_policy(root=torch.nn.Linear(1, 1))


def raising(model, x):
    model(x)
    raise LookupError


def test_a_rule_that_matched_no_call_warns_refuses_under_strict_and_is_explained():
    model, x = cases.Model(), torch.ones(2, 8)
    text = r"kernels.rules\[0\] \(module: encodre\.\*\) matched no call"
    block = xt.kernel_policy(rules=[rule("encodre.*")])
    with pytest.warns(XpuRuntimeWarning, match=text) as warned, block:
        model(x)
    assert warned[0].filename == __file__
    strict = xrt.Policy(mode="strict", kernels={"rules": [rule("encodre.*")]})
    with pytest.raises(UnsupportedOperationError, match=text), xt.kernel_policy(strict):
        model(x)
    assert xt.get_kernel_policy() is None
    with pytest.warns(XpuRuntimeWarning), xt.kernel_policy(rules=[rule("encodre.*")]), xt.explain() as report:
        model(x)
    assert len(report.unmatched) == 1
    assert report.unmatched[0] in report.notes
    with pytest.raises(UnsupportedOperationError, match=text):
        report.require()
    report.require(no_unmatched=False)
    xt.set_kernel_policy(strict)
    model(x)
    with pytest.raises(UnsupportedOperationError, match=text):
        xt.clear_kernel_policy()
    assert xt.get_kernel_policy() is None
    with pytest.raises(LookupError), xt.kernel_policy(strict):  # the error of the block is the one that is raised
        raising(model, x)


def test_a_rule_is_not_reported_where_nothing_ran_that_it_is_for():
    model, x = cases.Model(), torch.ones(2, 8)
    strict = {"mode": "strict", "kernels": {"rules": [rule("*"), rule("head"), rule("nowhere", phase="backward")]}}
    with xt.kernel_policy(xrt.Policy.coerce(strict)), torch.no_grad():
        pass
    with xt.kernel_policy(xrt.Policy.coerce(strict)), torch.no_grad():
        model(x)


@cases.needs_addon
def test_threads_that_train_at_once_have_each_node_in_its_own_module():
    # Every thread numbers its nodes from the same number on, so that numbers alone do not tell them apart.
    models = [torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(n))) for n in (1, 2, 3)]
    root = torch.nn.ModuleList(models)
    losses, start = {}, threading.Barrier(3)
    with xt.kernel_policy(rules=[rule("1.*")], root=root), cases.Served() as seen:

        def forward(n):
            start.wait()
            losses[n] = models[n](torch.ones(2, 8, requires_grad=True)).sum()

        threads = [threading.Thread(target=forward, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n in range(3):
            del seen.seen[:]
            losses[n].backward()
            paths = [path for path, *_ in seen.seen]
            assert paths == [f"{n}.{layer}" for layer in reversed(range(n + 1)) for _ in range(2)]


@cases.needs_addon
def test_a_gradient_taken_inside_of_a_forward_belongs_to_the_module_it_is_of():
    class Energy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def forward(self, x):
            (force,) = torch.autograd.grad(self.inner(x).square().sum(), x, create_graph=True)
            return force

    model, x = Energy(), torch.ones(2, 8, requires_grad=True)
    with xt.kernel_policy(rules=[rule("inner")]), cases.Served() as seen:
        model(x).sum().backward()
    assert len(seen.seen) > 4
    assert {path for path, *_ in seen.seen} == {"inner"}
    assert module_paths.running() == ""


@cases.needs_addon
def test_retained_graphs_and_second_derivatives_belong_to_their_modules():
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)), torch.ones(2, 8)
    x.requires_grad_()
    with xt.kernel_policy(rules=[rule("2")]), cases.Served() as seen:
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first = len(seen.seen)
        for _ in range(2):
            grad.square().sum().backward(retain_graph=True)
    assert first < len(seen.seen)
    assert {path for path, *_ in seen.seen} == {"0", "2"}
    by_kernel = {(path, kernel) for path, _, kernel, _ in seen.seen}
    assert by_kernel == {("0", "torch.mm"), ("2", "cpu.reference")}


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


class TimesSetUp(Times):
    @staticmethod
    def forward(x, w):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


kept, kept_set_up = Times.apply, TimesSetUp.apply  # as programs keep it


@pytest.mark.parametrize("function", [kept, kept_set_up], ids=["forward", "setup_context"])
@pytest.mark.parametrize("recorded", [True, False])
def test_the_forward_of_a_function_has_the_phase_in_which_it_is_called(recorded, function):
    x, w = torch.ones(3, 8), torch.ones(8, 8, requires_grad=True)
    with xt.explain() as report:
        with torch.set_grad_enabled(recorded):
            out = function(x, w).sum()
            node = out.grad_fn and out.grad_fn.next_functions[0][0]
        if recorded:
            assert vars(node)["xpuruntime_thread"] == xrt._core.node_thread()
            out.backward()
    phases = sorted((row.phase, row.count) for row in report.rows if row.op == "matmul")
    assert phases == ([("backward", 1), ("backward", 1), ("train", 1)] if recorded else [("infer", 1)])
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
    assert "__getattribute__" not in vars(type(torch.autograd.Function))


@pytest.mark.parametrize(("phase", "times"), [("train", 1), ("infer", 0), ("backward", 2)])
def test_rules_of_a_phase_hold_inside_of_a_function_whoever_looks_on(phase, times):
    x, w = torch.ones(3, 8), torch.ones(8, 8, requires_grad=True)
    policy = {"rules": [{"match": {"op": "matmul", "phase": phase}, "use": "cpu.reference"}]}
    for watch in (contextlib.nullcontext, xt.explain):
        xrt.clear_decisions()
        with xt.kernel_policy(**policy), watch():
            kept(x, w).sum().backward()
        assert sum(decision.count for decision in xrt.decisions()) == times


def test_what_ran_is_said_when_the_log_of_decisions_is_full():
    def row():
        with xt.explain() as report:
            torch.ones(7, 9) @ torch.ones(9, 11)
        return next((r.resolved, r.observed, r.status) for r in report.rows if r.op == "matmul")

    with xt.kernel_policy(matmul="cpu.blas"):
        expected = row()
        xrt.clear_decisions()
        for m in range(1, 102):
            for n in range(1, 102):
                torch.mm(torch.ones(m, 1), torch.ones(1, n))
        assert len(xrt.decisions()) == 10_000
        assert row() == expected == ("cpu.blas", ("cpu.blas",), "honoured")
        assert xrt.decisions().dropped >= 201
        assert "more came when the log was full" in str(xrt.decisions()).replace("\n", " ")
    xrt.clear_decisions()
    assert xrt.decisions().dropped == 0


class Made(torch.nn.Module):
    """Layers with an activation that is registered, or made anew in each forward."""

    def __init__(self, layers: int, *, anew: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(layers)])
        self.act, self.anew = torch.nn.GELU(), anew

    def forward(self, x):
        for layer in self.layers:
            x = (torch.nn.GELU() if self.anew else self.act)(layer(x))
        return x


def calls_of_python(work) -> int:
    count = 0

    def note(_frame, event, _arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_modules_made_in_a_forward_cost_no_walk_of_the_model_each():
    rule = xrt.KernelPolicy(rules=[{"match": {"op": "matmul", "module": "layers.3"}, "use": "cpu.blas"}])
    count = {}
    for anew in (False, True):
        for layers in (20, 80):
            net, x = Made(layers, anew=anew), torch.ones(2, 4)
            with xt.kernel_policy(rule, root=net):
                net(x)
                count[anew, layers] = calls_of_python(lambda net=net, x=x: net(x))
    assert count[True, 80] < 5 * count[True, 20]  # by the layers, not by their square
    assert count[True, 80] < 6 * count[False, 80]  # making a module is most of it


class Loss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.criterion = torch.nn.Linear(4, 4), torch.nn.MSELoss()

    def forward(self, x):
        return self.criterion(self.head(x), x)


def test_a_loss_that_each_step_makes_names_no_other_module_anew(monkeypatch):
    rule = xrt.KernelPolicy(rules=[{"match": {"op": "matmul", "module": "layers.3"}, "use": "cpu.blas"}])
    nets, x, walked = [Made(20, anew=False) for _ in range(2)], torch.ones(2, 4), []
    for name in ("walk", "_all_in"):
        real = getattr(module_names, name)
        note = lambda root, *path, real=real: (walked.append(type(root)), real(root, *path))[1]  # noqa: E731
        monkeypatch.setattr(module_names, name, note)
    kept = []
    with xt.kernel_policy(rule, root=nets[0]):
        for step in range(200):
            for net in nets:
                net(x)
            if not step:
                walked.clear()
            kept = [*kept[-3:], Loss()]  # not always at the same address
            kept[-1](x)
    assert walked.count(Made) < 20
    assert len(module_names.known()) < 400


def test_a_new_outermost_module_is_named_in_what_holds_it():
    layers, x = torch.nn.ModuleList([torch.nn.Linear(4, 4)]), torch.ones(2, 4)
    with xt.kernel_policy(matmul="cpu.blas"), xt.explain(root=layers) as report:
        layers[0](x)
        layers.insert(0, torch.nn.Linear(4, 4))  # of which PyTorch tells no hook
        layers[0](x)
    assert [(row.module, row.count) for row in report.rows if row.op == "matmul"] == [("0", 2)]


def test_what_comes_into_a_model_unseen_is_named_there_though_losses_are_new():
    layers, x = torch.nn.ModuleList([torch.nn.Linear(4, 4)]), torch.ones(2, 4)
    with xt.kernel_policy(matmul="cpu.blas"), xt.explain(root=layers) as report:
        for _ in range(3):
            Loss()(x)
        layers.insert(0, torch.nn.Linear(4, 4))
        layers[0](x)
    assert "0" in {row.module for row in report.rows if row.op == "matmul"}


def test_a_module_that_is_registered_in_a_forward_has_its_path_at_once():
    class Lazy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = None

        def forward(self, x):
            torch.nn.GELU()(x)
            if self.inner is None:
                self.inner = torch.nn.Linear(4, 4)
            return self.inner(x)

    net = torch.nn.Sequential(Lazy(), Lazy())
    with xt.kernel_policy(matmul="cpu.blas"), xt.explain(root=net) as report:
        net(torch.ones(2, 4))
    assert {row.module for row in report.rows if row.op == "matmul"} == {"0.inner", "1.inner"}
