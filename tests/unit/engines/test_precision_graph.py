# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Graphs with a difficult spot each, converted to fp16 and run on ONNX Runtime."""

from __future__ import annotations

import numpy as np
import precision_models as zoo
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from precision_models import run_ort, verify

from xpuruntime.engines.model import inspect_bytes
from xpuruntime.engines.precision import convert, probe_feeds
from xpuruntime.evidence.tolerances import TOLERANCES


def parse(body, opset=17, domains=""):
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}{domains}]> g {body}')


def both(model, feeds=None, precision="fp16", **options):
    """Convert, check and run; return the converted model after comparing it with fp32."""
    info = inspect_bytes(model)
    converted = convert(info, precision, **options)
    assert inspect_bytes(converted.proto).outputs == info.outputs
    feeds = feeds if feeds is not None else probe_feeds(info, dims={"N": 3})
    result = verify(run_ort(model), run_ort(converted.proto), feeds, TOLERANCES[precision])
    assert result.passed, str(result)
    return converted


def kept(converted):
    return {k.name: k.reason for k in converted.kept_nodes}


def test_a_weight_read_by_kept_and_converted_nodes_stays_exact_for_the_kept_one():
    model = parse("(float[N,4] x) => (float[N,4] y) { [a] a = Mul(x, w)  [b] y = Add(a, w) }")
    zoo.constant(model, "w", [1e-3, 1 / 3, 7e4, 2.0])
    converted = both(model, {"x": np.array([[1, 1, 1e-3, 1]], np.float32)}, keep_fp32_nodes=["b"])
    found = {t.name: t for t in converted.proto.graph.initializer}
    assert found["w"].data_type == TensorProto.FLOAT
    assert found["w_fp16"].data_type == TensorProto.FLOAT16
    np.testing.assert_array_equal(numpy_helper.to_array(found["w"]), np.array([1e-3, 1 / 3, 7e4, 2.0], np.float32))
    assert any("held in fp32 and in fp16" in note for note in converted.notes)


def test_indices_sent_as_floats_are_not_rounded():
    """An id of 2049 has no fp16 value: a float that only becomes an integer must not pass through fp16."""
    model = parse("""(float[N] id) => (float[N,2] y) { [i] i = Cast<to=7>(id)  [e] y = Gather(table, i) }""")
    zoo.weight(model, "table", 5000, 2, scale=1.0)
    both(model, {"id": np.array([2049, 4999, 3], np.float32)})


def test_comparisons_with_fp32_inputs_are_done_in_fp32():
    model = parse("""(float[N] x, float[N] z) => (float[N] y, bool[N] more) {
        [more] more = Greater(x, z)  [pick] y = Where(more, x, z) }""")
    x = np.array([1.0, 2.0, 1.00001], np.float32)
    both(model, {"x": x, "z": np.array([1.00001, 1.99999, 1.0], np.float32)})


def test_shape_of_a_converted_value_needs_no_cast():
    model = parse("(float[N,4] x) => (float[N,4] y) { a = Relu(x)  s = Shape(a)  y = Reshape(a, s) }")
    assert len(both(model).inserted_casts) == 2


@pytest.mark.parametrize(
    ("body", "weights"),
    {
        "an input that is an output too": ("(float[N,4] x2, float[N,4] y) { x2 = Identity(x)  y = Relu(x2) }", {}),
        "names that collide with ours": (
            "(float[N,4] y) { [one] x_fp16 = Relu(x)  y_fp16 = Neg(x_fp16)  y = Exp(y_fp16) }", {}
        ),
        "a weight that is an output": ("(float[N,4] y, float[4] w) { y = Add(x, w) }", {"w": np.ones(4)}),
        "an empty weight": ("(float[N,4] y) { y = Concat<axis=0>(x, w) }", {"w": np.zeros((0, 4))}),
        "the mean of a layer norm": (
            "(float[N,4] y, float[N,1] mean) { y, mean = LayerNormalization(x, w) }", {"w": np.ones(4)}
        ),
    }.values(),
)  # fmt: skip
def test_graphs_agree_and_keep_the_types_of_their_outputs(body, weights):
    model = parse(f"(float[N,4] x) => {body}")
    for name, values in weights.items():
        zoo.constant(model, name, values)
    both(model)


def test_weight_with_a_default_that_callers_may_replace():
    model = parse("(float[N,4] x, float[4] w) => (float[N,4] y) { y = Add(x, w) }")
    zoo.weight(model, "w", 4)
    converted = both(model)
    assert converted.proto.graph.initializer[0].data_type == TensorProto.FLOAT
    run = run_ort(converted.proto)
    x = np.ones((1, 4), np.float32)
    np.testing.assert_allclose(run({"x": x, "w": x[0]})["y"], 2 * x)


def test_constants_of_all_forms():
    model = parse("""(float[N,2] x) => (float[N,2] y, float[2] c, float[N,2] z) {
        a = Constant<value_float=0.5>()  b = Constant<value_floats=[1.5, 2.5]>()
        c = Constant<value=float[2] {3.0, 4.0}>()
        shape = Shape(x)  f = ConstantOfShape<value=float[1] {0.25}>(shape)  z0 = ConstantOfShape(shape)
        d = Mul(x, a)  e = Add(d, b)  g = Add(e, f)  h = Add(g, z0)  y = Mul(h, c)  z = Identity(z0) }""")
    converted = both(model)
    assert kept(converted) == {"Constant:c": "it is an output of the graph"}


