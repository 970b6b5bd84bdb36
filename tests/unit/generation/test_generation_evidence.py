# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Evidence and policy keys of ONNX Runtime GenAI: phases, arithmetic of quantized weights, refusals."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from generation_folders import change_config

import xpuruntime as xrt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai: make engines")


def test_each_phase_accounts_for_each_node_once(folder: Path, tmp_path: Path):
    with xrt.GenerationSession(folder, policy={"execution": {"precision": "fp32", "fallback": "error"}}) as session:
        report = session.explain([1, 2, 3, 4, 5], runs=3)
        nodes = {node.name for node in session.model.nodes}
    assert report.honoured, report
    assert not report.partial
    for phase in ("prefill", "decode"):
        units = [unit for unit in report.units if unit.phase == phase]
        assert Counter(name for unit in units for name in unit.source_nodes) == Counter(nodes)
        assert all(unit.id.startswith(f"{phase}:") for unit in units)
        assert {unit.provider for unit in units if unit.time} == {"CPUExecutionProvider"}
        assert {unit.engine for unit in units} == {"onnxruntime-genai"}
        assert sum(unit.op == "GroupQueryAttention" for unit in units) == 2
    assert {unit.phase for unit in report.units} == {"prefill", "decode"}
    assert any(note.startswith("prefill is of 5 tokens") for note in report.notes)
    shown = str(report)
    assert f"{len(nodes)} source nodes" in shown
    report.save(tmp_path / "report.json")
    assert xrt.Report.load(tmp_path / "report.json").units == report.units


def test_int4_weights_at_level_4_compute_in_int8(int4_folder: Path):
    with xrt.GenerationSession(int4_folder) as session:
        assert session.plan.settings["weights"] == {"MatMulNBits bits=4 block_size=16 accuracy_level=4": 5}
        report = session.explain([1, 2, 3], runs=2)
    ran = {unit.precision_run for unit in report.units if unit.op == "MatMulNBits"}
    assert ran == {"int8"}
    assert report.honoured  # as the model states it
    xrt.GenerationSession(int4_folder, policy={"mode": "strict", "execution": {"precision": "int8"}}).close()
    with pytest.raises(xrt.UnsupportedOperationError, match=r"compute in int8, whatever their weights are.*Fix"):
        xrt.GenerationSession(int4_folder, policy={"execution": {"precision": "fp32"}})


def test_int4_weights_at_level_0_compute_in_fp32(tmp_path: Path):
    from generation_folders import write_folder

    folder = write_folder(tmp_path / "level0", level=0)
    with xrt.GenerationSession(folder, policy={"mode": "strict", "execution": {"precision": "fp32"}}) as session:
        report = session.explain([1, 2, 3], runs=2)
    assert {unit.precision_run for unit in report.units if unit.op == "MatMulNBits"} == {"fp32"}
    with pytest.raises(xrt.UnsupportedOperationError, match="5 products of the graph compute in floats"):
        xrt.GenerationSession(folder, policy={"execution": {"precision": "int8"}})


ACCURACY = {"mode": "strict", "accuracy": {"rtol": 1e-3, "atol": 1e-3}}


def test_accuracy_is_held_against_the_graph_on_onnxruntime(
    folder: Path, int4_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    from xpuruntime.engines.onnxruntime_genai.model import GenAiModel

    for side in (folder, int4_folder):
        with xrt.GenerationSession(side, policy=ACCURACY) as session:
            statuses = {seen.key: seen.status for seen in session.explain([1, 2, 3], runs=1).observations}
            assert statuses["accuracy.rtol"] == "honoured"
    execute = GenAiModel._execute

    def scaled(self: Any, handle: Any, ready: Any) -> Any:
        return [1.05 * logits for logits in execute(self, handle, ready)]

    monkeypatch.setattr(GenAiModel, "_execute", scaled)
    with pytest.raises(xrt.AccuracyError, match="does not agree"):
        xrt.GenerationSession(folder, policy=ACCURACY)


def test_gates_of_a_policy_are_verified_against_onnxruntime(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from xpuruntime.engines.onnxruntime_genai.model import GenAiModel

    (tmp_path / "texts.json").write_text("[[256, 1, 2, 3, 4, 5], [7, 8, 9]]")
    limits = {"text": str(tmp_path / "texts.json"), "kl": 1e-6, "top1": 0.9}
    policy = {"verify": {"generation": limits}}
    verification = xrt.verify(folder, policy, only=["generation"])
    assert {claim.id: claim.verdict for claim in verification.claims}["generation.kl"] == "pass", verification
    execute = GenAiModel._execute

    def scaled(self: Any, handle: Any, ready: Any) -> Any:
        return [1.05 * logits for logits in execute(self, handle, ready)]

    monkeypatch.setattr(GenAiModel, "_execute", scaled)
    verification = xrt.verify(folder, policy, only=["generation"])
    assert {claim.id: claim.verdict for claim in verification.claims}["generation.kl"] == "fail", verification


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "tf32"])
def test_no_other_precision_is_pretended(folder: Path, precision: str):
    with pytest.raises(xrt.UnsupportedOperationError, match="Fix"):
        xrt.GenerationSession(folder, policy={"execution": {"precision": precision}})


