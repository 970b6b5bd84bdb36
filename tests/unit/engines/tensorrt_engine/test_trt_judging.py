# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Verdicts of plans on TensorRT and TensorRT-RTX, on made-up machines."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from trt_quantized import qdq
from trt_support import NO_GPU, TRT10_FACTS, ask, judge, machine

from xpuruntime.engines.quantization import Calibration
from xpuruntime.engines.tensorrt import TensorRtEngine
from xpuruntime.errors import EngineError
from xpuruntime.policies import Policy
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.packages import install_command
from xpuruntime.testing import models

BOTH = pytest.mark.parametrize("engine", ["tensorrt", "tensorrt-rtx"])
ADA = machine((8, 9))


@BOTH
def test_not_installed(tmp_path: Any, engine: str) -> None:
    facts = EngineFacts(name=engine, reason="not there")
    verdict = judge(ask(tmp_path), machine((8, 9), engines=(facts,)), engine).verdict
    assert (verdict.code, verdict.fix) == ("engine_missing", install_command(engine))
    assert judge(ask(tmp_path, device="cpu"), machine(engines=(facts,)), engine).verdict.code == "device_unsupported"
    assert judge(ask(tmp_path), machine(engines=(facts,)), engine).verdict.code == "device_missing"
    broken = EngineFacts(name=engine, version="10.0", reason="libnvinfer.so.10: cannot open", fix="pip install it")
    verdict = judge(ask(tmp_path), machine((8, 9), engines=(broken,)), engine).verdict
    assert (verdict.code, verdict.reason, verdict.fix) == ("engine_broken", broken.reason, broken.fix)


@BOTH
def test_devices_that_are_not_there(tmp_path: Any, engine: str) -> None:
    verdict = judge(ask(tmp_path), machine(), engine).verdict
    assert verdict.code == "device_missing"
    assert NO_GPU in verdict.reason
    verdict = judge(ask(tmp_path, device="cuda:3"), ADA, engine).verdict
    assert (verdict.code, verdict.reason) == ("device_missing", "cuda:3 was not found: this machine has cuda:0")
    verdict = judge(ask(tmp_path, device="cpu"), ADA, engine).verdict
    assert verdict.code == "device_unsupported"
    verdict = judge(ask(tmp_path), machine((8, 9), core_cuda=False), engine).verdict
    assert (verdict.code, verdict.accepted) == ("library_missing", False)


def test_hopper_is_no_target_of_rtx(tmp_path: Any) -> None:
    verdict = judge(ask(tmp_path), machine((9, 0))).verdict
    assert verdict.code == "device_unsupported"
    assert "compute capability 9.0" in verdict.reason
    assert "7.5, 8.0, 8.6, 8.9, 12.0, 12.1" in verdict.reason
    options = {"provider_options": {"tensorrt-rtx": {"compute_capability": "9.0"}}}
    for purpose in ("run", "compile"):
        verdict = judge(ask(tmp_path, execution=options, purpose=purpose), machine()).verdict
        if purpose == "compile":
            assert verdict.code == "option_invalid"
            assert "no target 9.0; it can build for 7.5, 8.0" in verdict.reason
        assert not verdict.accepted
    assert judge(ask(tmp_path), machine((9, 0)), "tensorrt").verdict.accepted


def test_compiling_needs_a_gpu_only_where_kernels_are_timed(tmp_path: Any) -> None:
    asked = ask(tmp_path, purpose="compile")
    judgement = judge(asked, machine())
    assert judgement.verdict.accepted
    assert judgement.settings.targets == ("8.0", "8.6", "8.9", "12.0", "12.1")
    assert judge(asked, machine((8, 9))).settings.targets == ("8.9",)
    verdict = judge(asked, machine(), "tensorrt").verdict
    assert verdict.code == "device_missing"
    assert "times kernels on the GPU" in verdict.reason


@pytest.mark.parametrize(
    ("stated", "targets"),
    [
        ("8.6", ("8.6",)),
        (8.6, ("8.6",)),
        (12.0, ("12.0",)),
        ("12.0, 8.6 8.6", ("8.6", "12.0")),
        ("8.9;8.0", ("8.0", "8.9")),
    ],
)
def test_targets(tmp_path: Any, stated: Any, targets: tuple[str, ...]) -> None:
    options = {"provider_options": {"trt-rtx": {"compute_capability": stated}}}
    assert judge(ask(tmp_path, execution=options, purpose="compile"), machine()).settings.targets == targets


@pytest.mark.parametrize("stated", ["", "9", "sm_86", "8.6,10.0", "current"])
def test_targets_that_are_none(tmp_path: Any, stated: str) -> None:
    options = {"provider_options": {"trt-rtx": {"compute_capability": stated}}}
    verdict = judge(ask(tmp_path, execution=options, purpose="compile"), machine()).verdict
    assert verdict.code == "option_invalid"
    assert "it can build for" in verdict.reason


