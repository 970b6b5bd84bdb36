# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Engines compiled ahead of time with TensorRT-RTX: kept, checked, and refused where they do not fit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sampled import part
from trt_support import ask, judge, machine

import xpuruntime as xrt
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.tensorrt import TensorRtRtxEngine
from xpuruntime.engines.tensorrt.options import RTX, TENSORRT
from xpuruntime.engines.tensorrt.refusals import PLAN, RECORD, read_artifact
from xpuruntime.testing import models

pytest.importorskip("tensorrt_rtx")

EXPORTED = Path(__file__).resolve().parents[3] / "models"
FACTS = TensorRtRtxEngine().probe()
NOWHERE = machine(engines=(FACTS,))
OPTIONS = {"provider_options": {"tensorrt-rtx": {"compute_capability": "8.6"}}}


def compiled(tmp_path: Any, execution: dict[str, Any] | None = None, name: str = "m.xrt", **more: Any) -> Any:
    """Return an artifact of an MLP; by default for compute capability 8.6."""
    model = models.save(more.pop("model", None) or models.mlp(batch=2), tmp_path)
    policy = {"execution": execution if execution is not None else OPTIONS}
    return xrt.compile_model(model, tmp_path / name, device="cuda:0", engine="tensorrt-rtx", policy=policy, **more)


def asked(tmp_path: Any, artifact: Any, execution: dict[str, Any] | None = None) -> Any:
    """Return the request that would load an artifact."""
    request = ask(tmp_path, execution=execution if execution is not None else OPTIONS)
    return msgspec.structs.replace(request, artifact=artifact)


def load_from(artifact: Any, chip: str = "8.6") -> Any:
    """Read an artifact as a load on a GPU of `chip` would."""
    return read_artifact(artifact, RTX, {**artifact.manifest.target, "compute_capability": chip})


def test_compiled_without_a_gpu(tmp_path: Any) -> None:
    artifact = compiled(tmp_path)
    assert sorted(path.name for path in artifact.folder.iterdir()) == [PLAN, "manifest.json", RECORD]
    assert artifact.manifest.target == {
        "flavour": "tensorrt-rtx",
        "version": FACTS.version,
        "compute_capability": "8.6",
        "platform": f"{NOWHERE.system} {NOWHERE.architecture}",
        "precision": "as in the model",
        "tf32": "1",
    }
    assert artifact.manifest.node_map == {"mm1": ("mm1",), "relu": ("relu",), "mm2": ("mm2",)}
    assert any(
        note.startswith("not loaded where it was made: cuda:0 was not found") for note in artifact.manifest.notes
    )
    ready = load_from(artifact)
    assert ready.record.size == len(ready.plan) == (artifact.folder / PLAN).stat().st_size
    assert ready.record.flags["tf32"] == "1"


