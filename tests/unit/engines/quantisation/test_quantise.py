# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Quantised graphs: their form for each engine, what stays in floats, and that nothing else is left behind."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from exported_models import FOLDER, example, exported, samples
from onnx import TensorProto, numpy_helper

from xpuruntime.engines.model import inspect_bytes, inspect_model
from xpuruntime.engines.quantisation import STYLES, Calibration, quantise
from xpuruntime.errors import EngineError, ModelError
from xpuruntime.testing import models

needs_nncf = pytest.mark.skipif(find_spec("nncf") is None, reason="could not import 'nncf'")
ORT_STYLES = [name for name, style in STYLES.items() if style.tool != "nncf"]


def calibrated(model, data):
    info = inspect_bytes(model) if isinstance(model, onnx.ModelProto) else inspect_model(model)
    return info, Calibration(data, info)


def made_from(name, style, **options):
    info, calibration = calibrated(exported(name), samples(name, 8))
    return quantise(info, calibration, style, **options)


def graph_of(made):
    return onnx.load_model_from_string(made.data)


def types_of(proto, op, place):
    """Return the types of an input of all nodes of one operator, of initializers."""
    kinds = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    return {kinds[node.input[place]] for node in proto.graph.node if node.op_type == op and node.input[place] in kinds}


def run(model, feeds, optimise=True):
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model if isinstance(model, bytes) else str(model), options)
    return session.run(None, feeds)


def cosine(a, b):
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize("style", ORT_STYLES)
@pytest.mark.parametrize("name", ["encoder", "convnet"])
def test_a_quantised_model_keeps_its_border_and_its_answers(name, style):
    made, before = made_from(name, style), onnx.load(exported(name))
    after = graph_of(made)
    onnx.checker.check_model(after)
    assert [v.name for v in after.graph.input] == [v.name for v in before.graph.input]
    assert [v.type.tensor_type.elem_type for v in after.graph.output] == [TensorProto.FLOAT] * len(before.graph.output)
    assert len(made.data) < Path(exported(name)).stat().st_size / 2
    names = [node.name for node in after.graph.node]
    assert all(names), "a node has no name"
    assert len(set(names)) == len(names)
    feeds = example(name, 4)
    for want, got in zip(run(exported(name), feeds), run(made.data, feeds, optimise=False), strict=True):
        assert cosine(want, got) > 0.99


@pytest.mark.parametrize("name", ["encoder", "convnet"])
def test_the_form_for_tensorrt_is_symmetric_and_leaves_biases_in_floats(name):
    proto = graph_of(made_from(name, "tensorrt"))
    assert types_of(proto, "DequantizeLinear", 0) == {TensorProto.INT8}
    kinds = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            zero = numpy_helper.to_array(kinds[node.input[2]])
            assert zero.dtype == np.int8
            assert not zero.any()


def test_the_form_for_qnn_has_a_scale_a_channel_for_convolutions_only():
    convnet, encoder = (graph_of(made_from(name, "qnn")) for name in ("convnet", "encoder"))
    assert types_of(convnet, "QuantizeLinear", 2) == {TensorProto.UINT8}
    assert TensorProto.INT8 in types_of(convnet, "DequantizeLinear", 0)
    assert TensorProto.INT8 not in types_of(encoder, "DequantizeLinear", 0)
    sixteen = graph_of(made_from("encoder", "qnn-u16"))
    assert types_of(sixteen, "QuantizeLinear", 2) == {TensorProto.UINT16}
    assert {o.domain: o.version for o in sixteen.opset_import} == {"": 21}


def test_transformers_keep_their_sums_in_floats_and_convnets_do_not():
    def sums(name):
        proto = graph_of(made_from(name, "ort-cpu"))
        readers = {n: node.op_type for node in proto.graph.node for n in node.output}
        added = [node for node in proto.graph.node if node.op_type == "Add"]
        return {readers.get(node.input[0]) == "DequantizeLinear" for node in added}

    assert sums("encoder") == {False}
    assert sums("convnet") == {True}


@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes_in_another_process(tmp_path):
    code = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[1])\n"
        "from exported_models import exported, samples\n"
        "from xpuruntime.engines.model import inspect_model\n"
        "from xpuruntime.engines.quantisation import Calibration, quantise\n"
        "info = inspect_model(exported('encoder'))\n"
        "for style in sys.argv[2:]:\n"
        "    made = quantise(info, Calibration(samples('encoder', 8), info), style)\n"
        "    print(style, hashlib.sha256(made.data).hexdigest())\n"
    )
    told = []
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(FOLDER), *ORT_STYLES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        told.append(done.stdout)
    mine = "".join(f"{s} {hashlib.sha256(made_from('encoder', s).data).hexdigest()}\n" for s in ORT_STYLES)
    assert told == [mine, mine]