def test_resize_keeps_scales_in_fp32():
    model = parse("""(float[1,1,4,4] x) => (float[1,1,8,8] y) {
        a = Relu(x)  [up] y = Resize<mode="nearest">(a, , scales) }""")
    zoo.constant(model, "scales", [1, 1, 2, 2])
    converted = both(model)
    assert "up" in converted.converted_nodes
    assert converted.proto.graph.initializer[0].data_type == TensorProto.FLOAT


def test_quantized_parts_stay():
    model = parse("""(float[N,4] x) => (float[N,4] y) {
        q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  m = MatMul(d, w)  y = Relu(m) }""")
    zoo.constant(model, "s", 0.05)
    zoo.constant(model, "z", 128, np.uint8)
    zoo.weight(model, "w", 4, 4)
    converted = both(model)
    assert kept(converted)["QuantizeLinear:q"] == "quantization scales stay fp32"
    assert "MatMul:m" in converted.converted_nodes
    assert any("quantized (qdq)" in note for note in converted.notes)


def test_sequences_stay():
    model = parse("""(float[N,4] x) => (float[N,4] y) {
        a = Relu(x)  s = SplitToSequence<axis=1>(a)  c = ConcatFromSequence<axis=1>(s)  y = Neg(c) }""")
    converted = both(model)
    assert kept(converted)["SplitToSequence:s"] == "sequences, maps and optionals stay fp32"


def test_library_block_list_is_kept():
    model = parse("(float[N,4] x) => (float[N,4] y) { a = Relu(x)  m = Max(a, x)  y = Neg(m) }")
    assert kept(both(model)) == {"Max:m": "ONNX Runtime's converter keeps this operator in fp32"}


def test_contrib_operators_are_typed_from_the_engines_own_signatures():
    model = parse(
        """(float[1,3,8] x, float[1,3,8] r) => (float[1,3,8] y) {
        [skip] n = com.microsoft.SkipLayerNormalization(x, r, g, b)
        [gelu] a = com.microsoft.Gelu(n)  [mm] y = MatMul(a, w) }""",
        domains=', "com.microsoft": 1',
    )
    zoo.constant(model, "g", np.ones(8))
    zoo.constant(model, "b", np.zeros(8))
    zoo.weight(model, "w", 8, 8)
    converted = convert(inspect_bytes(model), "fp16")
    assert converted.converted_nodes == ("skip", "gelu", "mm")
    assert kept(converted) == {}


def test_operators_nobody_knows_stay_and_so_does_what_depends_on_their_types():
    model = parse(
        """(float[N,4] x) => (float[N,4] y) {
        [a] a = Relu(x)  [spin] s = acme.Spin(a)  [after] t = Sqrt(s)  [bound] u = Add(t, w)  [b] y = Neg(u) }""",
        domains=', "acme": 1',
    )
    zoo.weight(model, "w", 4)
    converted = convert(inspect_bytes(model), "fp16")
    assert kept(converted) == {"spin": "the types that acme:Spin takes are not known"}
    assert converted.converted_nodes == ("a", "bound", "b")  # the weight says that `bound` computes in floats
    spin = next(n for n in converted.proto.graph.node if n.name == "spin")
    assert spin.input[0] == "a_fp32"


def test_casts_are_made_once_and_outside_of_loops():
    converted = convert(inspect_bytes(zoo.branch()), "fp16", keep_fp32_nodes=["choice/else_branch/*", "exp"])
    casts = [n for n in converted.proto.graph.node if n.op_type == "Cast"]
    assert [c.output[0] for c in casts].count("a_fp32") == 1
    inner = [n.op_type for a in converted.proto.graph.node[3].attribute for n in a.g.node]
    assert "If" in [n.op_type for n in converted.proto.graph.node]
    assert inner.count("Cast") <= 2


@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize("patterns", [(), ("exp",), ("choice/*",), ("first",), ("*",)])
def test_branches_agree_whatever_is_kept(condition, patterns):
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    both(zoo.branch(), {"x": x, "c": np.array(condition)}, keep_fp32_nodes=patterns)


@pytest.mark.parametrize("patterns", [(), ("step",), ("show", "squash"), ("start",), ("last",)])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_loops_agree_whatever_is_kept(patterns, count):
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    both(zoo.loop(), {"x": x, "count": np.array(count)}, keep_fp32_nodes=patterns)


def test_nested_branches_share_a_weight_of_the_outermost_graph():
    model = parse("""(float[N,4] x, bool c) => (float[N,4] y) {
        y = If(c) <then_branch = t () => (float[N,4] o) {
                o = If(c) <then_branch = tt () => (float[N,4] p) { p = Mul(x, w) },
                           else_branch = te () => (float[N,4] q) { q = Add(x, w) }> },
            else_branch = e () => (float[N,4] r) { r = Sub(x, w) }> }""")
    zoo.weight(model, "w", 4)
    x = np.ones((2, 4), np.float32)
    converted = both(model, {"x": x, "c": np.array(True)})
    both(model, {"x": x, "c": np.array(False)})
    assert converted.proto.graph.initializer[0].data_type == TensorProto.FLOAT16


def test_scan():
    body = parser.parse_graph("""body (float[4] s, float[4] t) => (float[4] s2, float[4] o) {
        [add] s2 = Add(s, t)  [act] o = Tanh(s2) }""")
    model = parse("(float[4] z, float[T,4] x) => (float[4] last, float[T,4] all) { a = Relu(x) }")
    node = helper.make_node("Scan", ["z", "a"], ["last", "all"], name="scan", body=body, num_scan_inputs=1)
    model.graph.node.append(node)
    converted = both(model, {"z": np.zeros(4, np.float32), "x": np.ones((3, 4), np.float32)})
    assert {"add", "act"} <= set(converted.converted_nodes)
