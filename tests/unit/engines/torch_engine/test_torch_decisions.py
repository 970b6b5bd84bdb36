# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Decisions about kernels in reports of sessions on PyTorch: what served, what was refused, measured, and counted."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import xpuruntime as xrt
from xpuruntime.evidence import KernelDecision, Report

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
attention = torch.nn.functional.scaled_dot_product_attention


class Block(torch.nn.Module):
    """Two products, a norm and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 16)

    def forward(self, x: Any) -> Any:
        h = self.down(self.norm(self.up(x))).view(1, -1, 2, 8).transpose(1, 2)
        return attention(h, h, h)


class Of(torch.nn.Module):
    """What a function computes."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def session(model: Any, x: Any, kernels: Any, *, compiled: bool = False, **policy: Any) -> xrt.InferenceSession:
    execution: dict[str, Any] = {"engine": "torch", "device": "cpu"}
    if compiled:
        execution["provider_options"] = {"torch": {"mode": "compile"}}
    given = {"execution": execution, "kernels": kernels, **policy}
    return xrt.InferenceSession(model.eval(), policy=given, example_inputs=(x,))


def explain(opened: xrt.InferenceSession, x: Any, runs: int = 1) -> Report:
    return opened.explain({opened.inputs[0].name: x}, runs=runs)


def explained(model: Any, x: Any, kernels: Any, *, runs: int = 1, **policy: Any) -> Report:
    with session(model, x, kernels, **policy) as opened:
        return explain(opened, x, runs)


def of(report: Report, node: str) -> KernelDecision:
    (kernel_decision,) = (decision for decision in report.decisions if node in decision.nodes)
    return kernel_decision


X = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))


def test_kernels_of_ours_are_told_with_their_nodes() -> None:
    kernels = {"matmul": "cpu.blas", "layer_norm": "cpu.vectorised", "attention": "cpu.reference"}
    with session(Block(), X, kernels) as opened:
        for _ in range(3):
            opened.run({opened.inputs[0].name: X})  # before the pass: not counted
        report = explain(opened, X, runs=4)
    nodes = {node for unit in report.units for node in unit.source_nodes}
    assert {node for decision in report.decisions for node in decision.nodes} <= nodes
    up = of(report, "up/addmm")
    assert (up.op, up.dtype, up.device, up.phase, up.count) == ("matmul", "fp32", "cpu", "infer", 4)
    assert up.shapes == {"a": (6, 16), "b": (16, 32), "bias": (32,), "out": (6, 32)}
    assert (up.asked, up.asked_by, up.source, up.chosen) == (("cpu.blas",), "kernels.matmul", "pinned", "cpu.blas")
    others = {candidate.id: candidate.reason for candidate in up.candidates if not candidate.accepted}
    assert others["cpu.reference"] == "was not needed: cpu.blas serves"
    norm = of(report, "norm/native_layer_norm")
    assert (norm.chosen, norm.asked_by, norm.count) == ("cpu.vectorised", "kernels.layer_norm", 4)
    assert of(report, "scaled_dot_product_attention").chosen == "cpu.reference"
    assert len(report.decisions) == 4
    text = str(report)
    assert "xpuruntime kernels, in the instrumented pass" in text
    assert "cpu.vectorised" in text


def test_equal_calls_of_several_nodes_are_one_decision() -> None:
    square = torch.eye(16)
    (one,) = explained(Of(lambda x: x @ square @ square), square, {"matmul": "cpu.blas"}, runs=2).decisions
    assert (one.nodes, one.count) == (("mm", "mm_1"), 4)


def test_a_kernel_of_pytorchs_that_was_asked_for() -> None:
    report = explained(Block(), X, {"attention": ["cudnn", "torch.flash"], "matmul": "torch"}, runs=2)
    flash = of(report, "scaled_dot_product_attention")
    assert (flash.chosen, flash.source, flash.asked_by) == ("torch.flash", "pinned", "kernels.attention")
    assert (flash.asked, flash.count, flash.dtype) == (("cudnn", "torch.flash"), 2, "fp32")
    assert flash.description == "attention fp32 [1, 2, 6, 8] x [1, 2, 6, 8] x [1, 2, 6, 8], by PyTorch"
    assert [(candidate.id, candidate.accepted, candidate.reason) for candidate in flash.candidates] == [
        ("cudnn", False, "torch.cudnn runs on CUDA, and the operands are on cpu"),
        ("torch.flash", True, ""),
    ]
    assert (of(report, "up/addmm").chosen, of(report, "up/addmm").asked) == ("torch.mm", ("torch",))
    assert "torch.flash" in str(report)