def test_nothing_is_said_and_nothing_left_behind(tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = logging.getLogger()
    handlers, filters = list(root.handlers), list(root.filters)
    with caplog.at_level(logging.DEBUG):
        for style in ORT_STYLES:
            made_from("convnet", style)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert (root.handlers, root.filters) == (handlers, filters)
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_root_logger_gets_no_handler():
    code = (
        "import logging, sys; sys.path.insert(0, sys.argv[1])\n"
        "from exported_models import exported, samples\n"
        "from xpuruntime.engines.model import inspect_model\n"
        "from xpuruntime.engines.quantisation import Calibration, quantise\n"
        "info = inspect_model(exported('convnet'))\n"
        "quantise(info, Calibration(samples('convnet', 2), info), 'qnn')\n"
        "assert not logging.getLogger().handlers, logging.getLogger().handlers\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(FOLDER)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_report_says_who_quantised_what_from_how_much():
    made = made_from("convnet", "ort-cpu")
    assert made.tool.startswith("onnxruntime 1.")
    assert made.samples == 8
    assert made.notes[0].startswith("21 of 22 nodes were quantised by onnxruntime")
    assert "from 8 samples of a list of 8, sha256 " in made.notes[0]
    assert "node_conv2d" in made.quantised_nodes
    assert made.left_nodes == ()
    sources = sorted(name for names in made.regions.values() for name in names)
    assert sources == sorted(node.name for node in inspect_model(exported("convnet")).nodes)


@pytest.mark.parametrize("style", ORT_STYLES)
def test_nodes_of_a_rule_stay_in_floats(style):
    made = made_from("convnet", style, keep_fp32=("node_conv2d_[12]", "nothing.*"))
    assert {one.name for one in made.left_nodes if one.by_rule} == {"node_conv2d_1", "node_conv2d_2"}
    assert "node_conv2d_1" not in made.quantised_nodes
    assert "node_conv2d_3" in made.quantised_nodes
    assert "left in floats: Conv: a rule keeps it so (2 nodes)" in made.notes
    assert "the pattern 'nothing.*' names no node of the model" in made.notes
    proto = graph_of(made)
    kinds = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    weights = {n.name: kinds.get(n.input[1]) for n in proto.graph.node if n.op_type == "Conv"}
    assert weights["node_conv2d_1"] == TensorProto.FLOAT
    assert weights["node_conv2d_3"] is None


def test_a_rule_for_a_folded_node_holds_the_node_that_it_is_folded_into():
    import xpuruntime as xrt

    rng = np.random.default_rng(0)
    info, calibration = calibrated(xrt.demo_model_path(), rng.random((8, 1, 8, 8), dtype=np.float32))
    made = quantise(info, calibration, "ort-cpu", keep_fp32=("bn2",))
    assert {one.name for one in made.left_nodes} == {"conv2", "bn2"}
    assert any(note.startswith("6 nodes were folded into 3 before") for note in made.notes)


def test_keeping_everything_is_refused():
    with pytest.raises(ModelError, match=r"nothing in it can be quantised: rules keep every node in floats"):
        made_from("convnet", "ort-cpu", keep_fp32=("*",))


def test_a_model_without_products_is_refused():
    info, calibration = calibrated(models.identity(), np.ones((4, 3), np.float32))
    with pytest.raises(
        ModelError, match=r"nothing in it can be quantised: it has no Conv, .* Fix: use precision: fp32"
    ):
        quantise(info, calibration, "ort-cpu")


def old_opset(opset):
    proto = models.conv()
    proto.opset_import[0].version = opset
    proto.ir_version = 6
    return proto


def test_an_old_opset_is_raised_and_told():
    info, calibration = calibrated(old_opset(11), np.ones((4, 3, 32, 32), np.float32))
    made = quantise(info, calibration, "ort-cpu")
    assert "opset 11 was raised to 13, which quantised graphs need" in made.notes
    assert {o.version for o in graph_of(made).opset_import} == {13}


def test_nodes_without_names_external_data_and_functions(tmp_path):
    proto = models.conv()
    for node in proto.graph.node:
        node.name = ""
    path = models.save(proto, tmp_path, external=True)
    before = sorted(tmp_path.iterdir())
    rng = np.random.default_rng(0)
    images = rng.random((8, 3, 32, 32), dtype=np.float32)
    info, calibration = calibrated(path, images)
    made = quantise(info, calibration, "ort-cpu")
    assert sorted(tmp_path.iterdir()) == before
    assert "Conv:c1" in made.quantised_nodes
    feeds = {"x": images[:2]}
    assert cosine(run(path, feeds)[0], run(made.data, feeds)[0]) > 0.99


def test_functions_are_inlined():
    from onnx import helper

    body = [
        helper.make_node("MatMul", ["a", "b"], ["c"], name="product"),
        helper.make_node("Relu", ["c"], ["d"], name="act"),
    ]
    function = helper.make_function("mine", "Dense", ["a", "b"], ["d"], body, [helper.make_opsetid("", 17)])
    nodes = [helper.make_node("Dense", ["x", "w"], ["y"], name="dense", domain="mine")]
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32), "w")
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
        [weight],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    proto = helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=8)
    data = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)
    info, calibration = calibrated(proto, data)
    made = quantise(info, calibration, "ort-cpu")
    assert made.left_nodes == ()
    assert cosine(run(proto.SerializeToString(), {"x": data})[0], run(made.data, {"x": data})[0]) > 0.99


