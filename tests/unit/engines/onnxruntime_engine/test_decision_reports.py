# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Decisions about kernels in the reports of real sessions: what served, what was refused, measured, and counted."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from rewriting_models import graph, normal, save, session

import xpuruntime as xrt
from xpuruntime.evidence import KernelDecision, Report

if TYPE_CHECKING:
    from pathlib import Path

W1, W2 = normal(6, 8), normal(8, 5, seed=1)
NORMED = """h = MatMul(x, w1)
n = LayerNormalization(h, g, b)
y = MatMul(n, w2)"""


def normed() -> Any:
    return graph("float[n, 6] x", "float[n, 5] y", NORMED, {"w1": W1, "w2": W2, "g": normal(8), "b": normal(8, seed=2)})


def square(size: int = 64) -> Any:
    body = "a = MatMul(x, w1)\nr = Relu(a)\ny = MatMul(r, w2)"
    weights = {"w1": normal(size, size), "w2": normal(size, size, seed=1)}
    return graph(f"float[{size}, {size}] x", f"float[{size}, {size}] y", body, weights)


def of(report: Report, node: str) -> KernelDecision:
    (kernel_decision,) = (decision for decision in report.decisions if node in decision.nodes)
    return kernel_decision


def test_pinned_kernels_are_told_with_their_nodes(tmp_path: Path) -> None:
    kernels = {"matmul": "cpu.blas", "layer_norm": "cpu.vectorised"}
    with session(normed(), tmp_path, kernels=kernels) as opened:
        for rows in (1, 2, 3):
            opened.run({"x": normal(rows, 6)})  # before the pass: not counted
        report = opened.explain({"x": normal(3, 6)}, runs=4)
    nodes = {node for unit in report.units for node in unit.source_nodes}
    assert {node for decision in report.decisions for node in decision.nodes} <= nodes
    first = of(report, "MatMul_h")
    assert (first.op, first.dtype, first.device, first.phase) == ("matmul", "fp32", "cpu", "infer")
    assert first.shapes == {"a": (3, 6), "b": (6, 8), "out": (3, 8)}
    assert (first.asked, first.asked_by, first.source) == (("cpu.blas",), "kernels.matmul", "pinned")
    assert (first.chosen, first.count) == ("cpu.blas", 5)  # four counted runs, and the cold one
    norm = of(report, "LayerNormalization_n")
    assert (norm.op, norm.chosen, norm.asked_by, norm.count) == (
        "layer_norm",
        "cpu.vectorised",
        "kernels.layer_norm",
        5,
    )
    assert len(report.decisions) == 3
    text = str(report)
    assert "xpuruntime kernels, in the instrumented pass" in text
    assert "cpu.vectorised" in text


def test_equal_calls_of_several_nodes_are_one_decision(tmp_path: Path) -> None:
    with session(square(), tmp_path, kernels={"matmul": ["cpu.blas"]}) as opened:
        report = opened.explain({"x": normal(64, 64)}, runs=1)
    # The first folds its Relu in, so the two are not the same work.
    assert [decision.description for decision in report.decisions] == [
        "matmul fp32 [64, 64] x [64, 64], relu, cpu",
        "matmul fp32 [64, 64] x [64, 64], cpu",
    ]
    model = graph("float[6, 6] x", "float[6, 6] y", "a = MatMul(x, w)\ny = MatMul(a, w)", {"w": normal(6, 6)})
    with session(model, tmp_path, kernels={"matmul": "cpu.blas"}) as opened:
        (decision,) = opened.explain({"x": normal(6, 6)}, runs=1).decisions
    assert (decision.nodes, decision.count) == (("MatMul_a", "MatMul_y"), 4)


