# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`inspect_model` on sound models: facts, names, order, and what it leaves alone."""

from __future__ import annotations

import hashlib
import json

import msgspec
import numpy as np
import onnx
import precision_models as zoo
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from xpuruntime.engines.model import ModelInfo, TensorInfo, inspect_bytes, inspect_model
from xpuruntime.errors import ModelError


def test_facts_of_a_model(tmp_path):
    info = inspect_model(zoo.save(zoo.encoder(), tmp_path / "m.onnx"))
    assert info.inputs == (
        TensorInfo(name="ids", dtype="int64", shape=("B", "S")),
        TensorInfo(name="attention_mask", dtype="int64", shape=("B", "S")),
    )
    assert info.outputs == (TensorInfo(name="hidden", dtype="float32", shape=("B", "S", 32)),)
    assert info.ops["MatMul"] == 8
    assert info.ops["LayerNormalization"] == 3
    assert info.opsets == {"": 17}
    assert info.ir_version == 8
    assert info.nodes[1].name == "ln_0"
    assert info.nodes[1].inputs == ("e", "g0", "h0")
    assert info.size == (tmp_path / "m.onnx").stat().st_size
    assert not info.needs_renaming
    assert not info.has_external_data


def test_weight_shares_count_elements(tmp_path):
    model = zoo.mlp()
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(808, np.float16), "half"))
    info = inspect_bytes(model)
    assert info.weights == {"float32": 808, "float16": 808}
    assert info.weight_share("float32") == 0.5
    assert info.weight_share("float16", "float32") == 1.0
    assert info.weight_share("int8") == 0.0


def test_every_dtype_has_a_name():
    for name, number in TensorProto.DataType.items():
        if number == 0:
            continue
        value = helper.make_tensor_value_info("x", number, [1])
        out = helper.make_tensor_value_info("y", number, [1])
        model = helper.make_model(helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [out]))
        dtype = inspect_bytes(model).inputs[0].dtype
        expected = {"FLOAT": "float32", "DOUBLE": "float64"}.get(name, name.lower())
        assert dtype == expected


def test_shapes_known_symbolic_unknown_and_without_rank():
    x = helper.make_tensor_value_info("x", 1, ["N", None, 3, 0])
    y = helper.make_tensor_value_info("y", 1, None)
    info = inspect_bytes(helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])))
    assert info.inputs[0].shape == ("N", None, 3, 0)
    assert info.outputs[0].shape is None


def test_nameless_and_duplicate_nodes_get_stable_unique_names(tmp_path):
    model = zoo.mlp(unnamed=True)
    model.graph.node[0].name = "layer"
    model.graph.node[2].name = "layer"
    info = inspect_model(zoo.save(model, tmp_path / "m.onnx"))
    assert [n.name for n in info.nodes] == ["layer", "Relu:a", "Gemm:g", "Softmax:y"]
    assert info.renamed == ("Relu:a", "Gemm:g", "Softmax:y")
    assert info.needs_renaming
    assert [n.name for n in info.named_proto().graph.node] == [n.name for n in info.nodes]
    assert inspect_bytes(info.serialized_named()).renamed == ()


def test_a_made_up_name_never_takes_that_of_another_node():
    model = zoo.mlp(unnamed=True)
    model.graph.node[3].name = "Gemm:h"
    names = [n.name for n in inspect_bytes(model).nodes]
    assert names == ["Gemm:h#2", "Relu:a", "Gemm:g", "Gemm:h"]


def test_subgraph_nodes_are_listed_with_the_path_of_their_graph():
    info = inspect_bytes(zoo.branch())
    graphs = {n.name: n.graph for n in info.nodes}
    assert graphs == {
        "first": "",
        "choice": "",
        "exp": "choice/then_branch",
        "choice/then_branch/Mul:o": "choice/then_branch",
        "choice/else_branch/Neg:n": "choice/else_branch",
        "choice/else_branch/Mul:o2": "choice/else_branch",
        "last": "",
    }
    inner = info.named_proto().graph.node[1].attribute[0].g.node[1]
    assert inner.name == "choice/then_branch/Mul:o"


