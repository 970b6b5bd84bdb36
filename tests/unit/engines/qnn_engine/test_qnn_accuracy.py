# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""How far the simulator is from fp32, in fp16 and int8, on models with real inputs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported_models import example, exported, samples
from qnn_models import open_on
from sampled import part

import xpuruntime as xrt

pytest.importorskip("onnxruntime_qnn")
#: Largest difference over largest magnitude.
_FP16, _INT8 = 6e-3, 6e-2


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return images [n, 1, 8, 8] of handwritten digits, 0 to 1, and what they show."""
    datasets = pytest.importorskip("sklearn.datasets")
    found = datasets.load_digits()
    return (found.images[:, None] / 16).astype(np.float32), found.target


def _open(path: Path, shapes: dict[str, Any], precision: str, calibration: Any = None) -> xrt.InferenceSession:
    policy = {
        "execution": {"provider_options": {"qnn": {"soc": "sm8650"}}, "shapes": shapes, "precision": precision},
        "accuracy": {"rtol": 1.0, "atol": 1.0},
    }
    return xrt.InferenceSession(path, device="npu", engine="qnn", policy=policy, calibration=calibration)


def _distance(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize(("precision", "tolerance"), [("model", _FP16), ("fp16", _FP16), ("int8", _INT8)])
def test_digits(digits: tuple[Any, Any], precision: str, tolerance: float) -> None:
    images, labels = digits
    path = Path(xrt.demo_model_path())
    calibration = [{"image": images[i : i + 64]} for i in range(0, 512, 64)] if precision == "int8" else None
    x, truth = images[-256:], labels[-256:]
    with xrt.InferenceSession(path, device="cpu") as exact:
        want = exact.run({"image": x})["logits"]
    with _open(path, {"image": [64, 1, 8, 8]}, precision, calibration) as session:
        got = np.concatenate([session.run({"image": x[i : i + 64]})["logits"] for i in range(0, 256, 64)])
    assert _distance(got, want) < tolerance
    right = (got.argmax(1) == truth).mean()
    assert right > 0.93
    assert right > (want.argmax(1) == truth).mean() - 0.01


@pytest.mark.parametrize(
    ("name", "precision", "tolerance"),
    part(
        [
            ("convnet", "model", _FP16),
            ("convnet", "fp16", _FP16),
            ("convnet", "int8", 3 * _INT8),
            ("encoder", "int8", 3 * _INT8),
            ("encoder", "model", _FP16),
            ("encoder", "fp16", _FP16),
        ],
        2,
    ),
)
def test_exported_from_pytorch(name: str, precision: str, tolerance: float) -> None:
    feeds = example(name, 1)
    with xrt.InferenceSession(exported(name), device="cpu") as exact:
        want = exact.run(feeds)
    shapes = {key: list(value.shape) for key, value in feeds.items()}
    calibration = samples(name, 8) if precision == "int8" else None
    with _open(exported(name), shapes, precision, calibration) as session:
        got = session.run(feeds)
        again = [session.run(feeds)["logits"].tobytes() for _ in range(10)]
        report = session.explain(feeds, runs=1)
    for key in want:
        assert _distance(got[key], want[key]) < tolerance, key
    assert set(again) == {got["logits"].tobytes()}
    told = sorted(node for unit in report.units for node in unit.source_nodes)
    assert told == sorted(node.name for node in session.model.nodes)
    assert {unit.device for unit in report.units} <= {"npu", "none"}
    assert not report.partial, report.notes
    assert report.honoured, report.headline


@pytest.mark.parametrize(("batch", "length"), [(1, 16), (2, 8), (2, 16)])
def test_fp16_inside_is_told_of_where_it_is_far_off(batch: int, length: int) -> None:
    """The simulator's LayerNormalization is wrong from 2 x 16 rows on: whatever it computes, nobody must believe it."""
    policy = {"execution": {"provider_options": {"qnn": {"soc": "sm8650"}}, "shapes": {"ids": [batch, length]}}}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        session = xrt.InferenceSession(exported("encoder"), device="npu", engine="qnn", policy=policy)
    assert session.plan.settings["computes"] == "fp16"
    feeds = example("encoder", batch, length)
    with session, xrt.InferenceSession(exported("encoder"), device="cpu") as exact:
        want, got = exact.run(feeds), session.run(feeds)
    close = all(_distance(got[key], want[key]) < 1e-2 for key in want)
    assert close == (not told)
    assert all("qnn computes float32 in fp16" in str(one.message) for one in told)


def test_v68_in_the_simulator_is_not_what_a_device_does() -> None:
    """HTP v68 has no floating point; its simulation computes fp32, which the plan says and the probe shows."""
    shapes = {"image": [1, 3, 32, 32]}
    with pytest.warns(xrt.XpuRuntimeWarning, match="v68 has no floating point"):
        session = open_on(exported("convnet"), "sm8350", shapes=shapes, precision="fp32")
    with session:
        report = session.explain(runs=1)
    assert any("keep 23 bits" in note for note in report.notes), report.notes
