# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `explain` hands back: shares, text and JSON, what it requires, and that the program itself is unchanged."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import xpuruntime
from xpuruntime.errors import InputError, UnsupportedOperationError

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from explained_block import Block, of, step  # noqa: E402 - it needs PyTorch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402 - it needs PyTorch
from torch.nn import functional as F  # noqa: E402, N812 - it needs PyTorch
from torch.utils import _pytree  # noqa: E402 - it needs PyTorch

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards")]


def test_shares_sum_to_one_and_times_are_those_of_the_profiler():
    model, x = Block(), torch.randn(4, 8)
    with xt.kernel_policy(matmul="cpu.reference"), xt.explain() as report:
        step(model, x)
    shares = report.coverage
    parts = (shares.honoured, shares.substituted, shares.default, shares.bypassed, shares.opaque, shares.other)
    assert sum(parts) == pytest.approx(1)
    assert shares.rule == shares.honoured > 0
    assert shares.default > 0
    assert shares.other > 0
    assert report.time_kind == "cpu"
    assert report.total_us == pytest.approx(sum(row.time_us for row in report.rows))
    by_rule = sum(row.time_us for row in report.rows if row.status == "honoured")
    assert shares.honoured == pytest.approx(by_rule / report.total_us)


def test_require_names_what_is_against_it():
    model, x = Block(), torch.randn(4, 8)
    with xt.kernel_policy(matmul="cpu.reference"), xt.explain() as report:
        step(model, x)
    assert report.require(coverage=report.coverage.covered) is report
    with pytest.raises(UnsupportedOperationError, match=r"100\.0% is required[\s\S]*default: aten::native_layer_norm"):
        report.require(coverage=1.0)
    with pytest.raises(InputError, match="share from 0 to 1"):
        report.require(coverage=90)
    with pytest.raises(InputError, match=r"coverage is .0\.9."):
        report.require(coverage="0.9")


def test_text_dict_and_json_say_the_same(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    model, x = Block(), torch.randn(4, 8)
    with xt.kernel_policy(matmul="cpu.reference"), xt.explain() as report:
        step(model, x)
    plain = report.to_dict()
    assert json.loads(report.to_json()) == json.loads(json.dumps(plain))
    assert plain["schema"] == "xpuruntime.explanation/1"
    assert plain["policy"]["kernels"]["matmul"] == "cpu.reference"
    assert len(plain["rows"]) == len(report.rows)
    assert plain["coverage"]["covered"] == pytest.approx(report.coverage.covered)
    text = str(report)
    assert text.splitlines()[0] == "policy honoured"
    assert "under a rule" in text.splitlines()[1]
    assert "cpu.reference" in text


def test_rows_of_a_policy_come_first_and_defaults_are_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with xt.kernel_policy(layer_norm="cpu.vectorised"), xt.explain() as report:
        step(Block(), torch.randn(4, 8))
    text, page = str(report), report.to_html()
    assert {row.status for row in report.rows if row.op == "matmul"} == {"default"}
    assert "native_layer_norm" in text
    assert not [line for line in text.splitlines() if line.startswith("mm ") or line.strip() == "in"]
    assert "kinds of calls by default, which no rule names" in text
    assert page.index("xrt-headline") < page.index("native_layer_norm") < page.index("<td>mm ")
    with xt.explain() as report:
        step(Block(), torch.randn(4, 8))
    assert str(report).splitlines()[0] == "no policy"
    assert [line for line in str(report).splitlines() if line.startswith("mm ")]


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_the_table_keeps_to_the_width(monkeypatch, columns):
    model = torch.nn.Sequential(Block(), Block())
    with xt.kernel_policy(matmul="cpu.reference"), xt.explain() as report:
        step(model, torch.randn(4, 8))
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= columns
    # The same layer of two blocks is one line.
    assert any("(2 modules)" in line for line in lines) or columns < 200


def test_nothing_is_told_before_the_end():
    with xt.explain() as report:
        with pytest.raises(InputError, match="after its with block"):
            _ = report.rows
        assert repr(report) == "Explanation(nothing yet)"
    assert "0 rows" in repr(report)
    assert report.coverage.covered == 0


def test_an_error_in_the_block_restores_and_is_the_one_heard():
    a = torch.randn(3, 3)

    def work():
        torch.mm(a, a)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), xt.explain() as report:
        work()
    assert report.partial
    assert [row.count for row in of(report, "matmul")] == [1]


def test_a_call_that_fails_is_not_counted():
    with xt.explain() as report, pytest.raises(RuntimeError):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert sum(row.count for row in of(report, "matmul") if row.status != "default" or row.time_us == 0) == 0


def test_a_second_profiler_is_refused():
    running = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
    with running, pytest.raises(InputError, match="one profiler runs at a time"):
        xt.explain().__enter__()
    with xt.explain(), pytest.raises(InputError, match="one profiler runs at a time"):
        xt.explain().__enter__()


def test_results_and_gradients_do_not_change():
    model, x = Block(), torch.randn(4, 8)
    step(model, x)
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with xt.explain():
        step(model, x)
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, wanted)


