# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Quantized graphs: their form for each engine, what stays in floats, and that nothing else is left behind."""

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
from exported_models import FOLDER, example, exported
from onnx import TensorProto, numpy_helper
from quantized_models import calibrated, cosine, graph_of, made_from, run, types_of
from sampled import part

from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.quantization import STYLES, quantize
from xpuruntime.testing import models

needs_nncf = pytest.mark.skipif(find_spec("nncf") is None, reason="could not import 'nncf'")


ORT_STYLES = [name for name, style in STYLES.items() if style.tool != "nncf"]


@pytest.mark.parametrize("style", ORT_STYLES)
@pytest.mark.parametrize("name", ["encoder", "convnet"])
def test_a_quantized_model_keeps_its_border_and_its_answers(name, style):
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
        "from xpuruntime.engines.quantization import Calibration, quantize\n"
        "info = inspect_model(exported('encoder'))\n"
        "for style in sys.argv[2:]:\n"
        "    made = quantize(info, Calibration(samples('encoder', 8), info), style)\n"
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


def test_the_report_says_who_quantized_what_from_how_much():
    made = made_from("convnet", "ort-cpu")
    assert made.tool.startswith("onnxruntime 1.")
    assert made.samples == 8
    assert made.notes[0].startswith("21 of 22 nodes were quantized by onnxruntime")
    assert "from 8 samples of a list of 8, sha256 " in made.notes[0]
    assert "node_conv2d" in made.quantized_nodes
    assert made.left_nodes == ()
    sources = sorted(name for names in made.regions.values() for name in names)
    assert sources == sorted(node.name for node in inspect_model(exported("convnet")).nodes)


@pytest.mark.parametrize("style", ORT_STYLES)
def test_nodes_of_a_rule_stay_in_floats(style):
    made = made_from("convnet", style, keep_fp32=("node_conv2d_[12]", "nothing.*"))
    assert {node.name for node in made.left_nodes if node.by_rule} == {"node_conv2d_1", "node_conv2d_2"}
    assert "node_conv2d_1" not in made.quantized_nodes
    assert "node_conv2d_3" in made.quantized_nodes
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
    made = quantize(info, calibration, "ort-cpu", keep_fp32=("bn2",))
    assert {node.name for node in made.left_nodes} == {"conv2", "bn2"}
    assert any(note.startswith("6 nodes were folded into 3 before") for note in made.notes)


def old_opset(opset):
    proto = models.conv()
    proto.opset_import[0].version = opset
    proto.ir_version = 6
    return proto


def test_an_old_opset_is_raised_and_told():
    info, calibration = calibrated(old_opset(11), np.ones((4, 3, 32, 32), np.float32))
    made = quantize(info, calibration, "ort-cpu")
    assert "opset 11 was raised to 13, which quantized graphs need" in made.notes
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
    made = quantize(info, calibration, "ort-cpu")
    assert sorted(tmp_path.iterdir()) == before
    assert "Conv:c1" in made.quantized_nodes
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
    made = quantize(info, calibration, "ort-cpu")
    assert made.left_nodes == ()
    assert cosine(run(proto.SerializeToString(), {"x": data})[0], run(made.data, {"x": data})[0]) > 0.99


def test_without_vnni_weights_take_seven_bits(monkeypatch):
    from xpuruntime.engines.quantization import quantized

    def reduced(style):
        import msgspec

        return msgspec.structs.replace(style, reduced=True)

    monkeypatch.setattr(quantized, "for_this_cpu", reduced)
    made = made_from("convnet", "ort-cpu")
    proto = graph_of(made)
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.INT8:
            assert np.abs(numpy_helper.to_array(tensor).astype(int)).max() <= 64
    assert "int8 weights of 7 bits" in made.notes[0]


def test_styles_know_the_processor(monkeypatch):
    from types import SimpleNamespace

    from xpuruntime import _core
    from xpuruntime.engines.quantization import style

    def machine(name, features):
        manager = SimpleNamespace(get_all_devices=lambda: [SimpleNamespace(features=features)])
        monkeypatch.setattr(_core, "DeviceManager", SimpleNamespace(instance=lambda: manager))
        monkeypatch.setattr(style.platform, "machine", lambda: name)
        return {name for name, one in STYLES.items() if style.for_this_cpu(one).reduced}

    assert machine("x86_64", ["avx2", "avx512f"]) == {"ort-cpu", "openvino", "openvino-nncf"}
    assert machine("AMD64", ["avx512_vnni"]) == set()
    assert machine("aarch64", []) == set()


@needs_nncf
@pytest.mark.slow
@pytest.mark.parametrize("name", part(["encoder", "convnet"], 2))
def test_nncf_quantizes_in_a_process_of_its_own(name, capfd, tmp_path, monkeypatch):
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