def test_nodes_out_of_order_are_accepted_and_put_in_order(tmp_path):
    model = zoo.mlp()
    nodes = list(model.graph.node)[::-1]
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(model)
    info = inspect_model(zoo.save(model, tmp_path / "m.onnx"))
    assert info.resorted
    assert info.needs_renaming
    assert [n.name for n in info.nodes] == ["fc1", "act", "fc2", "soft"]
    onnx.checker.check_model(info.named_proto())


def test_defaulted_inputs_are_no_required_inputs():
    model = zoo.mlp()
    model.graph.input.append(helper.make_tensor_value_info("b1", 1, [32]))
    info = inspect_bytes(model)
    assert [t.name for t in info.inputs] == ["x"]
    assert [t.name for t in info.overridable_inputs] == ["b1"]
    model.ir_version = 3
    for name, shape in (("w1", [32, 16]), ("w2", [8, 32]), ("b2", [8])):
        model.graph.input.append(helper.make_tensor_value_info(name, 1, shape))
    assert inspect_bytes(model).overridable_inputs == ()


def test_custom_domains_are_reported_not_refused():
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1, "acme": 2]>
    g (float[2] x) => (float[2] y) { a = com.microsoft.Gelu(x)  b = acme.Spin(a)  y = com.microsoft.QuickGelu(b) }""")
    info = inspect_bytes(model)
    assert info.custom_domains == {"acme": ("Spin",), "com.microsoft": ("Gelu", "QuickGelu")}
    assert info.ops == {"acme:Spin": 1, "com.microsoft:Gelu": 1, "com.microsoft:QuickGelu": 1}


def test_engine_operators_in_the_default_domain_are_accepted():
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 13]>
    g (float[2,4] x, float[4] s) => (float[2,4] y) { y = SimplifiedLayerNormalization(x, s) }""")
    info = inspect_bytes(model)
    assert info.custom_domains == {"": ("SimplifiedLayerNormalization",)}
    assert info.nodes[0].domain == ""
    assert info.opsets == {"": 13}
    assert info.facts()["custom_domains"] == {"ai.onnx": ["SimplifiedLayerNormalization"]}


def test_model_local_functions_are_known_operators():
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "mine": 1]>
    g (float[2] x) => (float[2] y) { y = mine.twice(x) }
    <domain: "mine", opset_import: ["": 17]> twice (a) => (b) { b = Add(a, a) }""")
    info = inspect_bytes(model)
    assert info.functions == ("mine:twice",)


def test_quantization_is_read_from_zero_points():
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1,4] x) => (float[1,4] y) {
        q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)
        w = DequantizeLinear(wq, s, wz)  y = MatMul(d, w) }"""
    model = parser.parse_model(text)
    zoo.constant(model, "s", 0.1)
    zoo.constant(model, "z", 0, np.uint16)
    zoo.constant(model, "wz", 0, np.int8)
    zoo.constant(model, "wq", np.ones((4, 4)), np.int8)
    model.opset_import[0].version = 21
    model.ir_version = 10
    quantization = inspect_bytes(model).quantization
    assert (quantization.scheme, quantization.activations, quantization.weights) == ("qdq", ("uint16",), ("int8",))
    assert inspect_bytes(zoo.mlp()).quantization.scheme == "none"


def test_info_round_trips_hashes_and_is_json(tmp_path):
    info = inspect_model(zoo.save(zoo.branch(), tmp_path / "m.onnx"))
    again = msgspec.json.decode(msgspec.json.encode(info), type=ModelInfo)
    assert again == info
    assert hash(again) == hash(info)
    facts = json.loads(json.dumps(info.facts()))
    assert facts["sha256"] == hashlib.sha256((tmp_path / "m.onnx").read_bytes()).hexdigest()
    assert facts["node_count"] == 7
    assert "sha256" not in info.facts(digest=False)
    assert "data" not in facts


def test_a_file_that_changed_is_not_read_as_the_old_one(tmp_path):
    path = zoo.save(zoo.mlp(), tmp_path / "m.onnx")
    info = inspect_model(path)
    zoo.save(zoo.branch(), path)
    with pytest.raises(ModelError, match="changed since it was inspected"):
        info.named_proto()
    with pytest.raises(ModelError, match="changed since it was inspected"):
        _ = info.sha256
