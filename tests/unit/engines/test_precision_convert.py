# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`convert`: models to fp16 and bf16, run and compared with fp32, and the rounding of their weights."""

from __future__ import annotations

import numpy as np
import onnx
import precision_models as zoo
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator
from precision_models import run_ort, verify

from xpuruntime.engines.model import inspect_bytes, inspect_model
from xpuruntime.engines.precision import convert, probe_feeds
from xpuruntime.engines.precision.rewrite import round_tensor, round_values
from xpuruntime.errors import ModelError
from xpuruntime.evidence.tolerances import TOLERANCES

MODELS = [zoo.mlp, zoo.convnet, zoo.encoder, zoo.branch, zoo.loop]
TYPES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


def run_reference(model):
    """Return a function that runs a model on ONNX's own evaluator, which computes bf16 through ml_dtypes."""
    evaluator = ReferenceEvaluator(model)
    return lambda feeds: dict(zip(evaluator.output_names, evaluator.run(None, feeds), strict=True))


def feeds_for(info, make, seed=0):
    overrides = {"count": np.array(3)} if make is zoo.loop else {}
    return probe_feeds(info, seed=seed, overrides=overrides, dims={"N": 4, "B": 2, "S": 7})


def nodes_of(proto):
    from xpuruntime.engines.model.graph import graphs

    return [node for graph in graphs(proto) for node in graph.node]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("make", MODELS)
def test_agrees_with_fp32_where_every_node_really_rounds(make, precision):
    """ONNX Runtime's CPU provider may drop casts between nodes; ONNX's own evaluator rounds after each."""
    model = make()
    info = inspect_bytes(model)
    converted = convert(info, precision)
    onnx.checker.check_model(converted.proto, full_check=True)
    feeds = feeds_for(info, make)
    result = verify(run_reference(model), run_reference(converted.proto), feeds, TOLERANCES[precision])
    assert result.passed, str(result)
    assert result.max_abs > 0


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("make", MODELS)
def test_weights_have_the_new_type(make, precision):
    converted = convert(inspect_bytes(make()), precision)
    types = {t.data_type for t in converted.proto.graph.initializer if t.data_type not in (6, 7, 9)}
    assert types == {TYPES[precision]}
    assert converted.converted_weights == inspect_bytes(make()).weights["float32"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("make", MODELS)
def test_converting_twice_gives_the_same_bytes(make, precision):
    first = convert(inspect_bytes(make()), precision, keep_fp32_nodes=["ln_*"])
    second = convert(inspect_bytes(make()), precision, keep_fp32_nodes=["ln_*"])
    assert first.serialized() == second.serialized()
    assert first.notes == second.notes


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("make", MODELS)
def test_every_source_node_keeps_its_name_and_each_name_is_one_node(make, precision):
    info = inspect_bytes(make())
    converted = convert(info, precision)
    names = [node.name for node in nodes_of(converted.proto)]
    assert len(names) == len(set(names))
    lifted = {n.name for n in info.nodes if n.op == "Constant"}
    assert {n.name for n in info.nodes} - lifted <= set(names)
    assert set(names) - {n.name for n in info.nodes} == set(converted.inserted_casts)


def test_nodes_kept_by_a_rule_read_fp32_weights_untouched():
    model = zoo.encoder()
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    converted = convert(inspect_bytes(model), "fp16", keep_fp32_nodes=["ln_*", "mask_mul"])
    assert {k.name for k in converted.kept_nodes} == {"ln_0", "ln_1", "ln_2", "mask_mul"}
    assert all("rule" in k.reason for k in converted.kept_nodes)
    found = {t.name: t for t in converted.proto.graph.initializer}
    for name in ("g0", "h1", "lowest"):
        assert found[name].data_type == TensorProto.FLOAT
        np.testing.assert_array_equal(numpy_helper.to_array(found[name]), weights[name])
    assert found["wq"].data_type == TensorProto.FLOAT16
    assert converted.clamped_weights == 0
    assert not any("too large" in note for note in converted.notes)


def test_keeping_all_nodes_changes_nothing_in_the_result():
    model = zoo.encoder()
    info = inspect_bytes(model)
    converted = convert(info, "fp16", keep_fp32_nodes=["*"])
    assert not converted.changed
    assert converted.inserted_casts == ()
    assert "nothing was converted to fp16: its nodes stay in fp32" in converted.notes
    feeds = feeds_for(info, zoo.encoder)
    np.testing.assert_array_equal(run_ort(model)(feeds)["hidden"], run_ort(converted.proto)(feeds)["hidden"])


NEIGHBOURS = """<ir_version: 8, opset_import: ["": 17]>
    g (float[N,4] x) => (float[N,4] y) {
        [a] a = Relu(x)  [square] s = Mul(a, a)  [sum] t = Add(s, a)  [root] r = Sqrt(t)  [end] y = Neg(r) }"""


def test_neighbours_kept_in_fp32_pass_fp32_to_each_other():
    """Squares of values near 300 overflow fp16: they must not pass through it between two nodes that are kept."""
    model = parser.parse_model(NEIGHBOURS)
    info = inspect_bytes(model)
    feeds = {"x": np.full((1, 4), 300, np.float32)}
    with np.errstate(over="ignore"):
        assert np.isinf(run_reference(convert(info, "fp16").proto)(feeds)["y"]).all()
    converted = convert(info, "fp16", keep_fp32_nodes=["square", "sum", "root"])
    result = run_reference(converted.proto)(feeds)["y"]
    np.testing.assert_allclose(result, run_ort(model)(feeds)["y"], rtol=1e-3)
    assert len(converted.inserted_casts) == 4  # at the two ends, and into and out of the kept part: each once


def test_weights_outside_the_range_are_counted_and_stay_finite():
    model = zoo.mlp()
    values = np.zeros(32, np.float32)
    values[:4] = (1e6, -1e30, 1e-9, -1e-12)
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(values, "b1"))
    converted = convert(inspect_bytes(model), "fp16")
    assert converted.clamped_weights == 4
    assert "2 weights were too large for fp16 and took its largest value" in converted.notes
    assert "2 weights were too small for fp16 and took its smallest value" in converted.notes
    array = numpy_helper.to_array(next(t for t in converted.proto.graph.initializer if t.name == "b1"))
    np.testing.assert_array_equal(array[:4], np.array([65504, -65504, 6e-8, -6e-8], np.float16))
    assert convert(inspect_bytes(model), "bf16").clamped_weights == 0


