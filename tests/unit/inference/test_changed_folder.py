# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sessions of a model by a relative path, in a process that changes its working directory afterwards."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest

import xpuruntime as xrt
from xpuruntime.engines.model import inspect_model
from xpuruntime.locks.determinism.grades import fresh_job, run_fresh
from xpuruntime.serving import ServeSettings
from xpuruntime.serving.models.service import Models
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = (2, 64)
FEEDS = {"x": np.linspace(-1, 1, 128, dtype=np.float32).reshape(SHAPE)}
PACKAGES = {"onnxruntime": "onnxruntime", "openvino": "openvino", "qnn": "onnxruntime_qnn"}
POLICIES: dict[str, dict[str, Any]] = {
    "onnxruntime": {"engine": "onnxruntime", "device": "cpu"},
    "openvino": {"engine": "openvino", "device": "cpu"},
    "qnn": {
        "engine": "qnn",
        "device": "npu",
        "provider_options": {"qnn": {"soc": "sm8550"}},
        "shapes": {"x": list(SHAPE)},
    },
}


@pytest.fixture(params=["one file", "external data"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "here" / "models"
    folder.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    outside = request.param == "external data"
    more: dict[str, Any] = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0} if outside else {}
    onnx.save_model(models.mlp(), str(folder / "mlp.onnx"), **more)
    monkeypatch.chdir(tmp_path / "here")
    return "models/mlp.onnx"


@pytest.mark.parametrize(
    ("model", "engine"),
    [("external data", "onnxruntime"), ("one file", "openvino"), ("external data", "openvino"), ("one file", "qnn")],
    indirect=["model"],
)
def test_a_session_goes_on(model: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(PACKAGES[engine])
    with xrt.InferenceSession(model, policy={"execution": POLICIES[engine]}) as session:
        expected = session.run(FEEDS)
        monkeypatch.chdir(tmp_path / "elsewhere")
        report = session.explain(FEEDS, runs=1)
        assert report.units, report.notes
        assert report.to_dict()["plan"]["model"]["path"] == model
        inner = session.model.nodes[0].outputs[0]
        assert inner in session.intermediates(FEEDS, [inner])
        session.save_compiled("mlp.xrt")
        with xrt.InferenceSession("mlp.xrt") as compiled:
            monkeypatch.chdir(tmp_path)
            assert compiled.explain(FEEDS, runs=1).units
            for name, value in compiled.run(FEEDS).items():
                np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-3)


def test_a_fresh_process_opens_it(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with xrt.InferenceSession(model, device="cpu", engine="onnxruntime") as session:
        monkeypatch.chdir(tmp_path / "elsewhere")
        job = fresh_job(session, tmp_path, trust=False)
        expected = session.run(FEEDS)
    (tmp_path / "job").mkdir()
    found = run_fresh({**job, "names": []}, FEEDS, 1, tmp_path / "job")
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_files_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of one relative path, size and time in two folders are two models."""
    digests = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        model = models.mlp()
        model.producer_name = f"maker {number}"
        onnx.save_model(model, str(folder / "m.onnx"))
        os.utime(folder / "m.onnx", (10**9, 10**9))
        monkeypatch.chdir(folder)
        digests.append(inspect_model("m.onnx").sha256)
    assert digests[0] != digests[1]


def test_a_served_model_is_loaded_again(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServeSettings.coerce({"schema": "xpuruntime.serve/1", "models": {"mlp": {"source": model}}})
    service = Models(settings)
    try:
        service.start()
        monkeypatch.chdir(tmp_path / "elsewhere")
        service.load("mlp", {})
        assert [row["state"] for row in service.index()] == ["READY"]
    finally:
        service.close()
