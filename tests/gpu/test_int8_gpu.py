# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""int8 on ONNX Runtime's CUDA provider: values are rounded on the device, and the plan calls it advisory."""

from __future__ import annotations

import numpy as np
import pytest
from exported_models import example, exported, samples

import xpuruntime as xrt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cuda_onnxruntime,
    pytest.mark.filterwarnings("ignore:.*is advisory:xpuruntime.XpuRuntimeWarning"),
]


@pytest.mark.parametrize("name", ["encoder", "convnet"])
def test_int8_stays_on_the_device_and_agrees_with_fp32(name):
    feeds = example(name, 4)
    with xrt.InferenceSession(exported(name), device="cpu", engine="onnxruntime") as plain:
        want = plain.run(feeds)
    options = {
        "allow_cpu_ops": ["Shape", "Slice", "Gather", "Concat", "Squeeze", "Unsqueeze", "Range", "DequantizeLinear"]
    }
    policy = {"execution": {"engine": "onnxruntime", "device": "cuda:0", "precision": "int8", **options}}
    with xrt.InferenceSession(exported(name), policy=policy, calibration=samples(name)) as session:
        got = session.run(feeds)
        report = session.explain(feeds)
        control = next(control for control in session.plan.controls if control.key == "execution.precision")
    assert control.enforceability == "advisory"
    for output, value in want.items():
        a, b = value.astype(np.float64).ravel(), got[output].astype(np.float64).ravel()
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.995
    rounding = [unit for unit in report.units if unit.op in ("QuantizeLinear", "DequantizeLinear")]
    assert rounding
    biases = [unit for unit in rounding if unit.device != "cuda:0"]  # int32, which the CUDA provider does not scale
    assert all(unit.op == "DequantizeLinear" and "bias" in unit.id for unit in biases), biases
    assert len(biases) < len(rounding) / 2