def test_a_target_that_is_not_the_gpu_here(tmp_path: Any) -> None:
    options = {"provider_options": {"trt-rtx": {"compute_capability": "8.6"}}}
    verdict = judge(ask(tmp_path, execution=options), ADA).verdict
    assert verdict.code == "option_invalid"
    assert "names 8.6, and cuda:0 is 8.9; add 8.9" in verdict.reason
    assert judge(ask(tmp_path, execution=options, purpose="compile"), ADA).verdict.accepted


@BOTH
def test_open_shapes_are_refused_with_what_to_state(tmp_path: Any, engine: str) -> None:
    verdict = judge(ask(tmp_path, models.conv()), ADA, engine).verdict
    assert verdict.code == "shapes_open"
    assert verdict.fix == "state them, as sizes or ranges: execution.shapes: {x: ['1..<largest N>', 3, 32, 32]}"
    ranged = judge(ask(tmp_path, models.conv(), {"shapes": {"x": ["1..4..8", 3, 32, 32]}}), ADA, engine)
    assert ranged.verdict.accepted
    assert ranged.settings.profiles == {"x": ((1, 3, 32, 32), (4, 3, 32, 32), (8, 3, 32, 32))}
    fixed = judge(ask(tmp_path, models.conv(), {"shapes": {"x": [8, 3, 32, 32]}, "static_shape": True}), ADA, engine)
    assert fixed.verdict.accepted
    assert fixed.settings.profiles == {}


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [("float64", "would read its memory as float32"), ("string", "is string")],
)
def test_types_of_inputs(tmp_path: Any, dtype: str, reason: str) -> None:
    verdict = judge(ask(tmp_path, models.identity(dtype), {"shapes": {"x": [2, 3]}}), ADA).verdict
    assert verdict.code == "op_unsupported"
    assert reason in verdict.reason
    assert "Cast" in (verdict.fix or "")


def test_operators_of_other_domains(tmp_path: Any) -> None:
    verdict = judge(ask(tmp_path, models.attention()), ADA).verdict
    assert verdict.code == "op_unsupported"
    assert "com.microsoft: MultiHeadAttention" in verdict.reason
    assert "does not look at the domain" in verdict.reason


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"bias": "int32"}, "biases stored as int32"),
        ({"activations": "uint8"}, "quantized to uint8"),
        ({"activations": "uint16"}, "quantized to uint16"),
        ({"weights": "uint8"}, "quantized to uint8"),
    ],
)
def test_quantized_forms_that_are_not_taken(tmp_path: Any, model: dict[str, str], reason: str) -> None:
    verdict = judge(ask(tmp_path, qdq(**model)), ADA).verdict
    assert verdict.code == "op_unsupported"
    assert reason in verdict.reason
    assert "calibration=" in (verdict.fix or "")


def test_int8(tmp_path: Any) -> None:
    assert judge(ask(tmp_path, qdq(), {"precision": "int8"}), ADA).settings.quantize is False
    verdict = judge(ask(tmp_path, execution={"precision": "int8"}), ADA).verdict
    assert verdict.code == "calibration_missing"
    inputs = [{"x": np.zeros((2, 64), np.float32)}] * 4
    asked = ask(tmp_path, execution={"precision": "int8"})
    judgement = judge(msgspec.structs.replace(asked, calibration=Calibration(inputs, asked.model)), ADA)
    assert judgement.settings.quantize is True


def control(found: Any, key: str) -> Any:
    """Return one control."""
    return next(one for one in found.controls if one.key == key)


def test_tf32(tmp_path: Any) -> None:
    cases = [({}, True), ({"precision": "fp32"}, False), ({"precision": "tf32"}, True), ({"tf32": False}, False)]
    for execution, wanted in cases:
        judgement = judge(ask(tmp_path, execution=execution), ADA)
        assert judgement.settings.tf32 is wanted, execution
    assert (
        control(judge(ask(tmp_path, execution={"tf32": False}), ADA), "execution.tf32").resolved == "BuilderFlag.TF32=0"
    )
    assert "TF32" in judge(ask(tmp_path), ADA).verdict.reason


