# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``auto`` with ``best_performance`` among kernels of installed packages: who is measured, who runs, what is kept."""

from __future__ import annotations

import functools
import sys

import pytest

import xpuruntime as xrt
from xpuruntime.measuring.rounds import KernelTiming, replacing
from xpuruntime.ops import plugins, tuned_records

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

import torch_kernels as package  # noqa: E402 - it needs PyTorch

from xpuruntime.measuring.tuning_watch import watch_tuning  # noqa: E402
from xpuruntime.pytorch.adapters import gated_units  # noqa: E402
from xpuruntime.pytorch.dispatch import step_cost, tuning  # noqa: E402
from xpuruntime.pytorch.dispatch.context import CONTEXT  # noqa: E402
from xpuruntime.pytorch.providers import canary, operations, operators  # noqa: E402
from xpuruntime.pytorch.providers.operators import perform  # noqa: E402

F = torch.nn.functional
NORM, UNIT, ATTENTION = "foreign.rms_norm", "foreign.swiglu", "foreign.attention"
LOSS = "foreign.cross_entropy"


class ForeignUnit(package.ForeignNorm):
    id, op, environment = UNIT, "swiglu", ()

    def supports(self, call):
        return call.operands["gate"].dtype == "float32", "it computes float32"

    def forward(self, call, gate, up):
        return (F.silu(gate) * up,), ()

    def backward(self, call, saved, grads):
        gate, up = saved.inputs
        part = torch.sigmoid(gate)
        return grads[0] * up * part * (1 + gate * (1 - part)), grads[0] * gate * part


class ForeignAttention(ForeignUnit):
    id, op = ATTENTION, "attention"

    def supports(self, call):
        return "mask" not in call.operands, "it takes no mask"

    def _weights(self, call, q, k):
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if call.attributes["scale"] is None else call.attributes["scale"])
        if call.attributes["causal"]:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        return scores

    def forward(self, call, q, k, v):
        n = q.shape[1] // k.shape[1]
        scores = self._weights(call, q, k.repeat_interleave(n, 1))
        out = torch.empty_like(q).copy_(scores.softmax(-1) @ v.repeat_interleave(n, 1))
        return (out,), (scores.float().logsumexp(-1),)

    def backward(self, call, saved, grads):
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in saved.inputs)
            n = q.shape[1] // k.shape[1]
            out = self._weights(call, q, k.repeat_interleave(n, 1)).softmax(-1) @ v.repeat_interleave(n, 1)
            found = torch.autograd.grad(out, (q, k, v), grads[0])
        return [torch.empty_like(x).copy_(y) for x, y in zip(saved.inputs, found, strict=True)]