def test_operators_the_engine_lacks_stay_in_fp32():
    info = inspect_bytes(zoo.mlp())
    converted = convert(info, "bf16", supported_ops=frozenset({"Gemm"}))
    assert converted.converted_nodes == ("fc1", "fc2")
    assert {k.op: k.reason for k in converted.kept_nodes} == {
        "Relu": "the engine has no bf16 kernel for Relu",
        "Softmax": "the engine has no bf16 kernel for Softmax",
    }
    result = verify(
        run_reference(info.named_proto()), run_reference(converted.proto), feeds_for(info, zoo.mlp), TOLERANCES["bf16"]
    )
    assert result.passed, str(result)


def test_operators_without_the_type_in_this_opset_name_the_opset_that_brings_it():
    converted = convert(inspect_bytes(zoo.convnet(opset=17)), "bf16")
    kept = {k.name: k.reason for k in converted.kept_nodes}
    assert kept["conv1"] == "Conv (version 11) has no bf16 form; opset 22 brings it"
    assert "relu1" in converted.converted_nodes
    assert convert(inspect_bytes(zoo.convnet(opset=22)), "bf16").kept_nodes == ()


def test_bf16_needs_opset_13():
    with pytest.raises(ModelError, match=r"needs opset 13 or later, and the model has opset 12.*version_converter"):
        convert(inspect_bytes(zoo.mlp(opset=12)), "bf16")


def test_a_model_in_fp16_already_is_returned_as_it_is():
    model = convert(inspect_bytes(zoo.mlp()), "fp16").proto
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    nodes = [n for n in model.graph.node if n.op_type != "Cast"]
    nodes[0].input[0], nodes[-1].output[0] = "x", "y"
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    info = inspect_bytes(model)
    converted = convert(info, "fp16")
    assert not converted.changed
    assert converted.notes == ("nothing was converted to fp16: it has no fp32 values (weights: 808 float16)",)
    assert converted.proto == info.named_proto()


def test_external_data_is_read_in(tmp_path):
    model = zoo.encoder()
    path = zoo.save(zoo.encoder(), tmp_path / "m.onnx", save_as_external_data=True, location="w", size_threshold=0)
    converted = convert(inspect_model(path), "fp16")
    assert not any(t.external_data for t in converted.proto.graph.initializer)
    assert converted.serialized() == convert(inspect_bytes(model), "fp16").serialized()