@pytest.mark.needs_build("cublas")
def test_a_cuda_kernel_asked_for_on_the_cpu(tmp_path: Path) -> None:
    """In a list it is passed over and the reason is told; alone, the node stays with the engine."""
    with session(normed(), tmp_path, kernels={"matmul": ["cublas.cublasLt", "cpu.blas"]}) as opened:
        first = of(opened.explain({"x": normal(3, 6)}, runs=1), "MatMul_h")
    refused = {candidate.id: candidate for candidate in first.candidates}["cublas.cublasLt"]
    assert (first.chosen, first.asked) == ("cpu.blas", ("cublas.cublasLt", "cpu.blas"))
    assert not refused.accepted
    assert refused.reason == "serves cuda, and the operands are on cpu"
    with pytest.warns(xrt.XpuRuntimeWarning, match=r'\[\{match: \{node: "MatMul_h"\}, use: auto\}\]'):
        opened = session(normed(), tmp_path, kernels={"matmul": "cublasLt"}, mode="prefer")
    with opened:
        report = opened.explain({"x": normal(3, 6)}, runs=1)
    (left,) = report.decisions
    assert left.nodes == ("MatMul_h", "MatMul_y")
    assert (left.chosen, left.source, left.asked_by, left.count) == (None, "fallback", "kernels.matmul", None)
    assert [(candidate.id, candidate.accepted) for candidate in left.candidates] == [("cublasLt", False)]
    assert "serves another kind of device" in left.candidates[0].reason
    assert "the engine's own" in str(report)


def test_what_was_measured_is_told_with_all_times(tmp_path: Path) -> None:
    with session(square(), tmp_path, kernels={}, auto_strategy="best_performance") as opened:
        report = opened.explain({"x": normal(64, 64)}, runs=1)
        measured = [
            conversion
            for conversion in opened.explain({"x": normal(64, 64)}, runs=1).conversions
            if "measured" in conversion.what
        ]
    assert len(measured) == 2
    assert {node for decision in report.decisions for node in decision.nodes} == {"MatMul_a", "MatMul_y"}
    for decision in report.decisions:
        assert decision.source == "tuned"
        times = {other.id: other.measured_us for other in decision.candidates if other.measured_us is not None}
        assert "onnxruntime" in times
        assert len(times) >= 2
        assert all(value > 0 for value in times.values())
        if decision.chosen is None:  # ONNX Runtime's own was no slower
            assert decision.asked_by == "kernels.auto_strategy"
        else:
            assert decision.chosen in times


def test_kernels_of_ours_measured_against_each_other(tmp_path: Path) -> None:
    """Pinned to what may be replaced under `auto`: both times are told, the slower with how much slower."""
    kernels = {"rules": [{"match": {"op": "matmul", "m": ">100000"}, "use": "cpu.blas"}]}
    model = graph("float[n, 64] x", "float[n, 64] y", "y = MatMul(x, w)", {"w": normal(64, 64)})
    with session(model, tmp_path, kernels=kernels, auto_strategy="best_performance") as opened:
        (decision,) = opened.explain({"x": normal(64, 64)}, runs=1).decisions
    assert (decision.source, decision.asked, decision.asked_by) == ("tuned", ("auto",), "default")
    times = {candidate.id: candidate for candidate in decision.candidates if candidate.measured_us is not None}
    assert set(times) >= {"cpu.blas", "cpu.reference"}
    loser = next(time_ for time_ in times.values() if time_.id != decision.chosen)
    assert any(words in loser.reason for words in ("times as long as", "first two rounds")), loser.reason


def test_two_sessions_at_once_are_not_mixed(tmp_path: Path) -> None:
    """Of one model, with the same nodes and sizes, one by each kernel; a third only runs meanwhile."""
    path = save(normed(), tmp_path)
    x = normal(3, 6)
    failures: list[BaseException] = []
    start = threading.Barrier(3)
    done = threading.Event()

    def explain(kernel: str, runs: int) -> None:
        try:
            with session(path, tmp_path, kernels={"matmul": kernel}) as opened:
                start.wait()
                for _ in range(5):
                    report = opened.explain({"x": x}, runs=runs)
                    assert {decision.chosen for decision in report.decisions} == {kernel}
                    assert [decision.count for decision in report.decisions] == [runs + 1, runs + 1]
        except BaseException as error:
            failures.append(error)

    def run() -> None:
        try:
            with session(path, tmp_path, kernels={"matmul": "cpu.reference"}) as opened:
                start.wait()
                while not done.is_set():
                    opened.run({"x": x})
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=explain, args=("cpu.blas", 3)),
        threading.Thread(target=explain, args=("cpu.reference", 7)),
        threading.Thread(target=run),
    ]
    for thread in threads:
        thread.start()
    for thread in threads[:2]:
        thread.join()
    done.set()
    threads[2].join()
    assert not failures