def test_determinism(tmp_path: Any) -> None:
    asked = {"determinism": "run_to_run"}
    judgement = judge(ask(tmp_path, execution=asked), ADA)
    assert judgement.settings.options["kernel_specialization"] == "eager"
    assert control(judgement, "execution.determinism").enforceability == "advisory"
    kept = {**asked, "provider_options": {"tensorrt-rtx": {"kernel_specialization": "none"}}}
    assert judge(ask(tmp_path, execution=kept), ADA).settings.options["kernel_specialization"] == "none"
    lazy = {**asked, "provider_options": {"tensorrt-rtx": {"kernel_specialization": "lazy"}}}
    verdict = judge(ask(tmp_path, execution=lazy), ADA).verdict
    assert verdict.code == "option_invalid"
    assert "replaces kernels while the engine runs" in verdict.reason
    assert "kernel_specialization" not in judge(ask(tmp_path, execution=asked), ADA, "tensorrt").settings.options


def test_memory(tmp_path: Any) -> None:
    judgement = judge(ask(tmp_path, execution={"memory": {"limit": "1GiB"}}), ADA)
    assert (judgement.settings.workspace, judgement.settings.pool) == (1 << 30, "engine")
    assert control(judgement, "execution.memory.limit").enforceability == "advisory"
    for pool in ("caching", "direct", "driver"):
        judgement = judge(ask(tmp_path, execution={"memory": {"limit": "1GiB", "pool": pool}}), ADA)
        assert (judgement.settings.pool, judgement.settings.pool_limit) == (pool, 1 << 30)
        assert control(judgement, "execution.memory.limit").enforceability == "enforced"
        assert control(judgement, "execution.memory.pool").enforceability == "enforced"


def test_rules_of_precision(tmp_path: Any) -> None:
    rule = {"match": {"node": "mm1"}, "precision": "fp32"}
    policy = Policy.coerce({"execution": {"precision": "fp16"}, "kernels": {"rules": [rule]}})
    judgement = judge(ask(tmp_path, policy=policy), ADA)
    assert judgement.settings.keep_fp32 == ("mm1",)
    assert control(judgement, "kernels.rules[0]").enforceability == "enforced"
    plain = Policy.coerce({"kernels": {"rules": [rule], "matmul": "cublasLt"}})
    judgement = judge(ask(tmp_path, policy=plain), ADA)
    assert judgement.settings.keep_fp32 == ()
    assert control(judgement, "kernels.rules[0]").enforceability == "unsupported"
    assert control(judgement, "kernels.matmul").enforceability == "unsupported"


@BOTH
def test_every_stated_key_has_one_control(tmp_path: Any, engine: str) -> None:
    execution = {
        "engine": engine,
        "device": "cuda:0",
        "precision": "fp16",
        "fallback": ["onnxruntime@cpu"],
        "allow_cpu_ops": ["Shape"],
        "shapes": {"x": [2, 64]},
        "static_shape": True,
        "cuda_graph": "prefer",
        "memory": {"pool": "caching", "limit": "1GiB"},
        "determinism": "run_to_run",
        "tf32": False,
        "layout": "nhwc",
        "threads": 2,
        "provider_options": {engine: {"builder_optimization_level": 4}, "openvino": {"x": 1}},
    }
    policy = Policy.coerce({"mode": "prefer", "execution": execution})
    judgement = judge(ask(tmp_path, policy=policy), ADA, engine)
    assert judgement.verdict.accepted, judgement.verdict.reason
    keys = [control.key for control in judgement.controls]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(policy.stated()) - {"mode"}
    assert control(judgement, "execution.layout").enforceability == "unsupported"


def test_probing_a_package_that_does_not_load(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt.py").write_text("raise OSError('libnvinfer.so.10: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    facts = TensorRtEngine().probe()
    assert facts.loadable is False
    assert "libnvinfer.so.10" in (facts.reason or "")
    assert "force-reinstall" in (facts.fix or "")
    from xpuruntime.engines.tensorrt.options import TENSORRT, bindings

    with pytest.raises(EngineError, match=r"TensorRT does not import: .*xpuruntime\[tensorrt\]"):
        bindings(TENSORRT)


def test_probing_a_release_that_is_too_old(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt.py").write_text("__version__ = '8.6.1'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    facts = TensorRtEngine().probe()
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    assert facts.loadable is False
    assert "8.6.1 is too old: 10.0 or newer" in (facts.reason or "")


def test_the_facts_of_older_bindings_decide(tmp_path: Any) -> None:
    newer = {
        "compute_capability": "8.6",
        "runtime_cache": "default",
        "cuda_graph_strategy": "disabled",
        "kernel_specialization": "lazy",
    }
    for option, value in newer.items():
        execution = {"provider_options": {"tensorrt": {option: value}}}
        verdict = judge(ask(tmp_path, execution=execution), ADA, "tensorrt").verdict
        assert verdict.code == "option_invalid", option
        assert f"{option}: TensorRT {TRT10_FACTS.version} does not have it" in verdict.reason
        assert verdict.fix is not None
        assert verdict.fix.startswith("pip install --upgrade tensorrt")