def test_which_of_its_own_pytorch_chose() -> None:
    chosen = of(explained(Block(), X, {"attention": "torch.sdpa"}), "scaled_dot_product_attention")
    assert (chosen.chosen, chosen.notes) == ("torch.sdpa", ("PyTorch chose torch.flash",))


def test_rules_by_node_and_module() -> None:
    kernels = {
        "rules": [
            {"match": {"op": "matmul", "node": "up/*"}, "use": "cpu.reference"},
            {"match": {"op": "matmul", "module": "down"}, "use": ["cpu.blas"]},
        ],
        "layer_norm": "cpu.reference",
    }
    report = explained(Block(), X, kernels)
    told = {
        decision.nodes: (decision.asked_by, decision.chosen, decision.source, decision.module)
        for decision in report.decisions
    }
    assert told == {
        ("up/addmm",): ("kernels.rules[0]", "cpu.reference", "rule", "up"),
        ("down/addmm",): ("kernels.rules[1]", "cpu.blas", "rule", "down"),
        ("norm/native_layer_norm",): ("kernels.layer_norm", "cpu.reference", "pinned", "norm"),
    }


def test_words_that_cannot_serve_have_their_reasons(tmp_path: Path) -> None:
    report = explained(Block(), X, {"rules": [{"match": {"op": "matmul"}, "use": ["cublas", "cpu.blas"]}]})
    up = of(report, "up/addmm")
    refused = {candidate.id: candidate for candidate in up.candidates if "cublas" in candidate.id}
    assert (up.chosen, up.source, up.asked) == ("cpu.blas", "rule", ("cublas", "cpu.blas"))
    assert not any(one.accepted for one in refused.values())
    assert refused["cublas"].reason
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report


@pytest.mark.parametrize(("match", "absent"), [({"op": "conv"}, "conv"), ({"module": "*"}, "matmul or ")])
def test_a_rule_for_operations_that_the_model_has_not_chooses_nothing(match: Any, absent: str) -> None:
    rules = [{"match": match, "use": "cpu.reference"}]
    with pytest.warns(xrt.XpuRuntimeWarning, match=rf"is unsupported: no {absent}.*was found in the model"):
        session(Of(lambda x: torch.softmax(x, -1)), X, {"rules": rules}).close()


def test_a_key_that_the_plan_calls_unsupported() -> None:
    with pytest.warns(xrt.XpuRuntimeWarning, match=r"kernels\.matmul: cublasLt is unsupported"):
        report = explained(Block(), X, {"matmul": "cublasLt"}, mode="prefer")
    assert {node for decision in report.decisions for node in decision.nodes} == {"up/addmm", "down/addmm"}
    for decision in report.decisions:
        assert (decision.chosen, decision.source, decision.asked, decision.count) == (
            "torch.mm",
            "fallback",
            ("cublasLt",),
            1,
        )
        assert [(other.id, other.accepted) for other in decision.candidates] == [("cublasLt", False)]
        assert decision.candidates[0].reason.startswith(("cublasLt does not run on cpu", "there is no kernel"))


def test_calls_that_stay_pytorchs_though_a_key_is_for_them() -> None:
    """Of integers only PyTorch has a product, and an operator that is called by its own name passes every override."""
    integers = torch.ones(4, 4, dtype=torch.int64)
    report = explained(Of(lambda x: x @ x), integers, {"matmul": "cpu.blas"}, runs=3)
    (one,) = report.decisions
    assert (one.nodes, one.chosen, one.source, one.asked_by, one.count) == (
        ("mm",),
        None,
        "fallback",
        "kernels.matmul",
        3,
    )
    assert (one.dtype, one.description) == ("int64", "matmul int64 [4, 4] x [4, 4], by PyTorch")
    assert one.candidates[0].reason.startswith("only PyTorch's own kernel does this")
    (seen,) = (o for o in report.observations if o.key == "kernels.matmul")
    assert (seen.status, seen.observed) == ("substituted", "PyTorch's own (1 operator)")
    past = explained(
        Of(lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]),
        torch.randn(1, 2, 8, 8),
        {"attention": "cpu.reference"},
    )
    (one,) = past.decisions
    assert (one.op, one.chosen, one.source, one.count) == ("attention", None, "fallback", 1)


