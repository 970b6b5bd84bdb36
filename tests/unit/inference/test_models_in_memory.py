# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A model that is bytes or a ModelProto is the model of its file: the same numbers, plan, evidence and artifacts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import xpuruntime as xrt

PATH = Path(xrt.demo_model_path())
FEEDS = {"image": np.random.default_rng(0).random((1, 1, 8, 8), np.float32)}
FORMS: dict[str, Callable[[], Any]] = {
    "bytes": PATH.read_bytes,
    "bytearray": lambda: bytearray(PATH.read_bytes()),
    "memoryview": lambda: memoryview(PATH.read_bytes()),
    "ModelProto": lambda: onnx.load(PATH),
}


@pytest.fixture(params=FORMS)
def model(request: pytest.FixtureRequest) -> Any:
    return FORMS[request.param]()


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "null"])
def test_a_session(model: Any, engine: str) -> None:
    if engine != "null":
        pytest.importorskip(engine)
    with (
        xrt.InferenceSession(PATH, device="cpu", engine=engine) as filed,
        xrt.InferenceSession(model, device="cpu", engine=engine) as held,
    ):
        assert held.run(FEEDS)["logits"].tobytes() == filed.run(FEEDS)["logits"].tobytes()
        assert held.model.sha256 == filed.model.sha256 or isinstance(model, onnx.ModelProto)
        assert held.inputs == filed.inputs


def test_evidence_tensors_inside_and_artifacts(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    with xrt.InferenceSession(model, device="cpu", engine="onnxruntime") as session:
        want = session.run(FEEDS)["logits"]
        assert session.explain(FEEDS, runs=1).honoured
        tensor = session.model.nodes[0].outputs[0]
        assert set(session.intermediates(FEEDS, [tensor])) == {tensor}
        session.save_compiled(tmp_path / "saved.xrt")
        plan = session.plan
    with xrt.InferenceSession(model, plan=plan) as again:
        assert again.run(FEEDS)["logits"].tobytes() == want.tobytes()
    with xrt.InferenceSession(tmp_path / "saved.xrt") as compiled:
        assert compiled.run(FEEDS)["logits"].tobytes() == want.tobytes()
    other = onnx.load(PATH)
    other.producer_name = "another"
    with pytest.raises(xrt.PlanError):
        xrt.InferenceSession(other, plan=plan)


def test_precision_and_calibration(model: Any) -> None:
    pytest.importorskip("onnxruntime")
    policy = {"mode": "auto"}  # the CPU provider has few fp16 kernels
    for asked in ({"precision": "fp16"}, {"precision": "int8", "calibration": [FEEDS] * 4}):
        with xrt.InferenceSession(model, device="cpu", engine="onnxruntime", policy=policy, **asked) as session:
            assert session.run(FEEDS)["logits"].shape == (1, 10)


def test_plan_and_comparison(model: Any) -> None:
    pytest.importorskip("onnxruntime")
    assert xrt.plan(model, device="cpu", engine="onnxruntime").candidate == "onnxruntime@cpu"
    table = xrt.compare_engines(model, ["onnxruntime"], device="cpu", runs=1)
    assert [row.status for row in table.rows] == ["agrees"]
    assert len(table.model) < 100


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (b"", "holds no graph"),
        (b"hello" * 9, "corrupt"),
        (b"\x80\x04" * 9, "Python pickle"),
        (str(PATH).encode(), "corrupt"),
        (onnx.load(PATH).graph, "onnx.GraphProto"),
        (5, "not as int"),
    ],
)
def test_what_is_no_model(model: Any, reason: str) -> None:
    with pytest.raises(xrt.ModelError, match=f"{reason}.*Fix: "):
        xrt.InferenceSession(model, device="cpu")


def test_data_in_other_files_needs_a_path(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(onnx.load(PATH), path, save_as_external_data=True, size_threshold=0, location="model.bin")
    for model in (path.read_bytes(), onnx.load(path, load_external_data=False)):
        with pytest.raises(xrt.ModelError, match=r"another file.*Fix: .*onnx\.load\(path\)"):
            xrt.InferenceSession(model, device="cpu")
    with xrt.InferenceSession(onnx.load(path), device="cpu", engine="null") as session:
        assert session.run(FEEDS)["logits"].shape == (1, 10)