@pytest.mark.parametrize(
    ("execution", "said"),
    [
        ({"device": "cuda:0"}, "cuda:0"),
        ({"device": "npu"}, "has no device 'npu'"),
        ({"provider_options": {"onnxruntime-genai": {"nonsense_option": "1"}}}, "unknown option 'nonsense_option'"),
        (
            {"provider_options": {"onnxruntime-genai": {"session.set_denormal_as_zero": "1"}}},
            "unknown option 'session.set_denormal_as_zero'",
        ),
        ({"provider_options": {"onnxruntime-genai": {"graph_optimization_level": "most"}}}, "'most' is not one of"),
        ({"engine": "onnxruntime"}, "the model is a folder with genai_config.json"),
        ({"engine": "torch"}, "the model is a folder with genai_config.json"),
    ],
)
def test_what_the_engine_would_ignore_is_refused(folder: Path, execution: dict[str, Any], said: str):
    with pytest.raises(xrt.XpuRuntimeError) as caught:
        xrt.plan(folder, {"execution": execution})
    assert said in str(caught.value)


def test_kernels_are_unsupported_and_strict_refuses_them(folder: Path):
    policy = {"kernels": {"matmul": "cpu.blas"}}
    control = xrt.plan(folder, policy).control("kernels.matmul")
    assert control is not None
    assert control.enforceability == "unsupported"
    assert "a session of its own" in control.reason
    with pytest.raises(xrt.UnsupportedOperationError, match=r"kernels\.matmul"):
        xrt.GenerationSession(folder, policy={"mode": "strict", **policy})


def test_options_reach_the_engine(folder: Path):
    options = {"graph_optimization_level": "disable", "enable_cpu_mem_arena": False}
    policy = {"mode": "strict", "execution": {"provider_options": {"genai": options}}}
    with xrt.GenerationSession(folder, policy=policy) as session:
        plain = session.explain([1, 2], runs=1)
        tokens = session.generate([1, 2], max_new_tokens=3).tokens
    with xrt.GenerationSession(folder) as session:
        fused = session.explain([1, 2], runs=1)
        assert session.generate([1, 2], max_new_tokens=3).tokens == tokens
    ops = [{unit.op for unit in report.units if unit.time} for report in (plain, fused)]
    assert ops[0] - ops[1] == {"Identity"}


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"nonsense_option": "1"}, "accepts any name silently"),
        ({"custom_ops_library": "evil.so"}, "loads code of the folder"),
        ({"enable_profiling": "somewhere"}, "writes a file in each run"),
        ({"session.set_denormal_as_zero": "1"}, "holds for the whole thread"),
        ({"intra_op_num_threads": -5}, "-5 is no number of threads"),
        ({"inter_op_num_threads": 10**9}, "is no number of threads"),
        ({"intra_op_num_threads": "4"}, "'4' is no number of threads"),
    ],
)
def test_options_of_a_folder_are_checked_too(
    folder: Path, copy_of: Callable[[Path], Path], option: dict[str, Any], said: str
):
    other = copy_of(folder)
    change_config(other, lambda config: config["model"]["decoder"]["session_options"].update(option))
    with pytest.raises(xrt.XpuRuntimeError, match="Fix: remove it from") as caught:
        xrt.GenerationSession(other)
    assert said in str(caught.value)


def test_a_folder_that_names_another_provider_runs_on_the_device_of_the_policy(
    folder: Path, copy_of: Callable[[Path], Path]
):
    other = copy_of(folder)
    change_config(
        other, lambda config: config["model"]["decoder"]["session_options"].update(provider_options=[{"cuda": {}}])
    )
    with xrt.GenerationSession(other, device="cpu") as session:
        assert "the folder names the providers cuda" in session.plan.accepted.reason
        assert session.explain([1, 2], runs=1).honoured


def test_the_engine_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from importlib import metadata

    from xpuruntime.engines.onnxruntime_genai import OnnxRuntimeGenAiEngine

    found = metadata.version

    def version(name: str) -> str:
        if name.startswith("onnxruntime-genai"):
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "version", version)
    facts = OnnxRuntimeGenAiEngine().probe()
    assert (facts.loadable, facts.version) == (False, None)
    assert str(facts.fix).startswith("`pip install --no-deps onnxruntime-genai`")


def test_an_onnxruntime_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch):
    from importlib import metadata

    from xpuruntime.engines.onnxruntime_genai import OnnxRuntimeGenAiEngine

    found = metadata.version

    def version(name: str) -> str:
        return "1.20.0" if name.startswith("onnxruntime") and "genai" not in name else found(name)

    monkeypatch.setattr(metadata, "version", version)
    facts = OnnxRuntimeGenAiEngine().probe()
    assert not facts.loadable
    assert "requires onnxruntime>=" in str(facts.reason)
    assert "1.20.0 is installed" in str(facts.reason)
    assert str(facts.fix).startswith('pip install --upgrade "onnxruntime')


def test_nodes_on_the_cpu_are_refused_with_what_permits_them(folder: Path):
    """The option that sessions on CUDA are opened with, here on a graph that has all nodes on the CPU."""
    from xpuruntime.engines.onnxruntime_genai.controls import GenAiSettings
    from xpuruntime.engines.onnxruntime_genai.model import load_folder
    from xpuruntime.engines.registry import read_model
    from xpuruntime.planning import PlanRequest
    from xpuruntime.policies import Policy

    request = PlanRequest(model=read_model(folder)).on("cpu", Policy())
    options = {"session.disable_cpu_ep_fallback": "1"}
    with pytest.raises(xrt.UnsupportedOperationError, match=r"Fix: state execution\.allow_cpu_ops"):
        load_folder(request, GenAiSettings(provider="CPUExecutionProvider", options=options))


def test_a_fresh_process_gives_the_same_bits(folder: Path):
    from xpuruntime.locks.determinism import session_determinism

    with xrt.GenerationSession(folder) as session:
        tests = session_determinism(session.session, "restart", trials=2, processes=2)
    assert {test.grade: test.verdict for test in tests.tests}["restart"] == "passed", tests
