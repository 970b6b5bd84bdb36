# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""int8 as users ask for it: a session with `calibration=`, on ONNX Runtime's CPU."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import onnx
import onnx.parser
import pytest
from exported_models import example, exported, samples

import xpuruntime as xrt
from xpuruntime.demo.run import demo_images
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.quantization import Calibration, quantize
from xpuruntime.engines.quantization.style import STYLES, for_this_cpu

INT8 = {"device": "cpu", "engine": "onnxruntime", "precision": "int8"}


@pytest.fixture(scope="module")
def digits():
    """Return images to calibrate with, images to test with, and labels of the latter."""
    images, labels = demo_images()
    return images[:64], images[64:], labels[64:]


def right(session, images, labels):
    answers = np.concatenate([session.run({"image": images[i : i + 32]})["logits"] for i in range(0, len(images), 32)])
    return float((answers.argmax(axis=1) == labels).mean())


def accounted(report, model):
    names = Counter(name for unit in report.units for name in unit.source_nodes)
    assert names == Counter(node.name for node in inspect_model(model).nodes)


def test_digits_are_read_as_well_in_int8(digits):
    calibration, images, labels = digits
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine="onnxruntime") as plain:
        before = right(plain, images, labels)
    with xrt.InferenceSession(xrt.demo_model_path(), calibration=calibration, **INT8) as session:
        after = right(session, images, labels)
    assert after >= 0.98
    assert after >= before - 0.01


def test_the_evidence_shows_integer_kernels(digits):
    with xrt.InferenceSession(xrt.demo_model_path(), calibration=digits[0], **INT8) as session:
        report = session.explain({"image": digits[1][:8]})
    assert report.honoured, report.deviations
    accounted(report, xrt.demo_model_path())
    units = {name: unit for unit in report.units for name in unit.source_nodes}
    for name in ("conv1", "conv2", "conv3", "fc1", "fc2"):
        assert units[name].precision_requested == "int8"
        assert "uint8" in units[name].precision_run
    assert [units[name].op for name in ("conv1", "fc1")] == ["QLinearConv", "QGemm"]
    assert units["bn1"] is units["conv1"]
    said = [conversion for conversion in report.conversions if conversion.what == "graph quantized to int8"]
    assert said[0].reason.startswith("11 of 12 nodes were quantized by onnxruntime")


#: Products of the model below that ONNX Runtime's CPU provider has no integer kernel for, and their constant operands.
UNSERVED = {
    "ConvTranspose": ("y = ConvTranspose <strides = [2, 2]> (c, w)", {"w": (4, 4, 2, 2)}, "[1, 4, 16, 16]"),
    "ConvTranspose of groups": ("y = ConvTranspose <group = 2> (c, w)", {"w": (4, 2, 2, 2)}, "[1, 4, 9, 9]"),
    "ConvTranspose of shared weights": ("y = ConvTranspose (c, k)", {}, "[1, 4, 10, 10]"),
    "Gemm with a computed bias": (
        "m = Flatten (c) r = Relu (m) y = Gemm (m, w, r)", {"w": (256, 256)}, "[1, 256]",
    ),
    "Conv with a computed bias": (
        "p = GlobalAveragePool (c) b = Flatten <axis = 4> (p) q = Squeeze (b) y = Conv (c, w, q)",
        {"w": (4, 4, 3, 3)}, "[1, 4, 6, 6]",
    ),
    "MatMul of weights in batches": ("y = MatMul (c, w)", {"w": (4, 8, 3)}, "[1, 4, 8, 3]"),
    "MatMul with a constant first": ("y = MatMul (w, c)", {"w": (3, 8)}, "[1, 4, 3, 8]"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSERVED)
def test_products_without_an_integer_kernel_are_left_alone(name, tmp_path):
    """The convolution before them is quantized; they are computed as in fp32, and that is no deviation."""
    body, constants, shape = UNSERVED[name]
    head = '<ir_version: 9, opset_import: ["": 17]>'
    model = onnx.parser.parse_model(
        f"{head} g (float[1, 4, 8, 8] x) => (float{shape} y) {{ c = Conv <pads = [1, 1, 1, 1]> (x, k) {body} }}"
    )
    random = np.random.default_rng(0)
    for one, sizes in {"k": (4, 4, 3, 3), **constants}.items():
        values = random.standard_normal(sizes).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, one))
    onnx.save(model, tmp_path / "m.onnx")
    feeds = {"x": random.standard_normal((1, 4, 8, 8)).astype(np.float32)}
    with xrt.InferenceSession(tmp_path / "m.onnx", calibration=[feeds], **INT8) as session:
        report = session.explain(feeds)
        assert np.isfinite(session.run(feeds)["y"]).all()
    assert report.honoured, report.deviations
    accounted(report, tmp_path / "m.onnx")
    products = [unit for unit in report.units if unit.op in (name.split()[0], "QLinearConv")]
    wanted = {(unit.precision_requested, unit.op == "QLinearConv") for unit in products}
    assert wanted == {("int8", True), ("fp32", False)}
    assert any("no integer kernel" in conversion.reason for conversion in report.conversions)