class ForeignLoss(ForeignUnit):
    id, op = LOSS, "cross_entropy"

    def supports(self, call):
        return call.attributes["reduction"] == "mean", "it computes a mean"

    def forward(self, call, logits, target):
        wide = logits.float() if call.attributes["upcast"] else logits
        return (F.nll_loss(wide.log_softmax(-1), target, ignore_index=call.attributes["ignore_index"]),), ()

    def backward(self, call, saved, grads):
        logits, target = saved.inputs
        seen = target != call.attributes["ignore_index"]
        off = logits.float().softmax(-1) - F.one_hot(target.clamp_min(0), logits.shape[-1])
        return (grads[0] * off * seen[:, None] / seen.sum()).to(logits.dtype), None


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch, nothing_is_tuned):
    """Return a folder on the path that has the package; its kernels are registered."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package.install(tmp_path)
    backend = plugins.KernelBackend("foreign", "cpu", "1")
    plugins.register(backend, package.ForeignNorm(), ForeignUnit(), ForeignAttention(), ForeignLoss())
    yield tmp_path
    package.forget()


@pytest.fixture
def measured(monkeypatch):
    """Run each candidate once, as measuring does; the last has the least time. Return the candidates of each choice."""
    asked = []
    monkeypatch.setattr(tuning, "route_cost", lambda *_: 0.0)

    def measure(candidates, device, eager, costs, rule, *_):
        for _, run in candidates:
            run()
        asked.append([name for name, _ in candidates])
        native, *others = asked[-1]
        found = [KernelTiming(native, "", 90.0)]
        found += [KernelTiming(name, "", 80.0 - n, (80 - n) / 90, 0.8, 0.9, "faster") for n, name in enumerate(others)]
        return replacing(found, rounds=7, seconds=rule.budget)

    monkeypatch.setattr(tuning, "_measure", measure)
    return asked


def fastest(**kernels):
    return xrt.KernelPolicy(**kernels, auto_strategy="best_performance")


def norm():
    x = torch.randn(4, 64, requires_grad=True)
    weight = torch.randn(64, requires_grad=True)
    out = F.rms_norm(x, (64,), weight, 1e-6)
    return out, *torch.autograd.grad(out.square().sum(), (x, weight))


def unit():
    gate, up = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    out = perform("swiglu", {"gate": gate, "up": up}, {})
    return out, *torch.autograd.grad(out.square().sum(), (gate, up))


def attention():
    q, k, v = (torch.randn(1, heads, 8, 16, requires_grad=True) for heads in (2, 1, 1))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v))


CASES = [(norm, "rms_norm", NORM), (unit, "swiglu", UNIT), (attention, "attention", ATTENTION)]


@pytest.mark.parametrize(("work", "op", "word"), CASES)
def test_the_fastest_of_an_installed_package_runs_forward_and_backward(work, op, word, measured):
    torch.manual_seed(0)
    expected = work()
    with xt.kernel_policy(fastest(**{op: "auto"})):
        torch.manual_seed(0)
        found = work()
        with xt.explain() as report:
            work()
    assert all(word in names and names[0].startswith("torch.") for names in measured)
    assert len(measured) == (2 if op == "rms_norm" else 1)  # its gradient is an operator of its own
    rows = {row.phase: (row.resolved, row.source) for row in report.rows if row.op == op}
    assert rows == dict.fromkeys(("train", "backward"), (word, f"kernels.{op}"))
    seen = [
        [name for name, _, _ in row.measured]
        for row in report.rows
        if (row.op, row.phase) == (op, "train") and op != "attention"
    ]
    assert op == "attention" or seen
    assert all(names[0] == word and sorted(names) == sorted(measured[0]) for names in seen), seen
    for result, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("word", ["torch", "auto"])
def test_logits_go_to_the_kernel_that_the_policy_gives_their_loss(word, dtype, measured, monkeypatch):
    x, weight = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((6, 8), (20, 8)))
    target = torch.tensor([1, 19, -100, 0, 7, 7])

    def step():
        loss = perform("linear_cross_entropy", {"x": x, "weight": weight, "target": target}, {})
        return loss, *torch.autograd.grad(loss, (x, weight))

    expected = step()
    served = []
    policy = fastest(linear_cross_entropy=word, cross_entropy="auto", matmul="torch")
    with monkeypatch.context() as watched, xt.kernel_policy(policy):
        run = ForeignLoss.forward
        watched.setattr(ForeignLoss, "forward", lambda *a: served.append(tuning.measuring()) or run(*a))
        measured_alone = step()
        with xt.explain() as report:
            found = step()
    for result, again, wanted in zip(found, measured_alone, expected, strict=True):
        torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(again, wanted)
    assert measured[0] == ["torch.cross_entropy", LOSS]
    rows = {row.op: row.resolved for row in report.rows if row.phase == "train" and row.op}
    if word == "torch":
        assert rows["cross_entropy"] == LOSS
        assert served[-2:] == [False, False]
    else:  # PyTorch's logits were measured with that loss
        assert [names[:2] for names in measured[1:]] == [["torch.linear_cross_entropy", "chunked.linear_cross_entropy"]]
        assert served.count(True) >= 2


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_kernels_that_hold_less_are_chosen_where_memory_is_the_objective(objective, monkeypatch):
    """The memory is what PyTorch's allocators tell: logits of all rows, or those of a part."""

    def measure(candidates, device, eager, costs, rule, *_):
        native, *others = (name for name, _ in candidates)
        found = [KernelTiming(native, "", 90.0)]
        found += [KernelTiming(name, "", 180.0, 2.0, 1.9, 2.1, "slower") for name in others]
        return replacing(found, rounds=7, seconds=rule.budget)

    monkeypatch.setattr(tuning, "_measure", measure)
    rows, columns, classes = 1024, 16, 2000
    x, weight = torch.randn(rows, columns, requires_grad=True), torch.randn(classes, columns, requires_grad=True)
    operands = {"x": x, "weight": weight, "target": torch.arange(rows)}
    policy = xrt.KernelPolicy(
        linear_cross_entropy="auto", matmul="torch", auto_strategy="best_performance", tuning={"objective": objective}
    )
    with xt.kernel_policy(policy):
        perform("linear_cross_entropy", operands, {}).backward()
        with xt.explain() as report:
            perform("linear_cross_entropy", operands, {}).backward()
    row = next(row for row in report.rows if row.op == "linear_cross_entropy")
    (found,) = CONTEXT.times.values()
    peaks = {timing.kernel: timing.peak_bytes for timing in found.candidates}
    if objective == "time":
        assert found.chosen.kernel == "torch.linear_cross_entropy"
        assert set(peaks.values()) == {None}
    else:
        assert found.chosen.kernel == min(peaks, key=peaks.get) != "torch.linear_cross_entropy"
        assert peaks[found.chosen.kernel] < 4 * rows * classes < peaks["torch.linear_cross_entropy"]
        assert {name: peak for name, _, peak in row.measured} == peaks