def test_more_than_two_gib_is_written_with_external_data(tmp_path, monkeypatch):
    monkeypatch.setattr("xpuruntime.engines.precision.conversion.MAX_PROTOBUF", (64 << 20) + 1000)
    info = inspect_bytes(zoo.encoder())
    converted = convert(info, "fp16")
    with pytest.raises(ModelError, match=r"more than 2 GiB.*write"):
        converted.serialized()
    path = converted.write(tmp_path)
    assert (tmp_path / "model.onnx.data").exists()
    feeds = feeds_for(info, zoo.encoder)
    result = verify(run_ort(info.named_proto()), run_ort(str(path)), feeds, TOLERANCES["fp16"])
    assert result.passed, str(result)


def test_old_ir_where_weights_are_inputs_too():
    model = zoo.mlp(opset=9)
    model.graph.node[-1].attribute[0].i = 1
    model.ir_version = 3
    for name, shape in (("w1", [32, 16]), ("b1", [32]), ("w2", [8, 32]), ("b2", [8])):
        model.graph.input.append(helper.make_tensor_value_info(name, 1, shape))
    info = inspect_bytes(model)
    converted = convert(info, "fp16")
    assert converted.converted_weights == 808
    assert "IR version 3 was raised to 4, which keeps weights apart from inputs" in converted.notes
    assert [v.name for v in converted.proto.graph.input] == ["x"]


def test_functions_are_inlined():
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "mine": 1]>
    g (float[N,4] x) => (float[N,4] y) { a = mine.gate(x)  y = mine.gate(a) }
    <domain: "mine", opset_import: ["": 17]> gate (u) => (v) { s = Sigmoid(u)  v = Mul(u, s) }""")
    info = inspect_bytes(model)
    converted = convert(info, "fp16")
    assert "1 model-local functions were inlined" in converted.notes
    assert len(converted.converted_nodes) == 4
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}
    result = verify(run_ort(model), run_ort(converted.proto), feeds, TOLERANCES["fp16"])
    assert result.passed, str(result)


def sample():
    """All kinds of fp32: every exponent and sign, ties, limits, and random bits."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    ties = (random.integers(0, 1 << 16, 5000).astype(np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, ties + 1, ties - 1]).view(np.float32)
    edges = np.array([0, -0.0, np.inf, -np.inf, 65504, 65519.9, 65520, 2**-24, 2**-25, 1e-45, 3.4e38], np.float32)
    values = np.concatenate([values, edges, -edges])
    return values[~np.isnan(values)]


def test_bf16_rounds_as_ml_dtypes_where_it_stays_in_range():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = sample()
    rounded = round_values(values, TensorProto.BFLOAT16)
    want = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    outside = ((want & 0x7FFF) == 0x7F80) & np.isfinite(values) | ((want & 0x7FFF) == 0) & (values != 0)
    np.testing.assert_array_equal(rounded.bits[~outside], want[~outside])
    assert rounded.over + rounded.under == outside.sum() > 0
    assert set(rounded.bits[outside] & 0x7FFF) <= {0x7F7F, 1}


def test_fp16_rounds_as_the_library_converter():
    from onnxruntime.transformers.float16 import convert_np_to_float16

    values = sample()
    rounded = round_values(values, TensorProto.FLOAT16)
    want = convert_np_to_float16(values)
    np.testing.assert_array_equal(rounded.bits, want.view(np.uint16))
    assert rounded.over == (np.isfinite(values) & (np.abs(values) > 65504)).sum()


def test_large_tensors_are_rounded_in_blocks_like_small_ones(monkeypatch):
    monkeypatch.setattr("xpuruntime.engines.precision.rewrite._BLOCK", 1000)
    values = sample()[:5500]
    made, rounded = round_tensor(numpy_helper.from_array(values, "w"), TensorProto.FLOAT16)
    whole = round_values(values, TensorProto.FLOAT16)
    np.testing.assert_array_equal(np.frombuffer(made.raw_data, "<u2"), whole.bits)
    assert (rounded.over, rounded.under) == (whole.over, whole.under)


@pytest.mark.parametrize("target", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_nan_and_infinity_stay(target):
    rounded = round_values(np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32), target)
    quiet = np.frombuffer(np.uint32(0x7F800001).tobytes(), np.float32)  # a NaN whose bits would round to infinity
    mask, top = (0x7FFF, 0x7C00) if target == TensorProto.FLOAT16 else (0x7FFF, 0x7F80)
    assert ((rounded.bits[:2] & mask) > top).all()
    np.testing.assert_array_equal(rounded.bits[2:] & mask, top)
    assert (round_values(quiet, target).bits & mask > top).all()
    assert rounded.over == rounded.under == 0