@pytest.mark.parametrize("name", ["encoder", "convnet"])
def test_exported_models_agree_with_fp32(name):
    reduced = for_this_cpu(STYLES["ort-cpu"]).reduced  # weights of 7 bits, where the processor asks for them
    feeds = example(name, 8)
    with xrt.InferenceSession(exported(name), device="cpu", engine="onnxruntime") as plain:
        want = plain.run(feeds)
    with xrt.InferenceSession(exported(name), calibration=samples(name), **INT8) as session:
        got = session.run(feeds)
        report = session.explain(feeds)
    for output, value in want.items():
        a, b = value.astype(np.float64).ravel(), got[output].astype(np.float64).ravel()
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > (0.998 if reduced else 0.999)
        assert np.abs(a - b).max() / np.abs(a).max() < (0.08 if reduced else 0.05)
    assert report.honoured, report.deviations
    accounted(report, exported(name))
    heavy = {"Conv", "MatMul", "Gemm"}
    ops = {node.name: node.op for node in inspect_model(exported(name)).nodes}
    run_as = [u.precision_run for u in report.units if any(ops[n] in heavy for n in u.source_nodes)]
    assert run_as
    assert all("uint8" in one for one in run_as)


def test_int8_without_calibration_says_what_to_pass():
    with pytest.raises(xrt.UnsupportedOperationError, match=r"calibration_missing: .*pass calibration= .*\.npz file"):
        xrt.InferenceSession(xrt.demo_model_path(), **INT8)
    plan = xrt.plan(xrt.demo_model_path(), fp16=False, device="cpu", engine="onnxruntime", precision="model")
    assert plan.engine == "onnxruntime"


@pytest.mark.parametrize("precision", ["model", "fp32"])
def test_a_calibration_that_nothing_uses_is_refused(digits, precision):
    with pytest.raises(xrt.UnsupportedOperationError, match=rf"calibration_unused: .*precision is {precision}.*Fix: "):
        xrt.InferenceSession(
            xrt.demo_model_path(), device="cpu", engine="onnxruntime", precision=precision, calibration=digits[0]
        )


def test_a_quantized_model_goes_through_as_it_is(digits, tmp_path):
    info = inspect_model(xrt.demo_model_path())
    path = tmp_path / "quantized.onnx"
    path.write_bytes(quantize(info, Calibration(digits[0], info), "ort-cpu").data)
    with xrt.InferenceSession(path, **INT8) as session:
        assert right(session, digits[1], digits[2]) >= 0.98
        control = next(control for control in session.plan.controls if control.key == "execution.precision")
        assert control.resolved == "the model's own quantization (qdq)"
        report = session.explain({"image": digits[1][:8]})
        assert report.honoured, report.deviations
    with pytest.raises(xrt.UnsupportedOperationError, match=r"calibration_unused: .*the model is quantized already"):
        xrt.InferenceSession(path, calibration=digits[0], **INT8)


def test_nodes_of_a_rule_run_in_floats_and_the_report_agrees(digits):
    rules = [{"match": {"node": "fc*"}, "precision": "fp32"}]
    policy = {"mode": "strict", "execution": INT8, "kernels": {"rules": rules}}
    with xrt.InferenceSession(xrt.demo_model_path(), policy=policy, calibration=digits[0]) as session:
        assert right(session, digits[1], digits[2]) >= 0.98
        report = session.explain({"image": digits[1][:8]})
    units = {name: unit for unit in report.units for name in unit.source_nodes}
    assert {units[name].precision_run for name in ("fc1", "fc2")} == {"fp32"}
    assert {units[name].precision_requested for name in ("fc1", "fc2")} == {"fp32"}
    assert units["conv2"].precision_run == "uint8"
    precision = next(observation for observation in report.observations if observation.key == "execution.precision")
    assert precision.status == "honoured"


def test_a_bad_sample_is_named_before_anything_is_loaded():
    given = [*samples("convnet", 2), {"image": np.zeros((1, 3, 16, 16), np.float32)}]
    with pytest.raises(xrt.InputError, match=r"calibration sample 2 .*axis 2 must be 32, got 16"):
        xrt.plan(exported("convnet"), calibration=given, **INT8)


def test_shapes_of_the_policy_hold_for_samples_too():
    policy = {"execution": {**INT8, "shapes": {"ids": [1, 16]}, "static_shape": True}}
    with xrt.InferenceSession(exported("encoder"), policy=policy, calibration=samples("encoder", 8)) as session:
        report = session.explain(example("encoder", 1))
        assert report.honoured, report.deviations
        accounted(report, exported("encoder"))
    with pytest.raises(xrt.InputError, match=r"calibration sample 0 .*16, got 12"):
        xrt.InferenceSession(exported("encoder"), policy=policy, calibration=samples("encoder", 2, length=12))


def test_the_command_line_takes_a_file(digits, tmp_path, capfd):
    from xpuruntime.cli.entry import run

    np.savez(tmp_path / "samples.npz", image=digits[0])
    model = str(xrt.demo_model_path())
    arguments = ["--precision", "int8", "--device", "cpu", "--engine", "onnxruntime", "--json"]
    for command in ("plan", "run", "explain"):
        code = run([command, model, *arguments, "--calibration", str(tmp_path / "samples.npz")])
        told = json.loads(capfd.readouterr().out)
        assert int(code) == 0
        assert "int8" in json.dumps(told)
    code = run(["plan", model, *arguments, "--calibration", str(tmp_path / "none.npz")])
    assert int(code) != 0
    assert "there is no file or folder" in capfd.readouterr().err
