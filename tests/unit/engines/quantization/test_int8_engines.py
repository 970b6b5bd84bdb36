# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""int8 on the engines that have it: accuracy against fp32, and integer kernels in the evidence."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import numpy as np
import pytest
from exported_models import example, exported, samples
from sampled import part

import xpuruntime as xrt
from xpuruntime.demo.run import demo_images
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.registry import default_registry

pytestmark = pytest.mark.filterwarnings("ignore:.*is advisory:xpuruntime.XpuRuntimeWarning")

SHAPES = {"encoder": {"ids": [1, 16]}, "convnet": {"image": [1, 3, 32, 32]}}
ENGINES = {
    "openvino": ("openvino", "cpu", {}),
    "qnn": ("onnxruntime_qnn", "npu", {"soc_model": "57"}),
}


def policy_for(engine, shapes):
    package, device, options = ENGINES[engine]
    if find_spec(package) is None or engine not in default_registry():
        pytest.skip(f"could not import {package!r}")
    execution = {"engine": engine, "device": device, "precision": "int8"}
    if engine == "qnn":
        execution |= {"shapes": shapes, "provider_options": {"qnn": options}}
    return {"execution": execution}


@pytest.mark.parametrize(("engine", "name"), part(itertools.product(ENGINES, ["encoder", "convnet"]), 3))
def test_exported_models_agree_with_fp32(engine, name):
    policy = policy_for(engine, SHAPES[name])
    feeds = [example(name, 1, seed=seed) for seed in range(1, 5)]
    with xrt.InferenceSession(exported(name), device="cpu", engine="onnxruntime") as plain:
        want = [plain.run(feed) for feed in feeds]
    with xrt.InferenceSession(exported(name), policy=policy, calibration=samples(name, 64)) as session:
        got = [session.run(feed) for feed in feeds]
        report = session.explain(feeds[0])
    for output in want[0]:
        a, b = (np.concatenate([one[output].astype(np.float64).ravel() for one in side]) for side in (want, got))
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.995
        assert np.abs(a - b).max() / np.abs(a).max() < 0.12
    names = sorted(name for unit in report.units for name in unit.source_nodes)
    assert names == sorted(node.name for node in inspect_model(exported(name)).nodes)
    assert report.honoured, report.deviations


@pytest.mark.parametrize("engine", list(ENGINES))
def test_digits_are_read_as_well_in_int8(engine):
    policy = policy_for(engine, {"image": [1, 1, 8, 8]})
    images, labels = demo_images()
    count = 120
    with xrt.InferenceSession(xrt.demo_model_path(), policy=policy, calibration=images[:64]) as session:
        answers = [session.run({"image": images[64 + i : 65 + i]})["logits"] for i in range(count)]
    right = np.concatenate(answers).argmax(axis=1) == labels[64 : 64 + count]
    assert right.mean() >= 0.97


def test_openvino_takes_nncf_as_quantizer():
    policy = policy_for("openvino", {})
    if find_spec("nncf") is None:
        pytest.skip("could not import 'nncf'")
    policy["execution"]["provider_options"] = {"openvino": {"quantizer": "nncf"}}
    feeds = example("convnet", 4)
    with xrt.InferenceSession(exported("convnet"), policy=policy, calibration=samples("convnet")) as session:
        got = session.run(feeds)["logits"].ravel()
        report = session.explain(feeds)
    with xrt.InferenceSession(exported("convnet"), device="cpu", engine="onnxruntime") as plain:
        want = plain.run(feeds)["logits"].ravel()
    assert got @ want / np.linalg.norm(got) / np.linalg.norm(want) > 0.99
    said = [conversion.reason for conversion in report.conversions if conversion.what == "graph quantized to int8"]
    assert "nodes were quantized by nncf " in said[0]
    names = sorted(name for unit in report.units for name in unit.source_nodes)
    assert names == sorted(node.name for node in inspect_model(exported("convnet")).nodes)


def test_qnn_takes_sixteen_bits_for_activations():
    policy = policy_for("qnn", SHAPES["encoder"])
    policy["execution"]["provider_options"]["qnn"]["activation_bits"] = 16
    feeds = example("encoder", 1)
    with xrt.InferenceSession(exported("encoder"), policy=policy, calibration=samples("encoder", 64)) as session:
        got = session.run(feeds)["hidden"].ravel()
        report = session.explain(feeds)
        stated = {control.key: control for control in session.plan.controls}[
            "execution.provider_options.qnn.activation_bits"
        ]
    with xrt.InferenceSession(exported("encoder"), device="cpu", engine="onnxruntime") as plain:
        want = plain.run(feeds)["hidden"].ravel()
    assert got @ want / np.linalg.norm(got) / np.linalg.norm(want) > 0.9999
    assert (stated.resolved, stated.enforceability) == ("16", "enforced")
    ops = {node.name: node.op for node in inspect_model(exported("encoder")).nodes}
    heavy = [unit for unit in report.units if any(ops[n] in ("MatMul", "Gemm") for n in unit.source_nodes)]
    assert heavy
    assert {unit.precision_run for unit in heavy} == {"uint16"}
    assert report.honoured, report.deviations
