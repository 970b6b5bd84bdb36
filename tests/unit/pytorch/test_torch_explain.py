# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`explain`: which kernels ran, who asked for them, how often, and in which share of the time."""

from __future__ import annotations

import threading
import warnings

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeWarning

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from explained_block import Block, of, step  # noqa: E402 - it needs PyTorch

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards")]


def test_a_step_under_a_policy_is_told_by_operator_module_phase_and_shape():
    model, x = Block(), torch.randn(4, 8)
    with xt.kernel_policy(matmul="cpu.reference"), xt.explain() as report:
        step(model, x)
    rows = of(report, "matmul")
    assert {(row.module, row.phase) for row in rows} == {
        ("up", "train"), ("down", "train"), ("up", "backward"), ("down", "backward"),
    }  # fmt: skip
    # Forward of both, and two gradients of `down`, one of `up`: the input needs none.
    assert sum(row.count for row in rows) == 5
    for row in rows:
        assert (row.requested, row.source) == (("cpu.reference",), "kernels.matmul")
        assert (row.resolved, row.observed) == ("cpu.reference", ("cpu.reference",))
        assert (row.status, row.device, row.dtypes) == ("honoured", "cpu", ("fp32",))
        assert row.time_us > 0
    forward = of(report, "matmul", module="up", phase="train")
    assert [row.shapes for row in forward] == [((4, 8), (8, 16))]
    norm = of(report, "layer_norm", phase="train")
    assert [(row.module, row.status, row.resolved) for row in norm] == [("norm", "default", "torch.layer_norm")]


def test_without_a_policy_everything_is_default():
    model, x = Block(), torch.randn(4, 8)
    with xt.explain() as report:
        step(model, x)
    assert report.policy is None
    assert {row.status for row in report.rows} == {"default", "other"}
    mm = of(report, "matmul", module="up", phase="train")
    assert [(row.operator, row.requested, row.source, row.resolved, row.observed[0]) for row in mm] == [
        ("aten::mm", (), "default", "torch.mm", "aten::mm")
    ]


def test_calls_of_one_kind_are_counted_in_one_row():
    a = torch.randn(3, 3)
    with xt.explain() as report:
        for _ in range(7):
            torch.mm(a, a)
        torch.mm(a[:2], a)
    assert sorted((row.shapes, row.count) for row in of(report, "matmul")) == [
        (((2, 3), (3, 3)), 1),
        (((3, 3), (3, 3)), 7),
    ]


def test_what_cannot_serve_is_a_substitution_with_its_reason():
    a = torch.randn(4, 4)
    with (
        warnings.catch_warnings(),
        xt.kernel_policy(matmul="cublas.cublasLt"),
        xt.explain() as report,
    ):
        warnings.simplefilter("ignore")
        torch.mm(a, a)
    (row,) = of(report, "matmul")
    assert (row.status, row.resolved, row.requested) == ("substituted", "torch.mm", ("cublas.cublasLt",))
    assert "cuda" in row.reason or "not in this build" in row.reason
    assert report.coverage.substituted == pytest.approx(report.coverage.rule)
    with pytest.raises(UnsupportedOperationError, match=r"another kernel than was asked for[\s\S]*aten::mm \[4, 4\]"):
        report.require()


def test_a_recurrent_layer_bypasses_a_policy_for_products():
    lstm, x = torch.nn.LSTM(4, 4), torch.randn(3, 2, 4)
    with (
        torch.no_grad(),
        pytest.warns(XpuRuntimeWarning, match="recurrent layer"),
        xt.kernel_policy(matmul="cpu.reference"),
        xt.explain() as report,
    ):
        lstm(x)
    rows = [row for row in report.rows if row.status == "bypassed"]
    assert rows
    assert {(row.op, row.source) for row in rows} == {("matmul", "kernels.matmul")}
    assert any("recurrent" in row.reason or "no override" in row.reason for row in rows)
    assert report.coverage.bypassed > 0
    with pytest.raises(UnsupportedOperationError, match="bypassed the policy"):
        report.require()
    # The same layer escapes nobody where no policy speaks of products.
    with torch.no_grad(), xt.explain() as free:
        lstm(x)
    assert free.coverage.bypassed == 0
    with pytest.raises(UnsupportedOperationError, match="no policy was active in the block"):
        free.require()


def test_the_fast_path_of_attention_is_seen_and_not_changed():
    attention, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 4, 8)
    with torch.no_grad(), xt.explain() as report:
        attention(x, x, x)
    rows = of(report, "attention")
    assert [(row.operator, row.status, row.count) for row in rows] == [
        ("aten::_native_multi_head_attention", "default", 1)
    ]
    # The products inside pass the overrides, one by one.
    assert of(report, "matmul")


def test_a_convolution_and_its_gradient_have_a_row_each():
    conv, x = torch.nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    with xt.kernel_policy(conv="cpu.reference"), xt.explain() as report:
        step(conv, x)
    rows = [(row.operator, row.phase, row.requested, row.resolved, row.status) for row in of(report, "conv")]
    assert sorted(rows) == [
        ("aten::convolution", "train", ("cpu.reference",), "cpu.reference", "honoured"),
        ("aten::convolution_backward", "backward", ("cpu.reference",), "cpu.reference", "honoured"),
    ]
    assert report.coverage.bypassed == 0