@pytest.mark.parametrize(("work", "op", "word"), CASES)
def test_a_package_that_is_not_installed_is_neither_measured_nor_imported(work, op, word, measured, site):
    package.install(site, version="9.0")  # which does not fit
    with xt.kernel_policy(fastest(**{op: "auto"})):
        work()
    assert all(word not in names for names in measured)
    assert "foreign_norms" not in sys.modules


def test_a_kernel_that_raises_is_left_out_with_a_warning(monkeypatch):
    computed = package.ForeignNorm.forward

    def forward(kernel, call, x, weight):
        if len(x) == 4:  # a size that no comparison with float64 has
            raise RuntimeError("no tile fits")
        return computed(kernel, call, x, weight)

    monkeypatch.setattr(package.ForeignNorm, "forward", forward)
    monkeypatch.setattr(tuning, "route_cost", lambda *_: 0.0)
    x, weight = torch.randn(4, 80), torch.randn(80)
    expected = F.rms_norm(x, (80,), weight, 1e-6)
    with xt.kernel_policy(fastest(rms_norm="auto")), pytest.warns(xrt.XpuRuntimeWarning, match="no tile fits"):
        torch.testing.assert_close(F.rms_norm(x, (80,), weight, 1e-6), expected)


def test_a_comparison_is_bounded_where_no_policy_names_the_kernel(measured, monkeypatch):
    seen = []
    with xt.kernel_policy(fastest(swiglu="auto")):
        with watch_tuning(progress=seen.append, cancel=lambda: any("comparing" in one.operation for one in seen)):
            unit()
        assert measured == []
        assert any(one.operation == f"comparing {UNIT} with float64" for one in seen)
        monkeypatch.setattr(canary, "_MOST_SECONDS", 0.0)
        with pytest.warns(xrt.XpuRuntimeWarning, match=r"was not through after 0 s. Fix: name it in the policy"):
            perform("swiglu", {"gate": torch.randn(3, 8), "up": torch.randn(3, 8)}, {})
        assert measured == []
    monkeypatch.setattr(canary, "_verdicts", {})  # as another process begins
    with xt.kernel_policy(fastest(swiglu="auto")), monkeypatch.context() as patch:
        patch.setattr(canary, "_Ends", lambda *_: pytest.fail("it was compared once more"))
        perform("swiglu", {"gate": torch.randn(5, 8), "up": torch.randn(5, 8)}, {})
        assert measured == []
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels={"swiglu": UNIT})), xt.explain() as report:
        perform("swiglu", {"gate": torch.randn(3, 8), "up": torch.randn(3, 8)}, {})
    assert {row.resolved for row in report.rows if row.op == "swiglu"} == {UNIT}


@pytest.mark.parametrize(("work", "op", "word"), CASES[1:])
def test_a_call_whose_comparison_was_ended_is_measured_later(work, op, word, measured, monkeypatch):
    monkeypatch.setattr(canary, "_verdicts", {})
    monkeypatch.setattr("xpuruntime.pytorch.attention.selection.others_of_pytorch", lambda call: [])
    monkeypatch.setattr("xpuruntime.pytorch.attention.selection._xpuruntime_kernels_for", lambda *_: [])
    with xt.kernel_policy(fastest(**{op: "auto"})):
        with watch_tuning(cancel=lambda: True):
            work()
        assert measured == []
        work()
    assert [names[-1] for names in measured] == [word]


def test_comparisons_and_measurements_that_take_long_are_logged(measured, monkeypatch, caplog):
    monkeypatch.setattr(canary, "_verdicts", {})
    caplog.set_level("INFO", "xpuruntime.tuning")
    with xt.kernel_policy(fastest(swiglu="auto")):
        monkeypatch.setattr(tuning, "_LOGGED", 1e9)
        unit()
        assert caplog.records == []
        monkeypatch.setattr(tuning, "_LOGGED", 0.0)
        perform("swiglu", {"gate": torch.randn(3, 8), "up": torch.randn(3, 8)}, {})
    events = [(one.name, one.levelname, one.getMessage().split(" took ")[0]) for one in caplog.records]
    assert events[0] == ("xpuruntime.tuning", "INFO", f"comparing {UNIT} with float64")
    assert events[-1][:2] == ("xpuruntime.tuning", "INFO")
    assert events[-1][2].startswith("measuring swiglu: ")


def test_a_kernel_may_keep_out(measured, monkeypatch):
    monkeypatch.setattr(package.ForeignNorm, "automatic", False)
    with xt.kernel_policy(fastest(rms_norm="auto")):
        norm()
    assert all(NORM not in names for names in measured)


