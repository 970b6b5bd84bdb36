# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Verdicts of plans on QNN, from made-up facts: nothing of the vendor is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import machines
import pytest
from qnn_models import chip

import xpuruntime as xrt
from xpuruntime.engines.qnn import QnnEngine
from xpuruntime.engines.registry import EngineRegistry
from xpuruntime.runtime.machine import EngineFacts, Machine
from xpuruntime.testing import models

_DETAIL = {"sdk": "2.51.0", "runs_on": "simulator"}
_THERE = EngineFacts(name="qnn", version="2.7.0", loadable=True, providers=("QNNExecutionProvider",), detail=_DETAIL)


def machine(facts: EngineFacts | None = _THERE) -> Machine:
    engines = {"qnn": facts} if facts is not None else {}
    return machines.machine(python="3.11", engines=engines)


def plan(path: Path, policy: dict[str, Any], facts: EngineFacts | None = _THERE, device: str = "npu") -> xrt.Plan:
    registry = EngineRegistry()
    registry.register(QnnEngine())
    return xrt.plan(path, device=device, engine="qnn", policy=policy, registry=registry, machine=machine(facts))


def test_accepted_with_chip_and_version(mlp: Path) -> None:
    made = plan(mlp, chip())
    assert made.accepted.reason.startswith("onnxruntime-qnn 2.7.0, QNN 2.51.0, the HTP simulator as SM8650")
    assert "fp16 inside" in made.accepted.reason
    assert made.settings["target"]["soc_model"] == 57
    assert made.control("execution.provider_options.qnn.soc").resolved == "soc_model=57, htp_arch=75"  # type: ignore[union-attr]


def test_no_chip_is_refused_with_what_to_state(mlp: Path) -> None:
    with pytest.raises(xrt.UnsupportedOperationError, match=r"target_missing.*provider_options\.qnn: \{soc: sm8650\}"):
        plan(mlp, {})


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (None, r"engine_missing: .*onnxruntime-qnn.*Fix: `pip install"),
        (EngineFacts(name="qnn", reason="gone", fix="pip install it"), r"engine_missing: gone\. Fix: .*pip install it"),
        (
            EngineFacts(name="qnn", version="2.7.0", reason="libQnnHtp.so is not in /x", fix="pip install again"),
            r"engine_broken: libQnnHtp\.so is not in /x\. Fix: pip install again",
        ),
    ],
)
def test_missing_and_broken(mlp: Path, facts: EngineFacts | None, message: str) -> None:
    with pytest.raises(xrt.EngineError, match=message):
        plan(mlp, chip(), facts)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_other_devices(mlp: Path, device: str) -> None:
    with pytest.raises(xrt.UnsupportedOperationError, match=r"device_unsupported.*no QnnCpu.*use device npu"):
        plan(mlp, chip(), device=device)


def test_open_dimensions_are_refused_with_the_fix(tmp_path: Path) -> None:
    path = models.save(models.mlp(), tmp_path)
    with pytest.raises(
        xrt.UnsupportedOperationError, match=r"shapes_open.*state execution\.shapes: \{x: \[<N>, 64\]\}"
    ):
        plan(path, chip())
    with pytest.raises(xrt.UnsupportedOperationError, match="shapes_open"):
        plan(path, chip(shapes={"x": ["1..4", 64]}))
    made = plan(path, chip(shapes={"x": [4, 64]}, static_shape=True))
    assert made.control("execution.shapes.x").enforceability == "enforced"  # type: ignore[union-attr]
    assert made.control("execution.static_shape").enforceability == "enforced"  # type: ignore[union-attr]