def test_operations_that_are_called_by_name():
    from xpuruntime.pytorch import ops

    y = torch.randn(4, 16, requires_grad=True)
    with xt.explain() as report:
        ops.fused_layernorm(y, [16]).square().sum().backward()
    rows = of(report, "layer_norm")
    assert {row.phase for row in rows} == {"train", "backward"}
    assert all(row.operator.startswith("xpuruntime::") for row in rows), rows


def test_matrix_times_vector_bypasses_a_rule_only_where_it_is_meant():
    a, v = torch.randn(4, 4), torch.randn(4)
    for other in ({"dtype": "fp16"}, {"m": ">=5"}, {"n": 4}):
        rules = [{"match": {"op": "matmul", **other}, "use": "cpu.reference"}]
        with xt.kernel_policy(rules=rules), xt.explain() as report:
            torch.mv(a, v)
        assert [row.status for row in of(report, "matmul")] == ["default"]
    rules = [{"match": {"op": "matmul", "m": ">=2"}, "use": "cpu.reference"}]
    with xt.kernel_policy(rules=rules), xt.explain() as report:
        torch.mv(a, v)
    (row,) = of(report, "matmul")
    assert row.status == "bypassed"
    assert "is not known" not in row.reason


def test_products_inside_unfused_attention_belong_to_it():
    q = torch.randn(1, 2, 8, 4)
    mask = torch.zeros(8, 8, requires_grad=True)  # PyTorch has no fused kernel for it
    with xt.explain() as report:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    (row,) = of(report, "attention")
    assert row.shapes[0] == (1, 2, 8, 4)
    assert row.count == 1
    assert of(report, "matmul") == []
    assert any("bmm" in name or "softmax" in name for name in row.observed)


def test_threads_of_the_program_are_watched():
    model, x = Block(), torch.randn(4, 8)
    may_begin = threading.Event()

    def work() -> None:
        may_begin.wait()
        step(model, x)

    early = threading.Thread(target=work)  # begun before the block
    early.start()
    with xt.kernel_policy(matmul="cpu.reference"), xt.explain() as report:
        may_begin.set()
        late = threading.Thread(target=work)
        late.start()
        early.join()
        late.join()
    rows = of(report, "matmul")
    assert sum(row.count for row in rows) == 2 * 5
    assert {(row.module, row.phase) for row in rows} == {
        ("up", "train"), ("down", "train"), ("up", "backward"), ("down", "backward"),
    }  # fmt: skip
    for row in rows:
        assert (row.resolved, row.status, row.reason) == ("cpu.reference", "honoured", "")
        assert row.time_us > 0


def test_compiling_inside_the_block_counts_no_traced_operator():
    torch._dynamo.reset()
    compiled = torch.compile(torch.nn.Linear(8, 3, bias=False), backend="aot_eager")
    with torch.no_grad(), xt.explain() as report:
        compiled(torch.randn(4, 8))
    assert sum(row.count for row in of(report, "matmul")) == 1
    assert any(row.operator == "torch.compile, compiling" for row in report.rows)


def test_a_policy_that_changes_inside_the_block_is_told_by_row():
    a = torch.randn(3, 3)
    with xt.explain() as report:
        with xt.kernel_policy(matmul="cpu.reference"):
            torch.mm(a, a)
        torch.mm(a, a)
    assert sorted((row.status, row.resolved) for row in of(report, "matmul")) == [
        ("default", "torch.mm"),
        ("honoured", "cpu.reference"),
    ]


def test_decisions_that_are_cleared_are_still_told():
    a = torch.randn(3, 3)
    with xt.kernel_policy(matmul="cpu"):
        torch.mm(a, a)
        with xt.explain() as report:
            xrt.clear_decisions()
            torch.mm(a, a)
    (row,) = of(report, "matmul")
    # A family: which of its kernels serves is the core's decision.
    assert row.requested == ("cpu",)
    assert row.resolved in ("cpu.blas", "cpu.reference")
    assert row.observed == (row.resolved,)


@pytest.mark.parametrize(
    "match",
    [
        {"op": "matmul", "node": "cell"},
        {"op": "matmul", "module": "cell"},
        {"op": "matmul", "device": "cpu"},
        {"op": "matmul", "m": "<=16"},
        {"module": "cell", "phase": ["train", "infer"]},
    ],
)
def test_a_bypassed_call_counts_as_requested_whatever_fact_the_rule_states(match):
    """A call that no override serves, under a rule that states a fact the profiler or the recorder has to find."""
    model = torch.nn.Sequential()
    model.add_module("cell", torch.nn.LSTM(4, 4))
    with (
        warnings.catch_warnings(),
        torch.no_grad(),
        xt.kernel_policy(rules=[{"match": match, "use": "cpu.reference"}], root=model),
    ):
        warnings.simplefilter("ignore", XpuRuntimeWarning)
        with xt.explain() as report:
            model(torch.randn(3, 2, 4))
    rows = [row for row in report.rows if row.op == "matmul"]
    assert {row.status for row in rows} == {"bypassed"}, rows
    assert {(row.requested, row.source) for row in rows} == {(("cpu.reference",), "kernels.rules[0]")}