def test_what_cannot_be_captured_is_no_candidate_of_a_graph(measured, monkeypatch):
    monkeypatch.setattr(package.ForeignNorm, "capturable", "it waits for the device")
    with xt.kernel_policy(fastest(rms_norm="auto")), tuning.replayed():
        norm()
    assert all(NORM not in names for names in measured)


def test_the_first_that_works_is_still_pytorchs(measured):
    with xt.kernel_policy(xrt.KernelPolicy(swiglu="auto", rms_norm="auto")), xt.explain() as report:
        unit()
        norm()
    assert not measured
    assert not {row.resolved for row in report.rows if row.op} & {UNIT, NORM}


def test_compiled_code_is_left_to_the_compiler(measured):
    compiled = torch.compile(lambda gate, up: perform("swiglu", {"gate": gate, "up": up}, {}), backend="aot_eager")
    with xt.kernel_policy(fastest(swiglu="auto")):
        unit()
        with xt.explain() as report:
            compiled(torch.randn(4, 8), torch.randn(4, 8))
    assert len(measured) == 1
    assert UNIT not in {row.resolved for row in report.rows}


@pytest.mark.parametrize("change", ["version", "variable", "nothing"])
def test_what_was_measured_holds_for_the_packages_and_their_variables(change, measured, site, monkeypatch):
    def process():
        monkeypatch.setattr(CONTEXT, "times", {})
        monkeypatch.setattr(tuned_records, "_open_store", functools.cache(tuned_records._open_store.__wrapped__))
        tuning._validators.cache_clear()
        with xt.kernel_policy(fastest(rms_norm="auto")):
            norm()

    process()
    before = len(measured)
    if change == "version":
        package.install(site, version="2.0")
    if change == "variable":
        monkeypatch.setenv("FOREIGN_TILE", "64")
    process()
    assert len(measured) == before * (1 if change == "nothing" else 2)


def test_a_call_of_a_known_kind_computes_nothing_but_its_kernel(monkeypatch):
    """The form of the outputs was computed on each call by PyTorch's own operations: milliseconds of the host."""
    x, target = torch.randn(6, 20, requires_grad=True), torch.arange(6)
    row = operations.OPERATIONS["cross_entropy"]
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels={"cross_entropy": LOSS})):
        F.cross_entropy(x, target).backward()
        forms = {
            **operations.OPERATIONS,
            "cross_entropy": row._replace(reference=lambda *_, **__: pytest.fail("again")),
        }
        monkeypatch.setattr(operators, "OPERATIONS", forms)
        F.cross_entropy(x, target).backward()


class Unit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("slow", [True, False])
def test_code_of_a_model_runs_as_without_a_policy_where_a_kernel_costs_the_host_more(slow, monkeypatch):
    """A clock of its own says what the host needs: of PyTorch always the same, of the kernel more or less."""
    asked, clock = [], [0.0]
    foreign = ForeignUnit.forward

    def forward(self, call, gate, up):
        clock[0] += 3e-3 if slow else 1e-4
        return foreign(self, call, gate, up)

    def by_torch(gate, up):
        clock[0] += 1e-3
        return F.silu(gate) * up

    def time_calls(run, calls, samples):
        seconds = []
        for _ in range(samples):
            began = clock[0]
            for _ in range(calls):
                run()
            seconds.append(clock[0] - began + 1e-6 * calls)
        return seconds

    monkeypatch.setattr(step_cost, "time_calls", time_calls)
    monkeypatch.setattr(ForeignUnit, "forward", forward)
    monkeypatch.setitem(operations.OPERATIONS, "swiglu", operations.OPERATIONS["swiglu"]._replace(reference=by_torch))
    perform = gated_units.perform
    monkeypatch.setattr(gated_units, "perform", lambda *a, **k: asked.append(1) or perform(*a, **k))
    torch.manual_seed(0)
    model, x = Unit(), torch.randn(4, 16, requires_grad=True)
    with xt.kernel_policy(fastest(swiglu="auto", matmul="torch")):
        for _ in range(3):
            out = model(x)
        chosen = {route.kernel for route in CONTEXT.process_policy.routes.values() if route.op == "swiglu"}
        assert chosen == {"torch.swiglu" if slow else UNIT}
        assert len(asked) == (1 if slow else 3)  # a call that is left to the model asks for nothing
        with xt.explain() as report:
            model(x)
        assert [row.resolved for row in report.rows if row.op == "swiglu"] == [*chosen]
        CONTEXT.forget_tuned_routes()
        asked.clear()
        model(x)
        assert asked == [1]
    torch.testing.assert_close(out, model(x))