def test_saved_and_loaded(tmp_path: Path) -> None:
    with session(normed(), tmp_path, kernels={"matmul": ["cublas", "cpu.blas"]}) as opened:
        report = opened.explain({"x": normal(3, 6)}, runs=1)
    report.save(tmp_path / "report.json")
    loaded = Report.load(tmp_path / "report.json")
    assert loaded.decisions == report.decisions
    assert loaded == report
    plain = json.loads((tmp_path / "report.json").read_text())
    assert plain["decisions"][0]["candidates"]
    del plain["decisions"]  # as older versions wrote it
    (tmp_path / "older.json").write_text(json.dumps(plain))
    older = Report.load(tmp_path / "older.json")
    assert older.decisions == ()
    assert older.units == report.units


def test_runs_without_a_kernel_of_ours_leave_the_part_out(tmp_path: Path) -> None:
    with xrt.InferenceSession(save(normed(), tmp_path), engine="onnxruntime", device="cpu") as opened:
        report = opened.explain({"x": normal(3, 6)}, runs=1)
    assert report.decisions == ()
    assert "xpuruntime kernels" not in str(report)


def explained(folder: Path, kernels: Any, **policy: Any) -> Report:
    with session(normed(), folder, kernels=kernels, **policy) as opened:
        return opened.explain({"x": normal(3, 6)}, runs=1)


def test_another_kernel_for_the_same_call_is_a_difference(tmp_path: Path) -> None:
    before = explained(tmp_path, {"matmul": "cpu.blas", "layer_norm": "cpu.vectorised"})
    after = explained(tmp_path, {"matmul": ["cublas.cublas", "cpu.reference"], "layer_norm": "cpu.vectorised"})
    comparison = xrt.compare_reports(before, after)
    assert not comparison.same
    assert [decision.nodes for decision in comparison.decisions] == [("MatMul_h",), ("MatMul_y",)]
    first = comparison.decisions[0]
    assert (first.kernel_before, first.kernel_after) == ("cpu.blas", "cpu.reference")
    assert (first.asked_before, first.asked_after) == ("cpu.blas", "cublas.cublas, cpu.reference")
    assert first.reason == "cpu.blas: was not needed: cpu.reference serves"
    assert "calls that another kernel serves" in str(comparison)
    again = explained(tmp_path, {"matmul": "cpu.blas", "layer_norm": "cpu.vectorised"})
    assert xrt.compare_reports(before, again).decisions == ()


@pytest.mark.needs_build("cublas")
def test_a_node_that_goes_back_to_the_engine_is_a_difference(tmp_path: Path) -> None:
    before = explained(tmp_path, {"matmul": "cpu.blas"})
    with pytest.warns(xrt.XpuRuntimeWarning, match="stay with ONNX Runtime"):
        after = explained(tmp_path, {"matmul": "cublas.cublas"}, mode="prefer")
    comparison = xrt.compare_reports(before, after)
    assert {node for decision in comparison.decisions for node in decision.nodes} == {"MatMul_h", "MatMul_y"}
    assert {(decision.kernel_before, decision.kernel_after) for decision in comparison.decisions} == {
        ("cpu.blas", "the engine's own")
    }
    assert all("serves another kind of device" in decision.reason for decision in comparison.decisions)


def test_only_one_report_has_decisions(tmp_path: Path) -> None:
    before = explained(tmp_path, {})
    after = explained(tmp_path, {"matmul": "cpu.blas"})
    comparison = xrt.compare_reports(before, after)
    assert comparison.decisions == ()
    assert any(note.startswith("kernel decisions are in 'after' only") for note in comparison.notes)
    same = xrt.compare_reports(before, before)
    assert not any("decisions" in note for note in same.notes)
