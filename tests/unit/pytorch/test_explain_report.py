# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `explain` hands back: shares, text and JSON, what it requires, and that the program itself is unchanged."""

from __future__ import annotations

import json

import pytest

import xpuruntime
from xpuruntime.errors import InputError, UnsupportedOperationError

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from explained_block import Block, of, step  # noqa: E402 - it needs PyTorch

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
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)


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
