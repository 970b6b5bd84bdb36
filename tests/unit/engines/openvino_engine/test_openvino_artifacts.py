# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models that OpenVINO compiled, kept and loaded again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported_models import example, exported, samples

import xpuruntime as xrt
from xpuruntime.engines import default_registry
from xpuruntime.engines.base import Request
from xpuruntime.engines.model import inspect_model
from xpuruntime.runtime.snapshot import machine_snapshot
from xpuruntime.testing import CompileSuite, models

pytest.importorskip("openvino")


def open_(path: Path, **options: Any) -> xrt.InferenceSession:
    return xrt.InferenceSession(path, device="cpu", engine="openvino", **options)


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    with open_(exported("convnet"), precision="fp32") as session:
        session.save_compiled(tmp_path / "convnet.xrt")
    return tmp_path / "convnet.xrt"


def test_gives_the_same_bits_and_the_same_evidence(compiled: Path) -> None:
    feeds = example("convnet")
    with open_(exported("convnet"), precision="fp32") as direct, xrt.InferenceSession(compiled) as loaded:
        assert loaded.plan.engine == "openvino"
        np.testing.assert_array_equal(loaded.run(feeds)["logits"], direct.run(feeds)["logits"])
        report, two = direct.explain(feeds, runs=1), loaded.explain(feeds, runs=1)
        told = Counter(name for unit in two.units for name in unit.source_nodes)
        assert told == Counter(node.name for node in loaded.model.nodes)
    assert two.honoured, two
    kernels = {unit.source_nodes: unit.kernel for unit in report.units if unit.kernel and unit.source_nodes}
    assert kernels == {unit.source_nodes: unit.kernel for unit in two.units if unit.kernel and unit.source_nodes}


def test_runs_without_the_model_file(tmp_path: Path) -> None:
    source = tmp_path / "own.onnx"
    shutil.copy(exported("convnet"), source)
    with open_(source) as session:
        session.save_compiled(tmp_path / "own.xrt")
        want = session.run(example("convnet"))["logits"]
    source.unlink()
    with xrt.InferenceSession(tmp_path / "own.xrt") as session:
        np.testing.assert_array_equal(session.run(example("convnet"))["logits"], want)
        binding = session.bind(example("convnet"))
        binding.run()
        np.testing.assert_array_equal(binding.outputs["logits"], want)
        report = session.explain(example("convnet"), runs=1)
        assert any("the source model is not here" in note for note in report.notes)
        told = Counter(name for unit in report.units for name in unit.source_nodes)
        assert told == Counter(node.name for node in session.model.nodes)


def test_a_quantized_model_needs_its_samples_once(tmp_path: Path) -> None:
    with pytest.warns(xrt.XpuRuntimeWarning, match="int8 is advisory.*Fix: state engine: onnxruntime"):
        session = open_(exported("convnet"), precision="int8", calibration=samples("convnet", 8))
    with session:
        session.save_compiled(tmp_path / "q.xrt")
        want = session.run(example("convnet"))["logits"]
    with pytest.warns(xrt.XpuRuntimeWarning, match="int8 is advisory.*Fix: state engine: onnxruntime"):
        loaded = xrt.InferenceSession(tmp_path / "q.xrt")
    with loaded:
        np.testing.assert_array_equal(loaded.run(example("convnet"))["logits"], want)
        convs = [u for u in loaded.explain(example("convnet"), runs=1).units if u.op == "Convolution"]
        assert {u.precision_run for u in convs} == {"int8"}


def test_is_tied_to_what_it_was_compiled_for(compiled: Path) -> None:
    target = json.loads((compiled / "manifest.json").read_text())["target"]
    assert target["device"] == "CPU"
    assert target["INFERENCE_PRECISION_HINT"] == "f32"
    assert target["openvino"]
    assert "processor_features" in target
    engine, machine = default_registry().get("openvino"), machine_snapshot(default_registry().engines())
    request = Request(
        model=inspect_model(exported("convnet")),
        device="cpu",
        policy=xrt.Policy.coerce({"execution": {"engine": "openvino", "device": "cpu", "threads": 1}}),
    )
    tied = engine.target(request, engine.judge(request, machine), machine)
    assert tied["INFERENCE_NUM_THREADS"] == "1"
    assert tied["openvino"] == target["openvino"]


def test_another_version_is_refused(compiled: Path) -> None:
    manifest = compiled / "manifest.json"
    text = manifest.read_text()
    version = json.loads(text)["target"]["openvino"]
    manifest.write_text(text.replace(json.dumps(version), json.dumps("2019.1.0")))
    with pytest.raises(xrt.XpuRuntimeError, match=r"2019\.1\.0"):
        xrt.InferenceSession(compiled)


@pytest.mark.parametrize("damage", ["cut", "junk", "empty"])
def test_a_damaged_blob_is_refused(compiled: Path, damage: str) -> None:
    """By its hash; and by OpenVINO, where somebody wrote a manifest to fit."""
    blob = compiled / "model.blob"
    data = blob.read_bytes()
    blob.write_bytes({"cut": data[: len(data) // 2], "junk": os.urandom(4096), "empty": b""}[damage])
    with pytest.raises(xrt.XpuRuntimeError, match=r"model\.blob"):
        xrt.InferenceSession(compiled)
    manifest = compiled / "manifest.json"
    plain = json.loads(manifest.read_text())
    facts = {"size": blob.stat().st_size, "sha256": hashlib.sha256(blob.read_bytes()).hexdigest()}
    plain["files"]["model.blob"] = facts
    manifest.write_text(json.dumps(plain))
    with pytest.raises(xrt.XpuRuntimeError):
        xrt.InferenceSession(compiled)


def test_a_ranged_and_a_renamed_model(tmp_path: Path) -> None:
    proto = models.mlp()
    for node in proto.graph.node:
        node.name = ""
    path = models.save(proto, tmp_path)
    policy = {"execution": {"shapes": {"x": ["1..8", 64]}}}
    with open_(path, policy=policy) as session:
        assert len(session.explain(runs=1).conversions) == len(session.explain(runs=1).conversions)
        session.save_compiled(tmp_path / "m.xrt")
    with xrt.InferenceSession(tmp_path / "m.xrt") as session:
        assert session.run({"x": np.ones((8, 64), np.float32)})["y"].shape == (8, 64)
        with pytest.raises(xrt.InputError, match="from 1 to 8"):
            session.run({"x": np.ones((9, 64), np.float32)})


class TestCompiling(CompileSuite):
    engine = "openvino"
    device = "cpu"
    unsupported_op = "Det"


@pytest.mark.parametrize("after", [0.05, 0.6])
def test_killed_while_compiling(tmp_path: Path, after: float) -> None:
    """What is there is whole or not there, and the next compilation is not in its way."""
    model = models.save(models.mlp(width=2048), tmp_path)
    out = tmp_path / "m.xrt"
    code = (
        "import sys, xpuruntime as xrt;"
        "s = xrt.InferenceSession(sys.argv[1], device='cpu', engine='openvino');"
        "print('ready', flush=True); s.save_compiled(sys.argv[2])"
    )
    command = [sys.executable, "-c", code, str(model), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(after * 0.2)
        process.kill()
    if not out.exists():
        with open_(model) as session:
            session.save_compiled(out)
    with xrt.InferenceSession(out) as session:
        assert session.run({"x": np.ones((1, 2048), np.float32)})["y"].shape == (1, 2048)