def test_empty_tensors_are_refused(tmp_path: Path) -> None:
    """QNN divides by the number of elements: the process would end with a floating point exception."""
    pytest.importorskip("onnxruntime_qnn")
    path = models.save(models.mlp(), tmp_path)
    message = r"shape_unsupported: input 'x' has no elements \(\[0, 64\]\).*use the engine onnxruntime"
    with pytest.raises(xrt.UnsupportedOperationError, match=message):
        xrt.InferenceSession(path, device="npu", engine="qnn", policy=chip(shapes={"x": [0, 64]}))
    with pytest.raises(xrt.UnsupportedOperationError, match="shape_unsupported"):
        plan(models.save(models.mlp(batch=0), tmp_path, "empty.onnx"), chip())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"htp_performance_mode": "bogus"}, r"'bogus' is not one of 'default', 'burst'"),
        ({"htp_performance_mod": "burst"}, r"did you mean 'htp_performance_mode'\?"),
        ({"htp_graph_finalization_optimization_mode": 9}, r"'9' is not one of '0'"),
        ({"qnn_context_priority": "bogus"}, r"'bogus' is not one of 'low'"),
        ({"vtcm_mb": 64}, r"SM8650 .* has 8 MiB, asked for 64"),
        ({"vtcm_mb": 0}, r"0 is outside 1\.\.64"),
        ({"backend_type": "cpu"}, r"no QnnCpu"),
        ({"backend_path": "x.so"}, r"'backend_path' is set by backend_type"),
        ({"device_id": 3}, r"'device_id' is set by execution\.device"),
        ({"enable_htp_fp16_precision": True}, r"set by execution\.precision"),
        ({"offload_graph_io_quantization": 1}, r"set by execution\.allow_cpu_ops"),
        ({"profiling_level": "detailed"}, r"set by explain\(\)"),
        ({"soc": "sm1"}, r"unknown chip 'sm1'"),
    ],
)
def test_options_are_checked(mlp: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(xrt.PolicyError, match=message):
        plan(mlp, chip(options=options))


def test_options_go_through_and_promise_nothing(mlp: Path) -> None:
    made = plan(mlp, chip(options={"htp_performance_mode": "burst", "vtcm_mb": 4, "extended_udma": False}))
    assert made.settings["options"]["htp_performance_mode"] == "burst"
    assert made.settings["options"]["extended_udma"] == "0"
    control = made.control("execution.provider_options.qnn.vtcm_mb")
    assert control is not None
    assert (control.resolved, control.enforceability) == ("vtcm_mb=4", "advisory")


@pytest.mark.parametrize(
    ("soc", "precision", "level", "settings"),
    [
        ("sm8650", "fp16", "enforced", {"convert": "fp16"}),
        ("sm8650", "fp32", "unsupported", {"convert": None}),
        ("sm8350", "fp16", "unsupported", {"convert": "fp16"}),
        ("sm8350", "fp32", "unsupported", {"convert": None}),
        ("sc8480xp", "bf16", "enforced", {"convert": None}),
    ],
)
def test_precision(mlp: Path, soc: str, precision: str, level: str, settings: dict[str, Any]) -> None:
    made = plan(mlp, chip(soc, precision=precision))
    assert made.control("execution.precision").enforceability == level  # type: ignore[union-attr]
    assert {key: made.settings[key] for key in settings} == settings
    assert made.settings["options"]["enable_htp_fp16_precision"] == ("0" if precision in ("fp32", "bf16") else "1")
    assert made.settings["options"].get("htp_bf16_enable") == ("1" if precision == "bf16" else None)


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("int8", r"calibration_missing.*calibration="),
        ("tf32", r"precision_unsupported: an NPU has no TF32"),
        ("bf16", r"precision_unsupported: SM8650 .* has no bf16.*from soc_model 88"),
    ],
)
def test_precisions_that_are_refused(mlp: Path, precision: str, message: str) -> None:
    with pytest.raises(xrt.UnsupportedOperationError, match=message):
        plan(mlp, chip(precision=precision))


@pytest.mark.parametrize("dtype", ["string", "bfloat16"])
def test_types_that_qnn_does_not_take(tmp_path: Path, dtype: str) -> None:
    path = models.save(models.identity(dtype), tmp_path)
    with pytest.raises(xrt.UnsupportedOperationError, match=rf"op_unsupported: input 'x' is a tensor of {dtype}"):
        plan(path, chip(shapes={"x": [2, 3]}))


@pytest.mark.parametrize(
    ("execution", "key", "level"),
    [
        ({"determinism": "run_to_run"}, "execution.determinism", "advisory"),
        ({"layout": "nhwc"}, "execution.layout", "enforced"),
        ({"layout": "nchw"}, "execution.layout", "unsupported"),
        ({"cuda_graph": "prefer"}, "execution.cuda_graph", "unsupported"),
        ({"tf32": False}, "execution.tf32", "enforced"),
        ({"tf32": True}, "execution.tf32", "unsupported"),
        ({"threads": 2}, "execution.threads", "unsupported"),
        ({"memory": {"pool": "caching"}}, "execution.memory.pool", "unsupported"),
        ({"memory": {"limit": "1GiB"}}, "execution.memory.limit", "unsupported"),
        ({"allow_cpu_ops": ["Celu"]}, "execution.allow_cpu_ops", "enforced"),
    ],
)
def test_every_stated_key_is_told(mlp: Path, execution: dict[str, Any], key: str, level: str) -> None:
    control = plan(mlp, chip(**execution)).control(key)
    assert control is not None
    assert control.enforceability == level
    if level == "unsupported":
        with pytest.raises(xrt.UnsupportedOperationError, match=key.replace(".", r"\.")):
            plan(mlp, {"mode": "strict", **chip(**execution)})