def test_half_precision_weights_are_refused():
    proto = models.mlp()
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    info, calibration = calibrated(proto, np.ones((2, 64), np.float16))
    with pytest.raises(
        ModelError, match=r"100% of its weights are float16, and quantising starts from float32.*export"
    ):
        quantise(info, calibration, "ort-cpu")


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
    with pytest.raises(ModelError, match=r"it has 3.6 GiB of weights, and quantising takes models of less than 2 GiB"):
        quantise(info, calibration, "ort-cpu")


def test_a_full_temporary_folder_is_named(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(EngineError, match=r"temporary folder cannot be used \(No space left on device\).*TMPDIR"):
        made_from("convnet", "ort-cpu")


def test_a_missing_temporary_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(EngineError, match=r"temporary folder cannot be used .*No such file"):
        made_from("convnet", "ort-cpu")


def test_an_interrupt_leaves_no_files(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    info, calibration = calibrated(exported("convnet"), samples("convnet", 4))

    def interrupted(self):
        yield from samples("convnet", 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(Calibration, "__iter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantise(info, calibration, "ort-cpu")
    assert list(tmp_path.iterdir()) == []


def test_threads_do_not_disturb_each_other():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda name: made_from(name, "ort-cpu").data, ["convnet", "encoder"] * 3))
    assert len(set(made)) == 2


def test_without_vnni_weights_take_seven_bits(monkeypatch):
    from xpuruntime.engines.quantisation import quantised

    def reduced(style):
        import msgspec

        return msgspec.structs.replace(style, reduced=True)

    monkeypatch.setattr(quantised, "for_this_cpu", reduced)
    made = made_from("convnet", "ort-cpu")
    proto = graph_of(made)
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.INT8:
            assert np.abs(numpy_helper.to_array(tensor).astype(int)).max() <= 64
    assert "int8 weights of 7 bits" in made.notes[0]


def test_styles_know_the_processor(monkeypatch):
    from types import SimpleNamespace

    from xpuruntime import _core
    from xpuruntime.engines.quantisation import style

    def machine(name, features):
        manager = SimpleNamespace(get_all_devices=lambda: [SimpleNamespace(features=features)])
        monkeypatch.setattr(_core, "DeviceManager", SimpleNamespace(instance=lambda: manager))
        monkeypatch.setattr(style.platform, "machine", lambda: name)
        return {name for name, one in STYLES.items() if style.for_this_cpu(one).reduced}

    assert machine("x86_64", ["avx2", "avx512f"]) == {"ort-cpu", "openvino", "openvino-nncf"}
    assert machine("AMD64", ["avx512_vnni"]) == set()
    assert machine("aarch64", []) == set()


def test_nncf_missing_is_named(monkeypatch):
    monkeypatch.setattr("xpuruntime.engines.quantisation.nncf_quantiser.find_spec", lambda _: None)
    with pytest.raises(EngineError, match=r"not installed. Fix: pip install .xpuruntime.nncf."):
        made_from("convnet", "openvino-nncf")


def test_onnxruntime_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(EngineError, match=r"onnxruntime.*which the quantiser needs. Fix: pip install onnxruntime-gpu"):
        made_from("convnet", "openvino")


@needs_nncf
@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "convnet"])
def test_nncf_quantises_in_a_process_of_its_own(name, capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = made_from(name, "openvino-nncf")
    assert made.tool.startswith("nncf ")
    assert "nncf" not in sys.modules
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
    feeds = example(name, 4)
    for want, got in zip(run(exported(name), feeds), run(made.data, feeds), strict=True):
        assert cosine(want, got) > 0.98
    assert made_from(name, "openvino-nncf").data == made.data


@needs_nncf
def test_what_nncf_says_when_it_fails_is_passed_on(tmp_path):
    from xpuruntime.engines.quantisation.nncf_quantiser import quantise_nncf
    from xpuruntime.engines.quantisation.preparing import Prepared

    path = tmp_path / "prepared.onnx"
    path.write_bytes(b"no model")
    prepared = Prepared(path=path, proto=models.mlp(), regions={}, notes=())
    with pytest.raises(EngineError, match=r"NNCF cannot quantise this model: .*Fix: leave the option out"):
        quantise_nncf(prepared, [{"x": np.ones((1, 64), np.float32)}], STYLES["openvino-nncf"], (), tmp_path)
