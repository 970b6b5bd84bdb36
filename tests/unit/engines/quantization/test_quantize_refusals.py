# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What cannot be quantized is refused with its reason, and a failure leaves no files behind."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from exported_models import exported, samples
from onnx import TensorProto, numpy_helper
from quantized_models import calibrated, made_from

from xpuruntime.engines.quantization import STYLES, Calibration, quantize
from xpuruntime.errors import EngineError, ModelError
from xpuruntime.testing import models

needs_nncf = pytest.mark.skipif(find_spec("nncf") is None, reason="could not import 'nncf'")


def test_keeping_everything_is_refused():
    with pytest.raises(ModelError, match=r"nothing in it can be quantized: rules keep every node in floats"):
        made_from("convnet", "ort-cpu", keep_fp32=("*",))


def test_a_model_without_products_is_refused():
    info, calibration = calibrated(models.identity(), np.ones((4, 3), np.float32))
    with pytest.raises(
        ModelError, match=r"nothing in it can be quantized: it has no Conv, .* Fix: use precision: fp32"
    ):
        quantize(info, calibration, "ort-cpu")


def test_half_precision_weights_are_refused():
    proto = models.mlp()
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    info, calibration = calibrated(proto, np.ones((2, 64), np.float16))
    with pytest.raises(
        ModelError, match=r"100% of its weights are float16, and quantizing starts from float32.*export"
    ):
        quantize(info, calibration, "ort-cpu")


def test_models_beyond_protobuf_are_refused(tmp_path):
    proto = models.mlp(width=8)
    path = models.save(proto, tmp_path, external=True)
    grown = onnx.load(path, load_external_data=False)
    rows = 60_000_000
    for tensor in grown.graph.initializer:
        tensor.dims[:] = [8, rows] if tensor.name == "w1" else [rows, 8]
        tensor.external_data[1].value = "0"
        tensor.external_data[2].value = str(8 * rows * 4)
    with (tmp_path / "model.onnx.data").open("wb") as file:
        file.truncate(8 * rows * 4)
    for value in (*grown.graph.input, *grown.graph.output):
        value.type.tensor_type.shape.dim[1].dim_value = 8
    path.write_bytes(grown.SerializeToString())
    info, calibration = calibrated(path, np.ones((1, 8), np.float32))
    with pytest.raises(ModelError, match=r"it has 3.6 GiB of weights, and quantizing takes models of less than 2 GiB"):
        quantize(info, calibration, "ort-cpu")


def test_a_full_temporary_folder_is_named(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(EngineError, match=r"temporary folder cannot be used \(No space left on device\).*TMPDIR"):
        made_from("convnet", "ort-cpu")


def test_an_interrupt_leaves_no_files(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    info, calibration = calibrated(exported("convnet"), samples("convnet", 4))

    def interrupted(self):
        yield from samples("convnet", 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(Calibration, "__iter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize(info, calibration, "ort-cpu")
    assert list(tmp_path.iterdir()) == []


def test_nncf_missing_is_named(monkeypatch):
    monkeypatch.setattr("xpuruntime.engines.quantization.quantizers.find_spec", lambda _: None)
    with pytest.raises(EngineError, match=r"not installed. Fix: `pip install .nncf"):
        made_from("convnet", "openvino-nncf")


@needs_nncf
def test_what_nncf_says_when_it_fails_is_passed_on(tmp_path):
    from xpuruntime.engines.quantization.preparing import Prepared
    from xpuruntime.engines.quantization.quantizers import quantize_nncf

    path = tmp_path / "prepared.onnx"
    path.write_bytes(b"no model")
    prepared = Prepared(path=path, proto=models.mlp(), regions={}, notes=())
    with pytest.raises(EngineError, match=r"NNCF cannot quantize this model: .*Fix: leave the option out"):
        quantize_nncf(prepared, [{"x": np.ones((1, 64), np.float32)}], STYLES["openvino-nncf"], (), tmp_path)