def test_attention_of_pytorch_has_a_row_of_its_forward_and_one_of_its_gradient():
    q, k, v = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3))
    with xt.kernel_policy(attention="torch.flash"), xt.explain() as report:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    rows = [row for row in report.rows if row.op == "attention"]
    assert sorted((row.phase, row.count, row.resolved) for row in rows) == [
        ("backward", 1, "torch.flash"), ("train", 1, "torch.flash"),
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["prefer", "strict"])
def test_switches_of_the_policy_are_read_back(mode: str) -> None:
    policy = xpuruntime.Policy(
        mode=mode, execution=xpuruntime.ExecutionPolicy(determinism="run_to_run", precision="fp32")
    )
    with xt.kernel_policy(policy), xt.explain() as found:
        torch.ones(2, 3) @ torch.ones(3, 2)
    assert [(setting.key, setting.requested, setting.status) for setting in found.settings] == [
        ("execution.precision", "fp32", "honoured"),
        ("execution.determinism", "run_to_run", "honoured"),
    ]
    assert "execution.determinism run_to_run: honoured (deterministic_algorithms" in str(found)
    found.require(no_bypass=False)


def test_a_switch_that_the_program_changes_is_a_deviation() -> None:
    policy = xpuruntime.Policy(execution=xpuruntime.ExecutionPolicy(determinism="run_to_run"))
    try:
        with xt.kernel_policy(policy), xt.explain() as found:
            torch.use_deterministic_algorithms(False)
    finally:
        torch.use_deterministic_algorithms(False)
    (setting,) = found.settings
    assert (setting.status, "deterministic_algorithms False" in setting.observed) == ("substituted", True)
    with pytest.raises(UnsupportedOperationError, match=r"execution\.determinism run_to_run: substituted"):
        found.require()


#: Operators that compute a product, and those that a policy can speak of besides.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


_KNOWN = (*_PRODUCTS, "aten::dot", "aten::mv", "aten::convolution", "aten::native_layer_norm")


def _cases() -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    weights = dict(net.named_parameters())
    x, w, pile = torch.randn(5, 8), torch.randn(8, 8), torch.randn(4, 5, 8)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(net, p, (x,)).square().sum()

    def many(p: Any, x: torch.Tensor) -> Any:
        return functional_call(net, p, (x,))

    return {
        "functional_call": lambda: functional_call(net, weights, (x,)),
        "grad": lambda: grad(loss)(weights, x),
        "gradients of each sample": lambda: vmap(grad(loss), (None, 0))(weights, x),
        "grad of grad": lambda: grad(lambda x: grad(lambda y: net(y).square().sum())(x).sum())(x),
        "jvp": lambda: jvp(net, (x,), (torch.ones_like(x),)),
        "vjp": lambda: vjp(net, x)[1](torch.ones(5, 8)),
        "jacrev": lambda: jacrev(net)(x[0]),
        "jacfwd": lambda: jacfwd(net)(x[0]),
        "hessian": lambda: hessian(lambda x: net(x).sum())(x[0]),
        "vmap": lambda: vmap(lambda a: a @ w)(pile),
        "vmap of both": lambda: vmap(torch.mm)(pile, torch.randn(4, 8, 5)),
        "vmap of vmap": lambda: vmap(vmap(lambda v: v @ w))(pile),
        "vmap of bmm": lambda: vmap(torch.bmm)(torch.randn(2, 4, 5, 8), torch.randn(2, 4, 8, 5)),
        "vmap of addmm": lambda: vmap(lambda a: torch.addmm(torch.ones(8), a, w))(pile),
        "vmap of mv": lambda: vmap(lambda v: w @ v)(x),
        "vmap of dot": lambda: vmap(torch.dot)(x, x),
        "vmap in chunks": lambda: vmap(lambda a: a @ w, chunk_size=2)(pile),
        "an ensemble": lambda: vmap(many, (0, None))({k: torch.stack([v, v]) for k, v in weights.items()}, x),
        "functionalize": lambda: torch.func.functionalize(net)(x),
        "vmap of a convolution": lambda: vmap(lambda q: F.conv2d(q, torch.ones(3, 2, 3, 3)))(torch.ones(3, 1, 2, 8, 8)),
        "grad of a norm": lambda: grad(lambda q: F.layer_norm(q, (8,)).square().sum())(x),
        "vmap of a norm": lambda: vmap(lambda q: F.layer_norm(q, (8,)))(pile),
    }


_CASES = _cases()


def _ran(call: Callable[[], Any]) -> Counter[str]:
    """Return the products that PyTorch's own kernels compute: the innermost operators, as its profiler has them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        call()
    events = [event for event in prof.events() if event.name in _PRODUCTS]
    return Counter(event.name for event in events if not _leads(event))


def _leads(event: Any) -> bool:
    return any(child.name in _PRODUCTS or _leads(child) for child in event.cpu_children)


@pytest.mark.parametrize("case", _CASES)
def test_each_product_that_ran_is_a_row(case: str) -> None:
    call = _CASES[case]
    torch.manual_seed(1)
    want = _pytree.tree_leaves(call())
    ran = _ran(call)
    with xt.explain() as plain:
        call()
    with xt.kernel_policy(matmul="cpu.blas"), xt.explain() as report:
        torch.manual_seed(1)
        got = _pytree.tree_leaves(call())
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for explained, state in ((plain, ("torch.mm", "default")), (report, ("cpu.blas", "honoured"))):
        rows = [row for row in explained.rows if row.op == "matmul"]
        counts: Counter[str] = Counter()
        for row in rows:
            counts[row.operator] += row.count
        assert counts == ran
        assert {(row.resolved, row.status) for row in rows} <= {state}
        assert not [row for row in explained.rows if row.status == "other" and row.operator in _KNOWN]
        assert not re.search(r"aten::(mm|addmm|bmm|dot)\b", str(explained).partition("no policy can affect")[2])