def test_products_with_a_vector_are_no_matmul_of_a_policy() -> None:
    with pytest.warns(xrt.XpuRuntimeWarning, match="the key chooses nothing"):
        report = explained(Of(lambda x: torch.mv(x, x[0])), torch.ones(4, 4), {"matmul": "cpu.blas"})
    assert report.decisions == ()
    assert {observation.key: observation.status for observation in report.observations}[
        "kernels.matmul"
    ] == "unsupported"


def test_what_was_measured_is_told_with_all_times() -> None:
    square = torch.randn(64, 64)
    with pytest.warns(xrt.XpuRuntimeWarning, match="best_performance is advisory"):
        report = explained(Of(lambda x: x @ x), square, {}, auto_strategy="best_performance")
    assert {node for decision in report.decisions for node in decision.nodes} == {"mm"}
    for decision in report.decisions:
        assert (decision.source, decision.asked_by, decision.asked) == ("tuned", "kernels.auto_strategy", ("auto",))
        times = {other.id: other.measured_us for other in decision.candidates if other.measured_us is not None}
        assert times["torch.mm"] > 0
        assert len(times) >= 2
        if decision.chosen == "torch.mm":
            assert "xpuruntime.matmul" in times


def test_a_compiled_program_tells_the_calls_that_are_left_in_it() -> None:
    with pytest.warns(xrt.XpuRuntimeWarning, match="is advisory"):
        report = explained(Block(), X, {"matmul": "cpu.blas"}, compiled=True)
    assert {decision.op for decision in report.decisions} == {"matmul"}
    assert sum(decision.count or 0 for decision in report.decisions) == 2
    assert {(decision.nodes, decision.chosen) for decision in report.decisions} == {((), "cpu.blas")}


def test_an_exported_program(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(Block().eval(), (X,)), tmp_path / "net.pt2")
    policy = {"execution": {"engine": "torch", "device": "cpu"}, "kernels": {"matmul": "cpu.blas"}}
    with xrt.InferenceSession(tmp_path / "net.pt2", policy=policy) as opened:
        report = explain(opened, X, runs=2)
        nodes = {node.name for node in opened.model.nodes}
    assert {decision.count for decision in report.decisions} == {2}
    told = {node for decision in report.decisions for node in decision.nodes}
    assert told <= nodes
    assert {unit.id for unit in report.units if unit.kernel == "cpu.blas"} == told


def test_what_was_warned_of_is_not_said_again_by_a_pass() -> None:
    heads = torch.randn(1, 2, 6, 8)
    uneven = Of(lambda x: attention(x, x, x[..., :4]))  # which PyTorch's flash attention does not take
    with session(uneven, heads, {"attention": "torch.flash"}) as opened:
        with pytest.warns(xrt.XpuRuntimeWarning, match="though .* asks for torch.flash"):
            opened.run({opened.inputs[0].name: heads})
        report = explain(opened, heads)  # where a warning is an error
    one = of(report, "scaled_dot_product_attention")
    assert (one.source, one.asked, one.asked_by) == ("fallback", ("torch.flash",), "kernels.attention")
    assert [(other.id, other.accepted) for other in one.candidates] == [("torch.flash", False), ("torch.sdpa", True)]
    assert one.candidates[0].reason
    (seen,) = (o for o in report.observations if o.key == "kernels.attention")
    assert (seen.status, report.honoured) == ("substituted", False)


def test_a_module_is_read_while_it_runs_elsewhere() -> None:
    """The operators are named for the modules that call them in the thread that reads."""
    net, done = Block().eval(), threading.Event()

    def run() -> None:
        while not done.is_set():
            with torch.no_grad():
                net(X)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(5):
            with session(net, X, {"matmul": "cpu.blas"}) as opened:
                assert {"up/addmm", "down/addmm"} <= {node.name for node in opened.model.nodes}
    finally:
        done.set()
        thread.join()