def test_int8(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    inputs = [{"x": rng.standard_normal((2, 3, 32, 32)).astype(np.float32)} for _ in range(4)]
    artifact = compiled(tmp_path, {**OPTIONS, "precision": "int8"}, model=models.conv(batch=2), calibration=inputs)
    assert artifact.manifest.target["precision"] == "int8"
    assert artifact.manifest.calibration is not None
    assert any("quantized" in note for note in artifact.manifest.notes)
    named = {name for nodes in artifact.manifest.node_map.values() for name in nodes}
    assert {"conv1", "conv2", "fc"} <= named


def test_judged_where_it_would_be_loaded(tmp_path: Any) -> None:
    artifact = compiled(tmp_path)
    request = asked(tmp_path, artifact)
    right = machine((8, 6), engines=(FACTS,))
    judgement = judge(request, right)
    assert judgement.verdict.accepted, judgement.verdict.reason
    assert TensorRtRtxEngine().target(request, judgement, right) == {
        **artifact.manifest.target,
        "platform": f"{right.system} {right.architecture}",
    }
    assert judge(request, NOWHERE).verdict.code == "device_missing"


@pytest.mark.parametrize(("chip", "code"), [((8, 9), "artifact_foreign"), ((12, 0), "artifact_foreign")])
def test_refused_on_another_gpu(tmp_path: Any, chip: tuple[int, int], code: str) -> None:
    artifact = compiled(tmp_path)
    verdict = judge(asked(tmp_path, artifact, {}), machine(chip, engines=(FACTS,))).verdict
    assert verdict.code == code
    text = f"{chip[0]}.{chip[1]}"
    assert verdict.reason == f"the artifact was built for compute capability 8.6, and cuda:0 is {text}"


def test_one_engine_for_several_gpus(tmp_path: Any) -> None:
    artifact = compiled(tmp_path, {})
    for chip in ((8, 0), (8, 6), (8, 9), (12, 0), (12, 1)):
        where = machine(chip, engines=(FACTS,))
        request = asked(tmp_path, artifact, {})
        judgement = judge(request, where)
        assert judgement.verdict.accepted, judgement.verdict.reason
        target = TensorRtRtxEngine().target(request, judgement, where)
        assert target["compute_capability"] == artifact.manifest.target["compute_capability"]


def test_refused_by_another_product(tmp_path: Any) -> None:
    from xpuruntime.engines.tensorrt.refusals import refuse_artifact

    request = asked(tmp_path, compiled(tmp_path))
    refusal = refuse_artifact(request, machine((8, 6)), TENSORRT)
    assert refusal is not None
    assert "an engine of tensorrt-rtx, which TensorRT does not read" in refusal.reason


def test_loading_says_that_there_is_no_gpu(tmp_path: Any) -> None:
    artifact = compiled(tmp_path)
    with pytest.raises(xrt.CudaError, match="cuda:0 was not found"):
        xrt.InferenceSession(artifact.folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda plan, record: plan.write_bytes(plan.read_bytes()[:-100]), "its record says"),
        (lambda plan, record: plan.write_bytes(plan.read_bytes()[:-1] + b"?"), "changed after it was written"),
        (lambda plan, record: plan.unlink(), "engine.plan cannot be read"),
        (lambda plan, record: record.unlink(), "record.json cannot be read"),
        (lambda plan, record: record.write_text("{"), "record.json is damaged"),
        (lambda plan, record: record.write_text(record.read_text().replace("tensorrt/1", "tensorrt/9")), "schema"),
    ],
    ids=["truncated", "flipped", "no plan", "no record", "half a record", "newer"],
)
def test_damaged_artifacts_are_refused(tmp_path: Any, damage: Any, message: str) -> None:
    artifact = compiled(tmp_path)
    damage(artifact.folder / PLAN, artifact.folder / RECORD)
    with pytest.raises(xrt.ModelError, match=message):
        load_from(artifact)
    with pytest.raises(xrt.XpuRuntimeError):
        xrt.InferenceSession(artifact.folder)


def test_a_plan_without_weights_is_no_artifact(tmp_path: Any) -> None:
    options = {"tensorrt-rtx": {"compute_capability": "8.6", "strip_plan": 1}}
    with pytest.raises(xrt.UnsupportedOperationError, match="leaves the weights out"):
        compiled(tmp_path, {"provider_options": options})
    assert not (tmp_path / "m.xrt").exists()


@pytest.mark.parametrize(
    ("name", "precision"),
    part(itertools.product(["encoder.onnx", "convnet.onnx", "digits"], ["fp32", "fp16", "bf16", "int8"]), 5),
)
def test_models_of_users(tmp_path: Any, name: str, precision: str) -> None:
    """A transformer encoder and a convnet that PyTorch exported, and the digits: every node is told at a layer."""
    path = xrt.demo_model_path() if name == "digits" else EXPORTED / name
    info = inspect_model(path)
    shapes = {t.name: [size if isinstance(size, int) else "1..4..8" for size in t.shape or ()] for t in info.inputs}
    sizes = {t.name: [size if isinstance(size, int) else 4 for size in t.shape or ()] for t in info.inputs}
    rng = np.random.default_rng(0)
    samples = [{t.name: (rng.random(sizes[t.name]) * 2).astype(t.dtype) for t in info.inputs} for _ in range(4)]
    artifact = xrt.compile_model(
        path,
        tmp_path / "m.xrt",
        device="cuda:0",
        engine="tensorrt-rtx",
        policy={"execution": {"shapes": shapes, "precision": precision}},
        calibration=samples if precision == "int8" else None,
    )
    told = {node for nodes in artifact.manifest.node_map.values() for node in nodes}
    assert told == {node.name for node in info.nodes}
