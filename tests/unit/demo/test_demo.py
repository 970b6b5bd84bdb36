# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The shipped model and images are real, and the demo tells the truth about them."""

from __future__ import annotations

import io
import json

import msgspec
import numpy as np
import pytest
from rich.console import Console

from xpuruntime.demo import DemoResult, demo_images, demo_model_path, run_demo
from xpuruntime.errors import XpuRuntimeError


def test_images_are_scikit_learns_digits_and_labelled_as_there():
    from sklearn.datasets import load_digits

    digits = load_digits()
    known: dict[bytes, set[int]] = {}
    for image, target in zip(digits.images.astype(np.uint8), digits.target, strict=True):
        known.setdefault(image.tobytes(), set()).add(int(target))
    images, labels = demo_images()
    assert images.shape == (360, 1, 8, 8)
    assert images.dtype == np.float32
    assert (images.min(), images.max()) == (0.0, 1.0)
    for image, label in zip(images, labels, strict=True):
        assert int(label) in known[(image * 16).astype(np.uint8).tobytes()]
    assert len({image.tobytes() for image in images}) > 350
    assert set(np.bincount(labels)) <= set(range(30, 42)), "the held-out part is stratified"


def test_model_is_small_and_as_documented():
    import onnx

    model = onnx.load(demo_model_path())
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version >= 17
    (image,), (logits,) = model.graph.input, model.graph.output
    assert [d.dim_param or d.dim_value for d in image.type.tensor_type.shape.dim] == ["N", 1, 8, 8]
    assert (image.name, logits.name) == ("image", "logits")
    assert demo_model_path().stat().st_size < 150_000


@pytest.fixture(scope="module")
def cpu() -> tuple[DemoResult, str]:
    text = io.StringIO()
    return run_demo(device="cpu", console=Console(file=text, width=120)), text.getvalue()


def test_it_recognises_what_it_was_shipped_to_recognise(cpu):
    result, _ = cpu
    assert result.accurate
    assert result.correct == 359
    assert result.accuracy == pytest.approx(359 / 360)
    assert result.honoured


def test_it_verifies_what_it_ran(cpu):
    result, text = cpu
    claims = {claim["id"]: claim["verdict"] for claim in result.verification["claims"]}
    assert result.verified
    assert claims["accuracy.metric.recognised"] == "pass"
    assert claims["evidence.execution.engine"] == "pass"
    assert claims["audit.same_work"] == "pass"
    assert "claims passed" in text.partition("Verification")[2]


def test_it_prints_the_five_parts_in_order(cpu):
    _, text = cpu
    places = [text.index(part) for part in ("Plan", "Accuracy", "Latency", "Evidence", "Verification")]
    assert places == sorted(places)
    assert "359 of 360" in text
    assert "onnxruntime" in text


def test_it_fits_one_screen(cpu):
    _, text = cpu
    assert len(text.splitlines()) <= 30
    assert "xrt explain" in text.partition("Next")[2]


def test_latencies_are_measured(cpu):
    result, _ = cpu
    assert list(result.latency) == ["1", "64"]
    for row in result.latency.values():
        assert 0 < row.min_us <= row.median_us <= row.p90_us
    assert result.latency["64"].median_us > result.latency["1"].median_us


def test_json_is_the_same_result(cpu):
    result, _ = cpu
    plain = json.loads(result.to_json())
    assert plain == json.loads(msgspec.json.encode(result.to_dict()))
    assert plain["schema"] == "xpuruntime.demo/1"
    assert plain["plan"]["engine"] == "onnxruntime"
    assert plain["report"]["schema"] == "xpuruntime.report/1"


def test_without_a_console_nothing_is_printed(capfd: pytest.CaptureFixture[str]):
    run_demo(device="cpu")
    assert capfd.readouterr() == ("", "")


def test_an_engine_that_computes_nothing_is_not_called_accurate():
    text = io.StringIO()
    result = run_demo(policy={"execution": {"engine": "null"}}, console=Console(file=text, width=120))
    assert not result.accurate
    assert "below the required 98%" in text.getvalue()


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(XpuRuntimeError, match="cuda:99"):
        run_demo(device="cuda:99")
