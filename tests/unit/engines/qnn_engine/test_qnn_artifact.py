# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Compile once: a context binary for a chosen chip, its record, and sessions that start from it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import operator_patterns
import pytest
from exported_models import example, exported
from qnn_models import array, chip, open_on, unary

import xpuruntime as xrt
from xpuruntime.engines.qnn.model import SessionWorker
from xpuruntime.testing import models

pytest.importorskip("onnxruntime_qnn")

_X = array((1, 3, 32, 32))


@pytest.fixture(scope="module")
def conv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(models.conv(batch=1), tmp_path_factory.mktemp("qnn"))


@pytest.fixture(scope="module")
def artifact(conv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the model compiled for the chip of this process."""
    folder = tmp_path_factory.mktemp("artifact") / "conv.xrt"
    xrt.compile_model(conv, folder, device="npu", engine="qnn", policy=chip())
    return folder


def test_what_is_written(artifact: Path) -> None:
    names = {path.name for path in artifact.iterdir()}
    assert {"model.onnx", "model_qnn.bin", "units.json", "manifest.json"} <= names
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert manifest["target"]["soc_model"] == "57"
    assert manifest["node_map"]["conv2_token_5"] == ["conv2"]


@pytest.mark.parametrize("name", ["model.onnx", "model_qnn.bin"])
@pytest.mark.parametrize("how", ["noise", "cut off", "empty"])
def test_a_file_that_the_manifest_vouches_for_may_be_anything(
    artifact: Path, tmp_path: Path, name: str, how: str
) -> None:
    folder = tmp_path / "conv.xrt"
    shutil.copytree(artifact, folder)
    data = (folder / name).read_bytes()
    wrong = {"noise": bytes(reversed(data)), "cut off": data[: len(data) // 2], "empty": b""}[how]
    (folder / name).write_bytes(wrong)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"size": len(wrong), "sha256": hashlib.sha256(wrong).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises((xrt.ModelError, xrt.EngineError), match=r"conv\.xrt"):
        xrt.InferenceSession(folder)


def test_a_reload_gives_the_same_bits(conv: Path, artifact: Path) -> None:
    with open_on(conv) as direct:
        want = direct.run({"x": _X})["logits"]
    with xrt.InferenceSession(artifact) as session:
        assert session.plan.engine == "qnn"
        np.testing.assert_array_equal(session.run({"x": _X})["logits"], want)


@pytest.mark.parametrize("precision", ["model", "fp16"])
def test_a_transformer_compiles_as_a_whole(precision: Any, tmp_path: Path) -> None:
    """It computes shapes, which ONNX Runtime folds before QNN sees the graph, in a session and when it compiles."""
    feeds = example("encoder", 1)
    policy = chip(shapes={"ids": [1, 16]}, precision=precision)
    with xrt.InferenceSession(exported("encoder"), device="npu", engine="qnn", policy=policy) as direct:
        want = direct.run(feeds)
    xrt.compile_model(exported("encoder"), tmp_path / "e.xrt", device="npu", engine="qnn", policy=policy)
    with xrt.InferenceSession(tmp_path / "e.xrt") as session:
        got = session.run(feeds)
        report = session.explain(feeds, runs=1)
    assert {name: array.tobytes() for name, array in got.items()} == {n: a.tobytes() for n, a in want.items()}
    assert sorted(n for unit in report.units for n in unit.source_nodes) == sorted(n.name for n in session.model.nodes)


@pytest.mark.filterwarnings("ignore:.*known to compute")  # its Pow may be wrong for -0.0
def test_a_graph_that_a_fusion_spoils_opens_and_compiles_without_it(tmp_path: Path) -> None:
    """In fp16, ONNX Runtime makes a LayerNormalization of two types of what is written out."""
    name = "layer_norm_written_out"
    path, feeds = operator_patterns.write(name, tmp_path), operator_patterns.inputs_of(name)
    policy = chip(precision="fp16")
    xrt.compile_model(path, tmp_path / "n.xrt", device="npu", engine="qnn", policy=policy)
    with xrt.InferenceSession(path, device="npu", engine="qnn", policy=policy) as direct:
        want = direct.run(feeds)["y"]
        report = direct.explain(feeds, runs=1)
    assert any("without LayerNormFusion" in conversion.what for conversion in report.conversions)
    assert {deviation.key for deviation in report.deviations} == {"execution.operators"}
    with xrt.InferenceSession(tmp_path / "n.xrt") as session:
        assert session.run(feeds)["y"].tobytes() == want.tobytes()


def test_any_chip_is_compiled_for_here(conv: Path, tmp_path: Path) -> None:
    """Whatever chip this process holds."""
    for soc in ("sm8750", "sa8295"):
        model = xrt.compile_model(conv, tmp_path / soc, device="npu", engine="qnn", policy=chip(soc))
        proto = onnx.load(model.entry, load_external_data=False)
        record = next(p.value for p in proto.metadata_props if p.key.startswith("ep_compatibility_info"))
        numbers = model.manifest.target
        assert f":{numbers['htp_arch']}:{numbers['soc_model']}:" in record
    with xrt.InferenceSession(tmp_path / "sm8750") as session, open_on(conv, "sm8750") as direct:
        np.testing.assert_array_equal(session.run({"x": _X})["logits"], direct.run({"x": _X})["logits"])


def test_a_context_inside_a_foreign_model_is_held_against_the_chip(artifact: Path, tmp_path: Path) -> None:
    """ONNX Runtime would run it for any chip; the record in the file itself is read."""
    for name in ("model.onnx", "model_qnn.bin"):
        shutil.copy(artifact / name, tmp_path)
    with open_on(tmp_path / "model.onnx") as session:
        assert session.run({"x": _X})["logits"].shape == (1, 10)
    with pytest.raises(xrt.EngineError, match=r"compiled for soc_model 57, HTP v75, and the policy names SM8550"):
        open_on(tmp_path / "model.onnx", "sm8550")
    proto = onnx.load(tmp_path / "model.onnx")
    del proto.metadata_props[:]
    onnx.save(proto, tmp_path / "bare.onnx")
    with pytest.raises(xrt.EngineError, match="does not say for which chip"):
        open_on(tmp_path / "bare.onnx")


def test_what_qnn_does_not_take_is_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(xrt.UnsupportedOperationError, match=r"celu \(Celu\)"):
        xrt.compile_model(unary("Celu", tmp_path), tmp_path / "out.xrt", device="npu", engine="qnn", policy=chip())
    assert not (tmp_path / "out.xrt").exists()


def test_nodes_on_the_cpu_are_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(xrt.XpuRuntimeError, match=r"compiled as a whole.*Fix: load the model itself"):
        xrt.compile_model(
            unary("Celu", tmp_path),
            tmp_path / "out.xrt",
            device="npu",
            engine="qnn",
            policy=chip(allow_cpu_ops=["Celu"]),
        )


def test_killed_in_the_middle_of_a_build(conv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SessionWorker.compile

    def killed(self: SessionWorker, *arguments: Any) -> None:
        threading.Timer(0.05, os.kill, (self.pid, signal.SIGKILL)).start()
        real(self, *arguments)
        time.sleep(1)
        real(self, *arguments)  # whatever was faster: the process is gone now

    monkeypatch.setattr(SessionWorker, "compile", killed)
    with pytest.raises(xrt.EngineError, match="by SIGKILL"):
        xrt.compile_model(conv, tmp_path / "out.xrt", device="npu", engine="qnn", policy=chip())
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_the_command_line_names_the_chip(conv: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from xpuruntime.cli import main

    out = tmp_path / "cli.xrt"
    with pytest.raises(SystemExit) as left:
        main(["compile", str(conv), "--engine", "qnn", "--device", "npu", "--soc", "sm8650", "-o", str(out)])
    assert left.value.code in (0, None), capfd.readouterr()
    assert (out / "model_qnn.bin").is_file()
