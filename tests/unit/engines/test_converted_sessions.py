# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Converted and quantized sessions of ordinary graphs: they open, agree with ONNX Runtime in fp32, or say why not."""

import subprocess
import sys

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import xpuruntime as xrt

N, V, FLOAT = helper.make_node, helper.make_tensor_value_info, TensorProto.FLOAT


def arr(name, *shape):
    return numpy_helper.from_array(np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32), name)


def const(name, value, dtype=np.float32):
    return numpy_helper.from_array(np.asarray(value, dtype), name)


def save(path, nodes, inputs, weights, shape=None, opset=17):
    graph = helper.make_graph(nodes, "g", inputs, [V("y", FLOAT, shape)], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return str(path)


def raw(path, feeds):
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)[0]


def transposed_product(path):
    """Build what ONNX Runtime's optimizers crash on at level all, in fp16."""
    nodes = [N("Transpose", ["x"], ["t"], perm=[1, 0, 2]), N("MatMul", ["t", "w"], ["y"])]
    return save(path, nodes, [V("x", FLOAT, ["s", "n", 8])], [arr("w", 8, 4)])


def written_layer_norm(path):
    nodes = [
        N("ReduceMean", ["x"], ["m"], axes=[-1]), N("Sub", ["x", "m"], ["d"]), N("Pow", ["d", "two"], ["p"]),
        N("ReduceMean", ["p"], ["v"], axes=[-1]), N("Add", ["v", "eps"], ["ve"]), N("Sqrt", ["ve"], ["s"]),
        N("Div", ["d", "s"], ["n"]), N("Mul", ["n", "g"], ["ng"]), N("Add", ["ng", "b"], ["y"]),
    ]  # fmt: skip
    weights = [const("two", 2.0), const("eps", 1e-5), arr("g", 8), arr("b", 8)]
    return save(path, nodes, [V("x", FLOAT, [2, 3, 8])], weights)


def written_gelu(path):
    nodes = [
        N("Div", ["x", "r"], ["d"]), N("Erf", ["d"], ["e"]), N("Add", ["e", "one"], ["a"]),
        N("Mul", ["x", "a"], ["m"]), N("Mul", ["m", "half"], ["y"]),
    ]  # fmt: skip
    weights = [const("r", 2**0.5), const("one", 1.0), const("half", 0.5)]
    return save(path, nodes, [V("x", FLOAT, [2, 3, 8])], weights)


def written_rms_norm(path):
    nodes = [
        N("Pow", ["x", "two"], ["p"]), N("ReduceMean", ["p"], ["v"], axes=[-1]), N("Add", ["v", "eps"], ["ve"]),
        N("Sqrt", ["ve"], ["s"]), N("Div", ["x", "s"], ["n"]), N("Mul", ["n", "g"], ["y"]),
    ]  # fmt: skip
    weights = [const("two", 2.0), const("eps", 1e-5), arr("g", 8)]
    return save(path, nodes, [V("x", FLOAT, [2, 3, 8])], weights)


def written_attention(path):
    nodes = [
        N("MatMul", ["x", "q"], ["xq"]), N("MatMul", ["x", "k"], ["xk"]), N("MatMul", ["x", "v"], ["xv"]),
        N("Transpose", ["xk"], ["kt"], perm=[0, 2, 1]), N("MatMul", ["xq", "kt"], ["s"]), N("Mul", ["s", "c"], ["sc"]),
        N("Softmax", ["sc"], ["a"], axis=-1), N("MatMul", ["a", "xv"], ["y"]),
    ]  # fmt: skip
    weights = [arr("q", 8, 8), arr("k", 8, 8), arr("v", 8, 8), const("c", 8**-0.5)]
    return save(path, nodes, [V("x", FLOAT, [2, 3, 8])], weights)


def written_softmax(path):
    nodes = [
        N("ReduceMax", ["x"], ["m"], axes=[-1]), N("Sub", ["x", "m"], ["d"]), N("Exp", ["d"], ["e"]),
        N("ReduceSum", ["e", "axes"], ["s"]), N("Div", ["e", "s"], ["y"]),
    ]  # fmt: skip
    return save(path, nodes, [V("x", FLOAT, [2, 3, 8])], [const("axes", [-1], np.int64)])


def branches(path):
    """Build an If whose branches read a value of the graph around it."""
    then = helper.make_graph([N("MatMul", ["b", "w"], ["t"])], "then", [], [V("t", FLOAT, None)])
    other = helper.make_graph([N("Exp", ["b"], ["e"])], "else", [], [V("e", FLOAT, None)])
    nodes = [
        N("ReduceSum", ["x"], ["s"], keepdims=0), N("Greater", ["s", "zero"], ["c"]), N("MatMul", ["x", "w"], ["a"]),
        N("Sigmoid", ["a"], ["b"]), N("If", ["c"], ["y"], then_branch=then, else_branch=other),
    ]  # fmt: skip
    return save(path, nodes, [V("x", FLOAT, [2, 3, 8])], [arr("w", 8, 8), const("zero", 0.0)])


def loop(path):
    """Build a Loop whose body reads a value of the graph around it."""
    body = helper.make_graph(
        [
            N("Identity", ["go"], ["on"]),
            N("MatMul", ["h", "w"], ["m"]),
            N("Add", ["m", "r"], ["n"]),
            N("Tanh", ["n"], ["o"]),
        ],
        "body",
        [V("i", TensorProto.INT64, []), V("go", TensorProto.BOOL, []), V("h", FLOAT, None)],
        [V("on", TensorProto.BOOL, []), V("o", FLOAT, None)],
    )  # fmt: skip
    nodes = [N("MatMul", ["x", "w"], ["a"]), N("Relu", ["a"], ["r"]), N("Loop", ["count", "", "r"], ["y"], body=body)]
    return save(path, nodes, [V("x", FLOAT, [2, 3, 8])], [arr("w", 8, 8), const("count", 3, np.int64)])


def scan(path):
    body = helper.make_graph(
        [N("MatMul", ["e", "w"], ["m"]), N("Add", ["h", "m"], ["n"]), N("Mul", ["n", "r"], ["o"])],
        "body",
        [V("h", FLOAT, [3, 8]), V("e", FLOAT, [3, 8])],
        [V("n", FLOAT, [3, 8]), V("o", FLOAT, [3, 8])],
    )
    nodes = [
        N("MatMul", ["x", "w"], ["a"]), N("ReduceMean", ["a"], ["r"], axes=[0], keepdims=0),
        N("Scan", ["r", "a"], ["last", "y"], num_scan_inputs=1, body=body),
    ]  # fmt: skip
    return save(path, nodes, [V("x", FLOAT, [2, 3, 8])], [arr("w", 8, 8)])


GRAPHS = [
    transposed_product, written_layer_norm, written_gelu, written_rms_norm, written_attention, written_softmax,
    branches, loop, scan,
]  # fmt: skip
SHARE = {"fp16": 1e-2, "int8": 0.15}


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
@pytest.mark.parametrize("graph", GRAPHS)
def test_converted_graphs_open_and_agree(graph, tmp_path):
    path = graph(tmp_path / "m.onnx")
    x = {"x": np.random.default_rng(7).standard_normal((2, 3, 8)).astype(np.float32)}
    want = raw(path, x)
    with xrt.InferenceSession(path, device="cpu", engine="onnxruntime", precision="fp16") as session:
        got = session.run(x)["y"]
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= SHARE["fp16"] * np.abs(want).max() + 1e-3


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
@pytest.mark.parametrize("graph", [transposed_product, written_attention, branches, loop, scan])
def test_quantized_graphs_open_and_agree(graph, tmp_path):
    path = graph(tmp_path / "m.onnx")
    random = np.random.default_rng(7)
    samples = [{"x": random.standard_normal((2, 3, 8)).astype(np.float32)} for _ in range(4)]
    want = raw(path, samples[0])
    policy = {"execution": {"device": "cpu", "engine": "onnxruntime", "precision": "int8"}}
    with xrt.InferenceSession(path, policy=policy, calibration=samples) as session:
        got = session.run(samples[0])["y"]
    assert np.abs(got - want).max() <= SHARE["int8"] * np.abs(want).max() + 2e-2


def test_a_level_that_crashes_is_refused(tmp_path):
    path = transposed_product(tmp_path / "m.onnx")
    options = {"onnxruntime": {"graph_optimization_level": "all"}}
    program = f"""
import warnings; warnings.simplefilter("ignore")
import xpuruntime as xrt
execution = {{"device": "cpu", "engine": "onnxruntime", "precision": "fp16", "provider_options": {options!r}}}
policy = {{"execution": execution}}
for _ in range(2):
    try:
        xrt.InferenceSession({path!r}, policy=policy)
    except xrt.EngineError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if ort.__version__.startswith("1.31"):
        assert len(lines) == 2
    for line in lines:
        assert "was ended by SIGSEGV" in line
        assert "graph_optimization_level: basic" in line


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
@pytest.mark.parametrize(
    ("op", "shape"), [("Add", (4,)), ("Add", ()), ("Add", (2, 1)), ("Gemm", (1, 4)), ("Gemm", (1,)), ("Gemm", (2, 4))]
)
@pytest.mark.parametrize(
    "engine", ["onnxruntime", pytest.param("openvino", marks=pytest.mark.needs_module("openvino"))]
)
def test_biases_of_every_shape_quantize(engine, op, shape, tmp_path):
    nodes = [N("MatMul", ["x", "w"], ["m"]), N("Add", ["m", "bias"], ["y"])]
    if op == "Gemm":
        nodes = [N("Gemm", ["x", "w", "bias"], ["y"], alpha=0.7, beta=0.5)]
    path = save(tmp_path / "m.onnx", nodes, [V("x", FLOAT, [2, 8])], [arr("w", 8, 4), arr("bias", *shape)])
    random = np.random.default_rng(7)
    samples = [{"x": random.standard_normal((2, 8)).astype(np.float32)} for _ in range(4)]
    want = raw(path, samples[0])
    policy = {"execution": {"device": "cpu", "engine": engine, "precision": "int8"}}
    with xrt.InferenceSession(path, policy=policy, calibration=samples) as session:
        got = session.run(samples[0])["y"]
        if engine == "onnxruntime":
            assert session.explain(samples[0]).honoured
    assert np.abs(got - want).max() <= 0.03 * np.abs(want).max() + 2e-2


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
def test_an_unsuitable_made_up_input_refuses_no_session(tmp_path):
    weights = [const("p", [0, 0, 0, 64], np.int64)]
    nodes = [N("Pad", ["x", "p"], ["a"], mode="reflect"), N("Sigmoid", ["a"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, [V("x", FLOAT, ["batch", "samples"])], weights)
    x = {"x": np.random.default_rng(0).standard_normal((1, 576)).astype(np.float32)}
    want = raw(path, x)
    asked = {"device": "cpu", "engine": "onnxruntime", "precision": "fp16"}
    with xrt.InferenceSession(path, **asked) as session:
        assert np.abs(session.run(x)["y"] - want).max() < 1e-2
        told = " ".join(session.plan.warnings)
    assert "inconclusive" in told
    assert "refuses the generated input" in told
    assert "Fix: pass inputs as calibration" in told
    with xrt.InferenceSession(path, calibration=[x], **asked) as session:
        assert not any("inconclusive" in warning for warning in session.plan.warnings)
        told = " ".join(conversion.reason for conversion in session.explain(x).conversions)
    assert "the first calibration input" in told


def test_nothing_to_quantize_counts_products_in_branches(tmp_path):
    def branch(name):
        return helper.make_graph([N("Conv", ["x", "w"], [name])], name, [], [V(name, FLOAT, None)])

    nodes = [
        N("ReduceSum", ["x"], ["s"], keepdims=0), N("Greater", ["s", "zero"], ["c"]),
        N("If", ["c"], ["y"], then_branch=branch("t"), else_branch=branch("e")),
    ]  # fmt: skip
    weights = [arr("w", 4, 3, 3, 3), const("zero", 0.0)]
    path = save(tmp_path / "m.onnx", nodes, [V("x", FLOAT, [1, 3, 8, 8])], weights, [1, 4, 6, 6])
    x = [{"x": np.ones((1, 3, 8, 8), np.float32)}]
    with pytest.raises(xrt.ModelError, match="2 Conv are inside of If, Loop or Scan"):
        xrt.InferenceSession(path, device="cpu", engine="onnxruntime", precision="int8", calibration=x)


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
def test_quantized_models_keep_their_tolerance_in_fp16(tmp_path):
    nodes = [
        N("MatMul", ["x", "w"], ["m"]), N("Tanh", ["m"], ["t"]), N("QuantizeLinear", ["t", "s", "z"], ["q"]),
        N("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]  # fmt: skip
    weights = [arr("w", 64, 8192), const("s", 0.03), const("z", 128, np.uint8)]
    path = save(tmp_path / "m.onnx", nodes, [V("x", FLOAT, ["n", 64])], weights)
    with xrt.InferenceSession(path, device="cpu", engine="onnxruntime", precision="fp16") as session:
        told = " ".join(conversion.reason for conversion in session.explain().conversions)
    assert "outputs agree" in told


def integer_product(path, scale):
    """Build a product in integers, which fp16 does not reach, and one in floats, which it converts."""
    nodes = [
        N("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"]), N("MatMulInteger", ["q", "w8", "qz"], ["i"]),
        N("Cast", ["i"], ["f"], to=FLOAT), N("Mul", ["f", "qs"], ["m"]), N("MatMul", ["m", "w"], ["y"]),
    ]  # fmt: skip
    eights = np.random.default_rng(1).integers(-9, 9, (8, 8)).astype(np.int8)
    weights = [numpy_helper.from_array(eights, "w8"), const("w", scale * np.eye(8))]
    return save(path, nodes, [V("x", FLOAT, [2, 8])], weights)


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
def test_a_conversion_beside_integer_products_is_compared_with_fp32(tmp_path):
    x = {"x": np.random.default_rng(7).standard_normal((2, 8)).astype(np.float32)}
    options = {"device": "cpu", "engine": "onnxruntime", "precision": "fp16"}
    path = integer_product(tmp_path / "m.onnx", 0.5)
    with xrt.InferenceSession(path, **options) as session:
        assert session.plan.control("execution.precision").enforceability == "unsupported"
        report = session.explain(x, runs=1)
        assert any("probe input" in conversion.what for conversion in report.conversions)
        assert not report.honoured
    with pytest.raises(xrt.EngineError, match="does not agree with fp32"):  # 1e6 is not in the range of fp16
        xrt.InferenceSession(integer_product(tmp_path / "n.onnx", 1e6), **options)


def decoder(path, present):
    """Build two layers whose results are the cached keys and values together with the new ones."""
    shape = "[]" if present is None else f"[B, 2, {present}, 32]"
    caches = [f"{name}{layer}" for layer in (0, 1) for name in ("k", "v")]
    text = f"""<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]>
    g (float[B, S, 128] x0, int64[B, M] mask, {", ".join(f"float[B, 2, P, 32] p{cache}" for cache in caches)})
      => (float[B, S, 128] x2, {", ".join(f"float{shape} n{cache}" for cache in caches)})
    <int64[1] axis = {{1}}, int64 second = {{1}}> {{
      rows = ReduceSum <keepdims = 0> (mask, axis)
      before = Sub (rows, second)
      lengths = Cast <to = 6> (before)
      sizes = Shape (mask)
      size = Gather (sizes, second)
      total = Cast <to = 6> (size)
    """
    for layer in (0, 1):
        for name, rows in (("q", 128), ("k", 64), ("v", 64)):
            sizes = f"K = 128, N = {rows}, bits = 4, block_size = 32"
            text += f"{name}{layer} = com.microsoft.MatMulNBits <{sizes}> (x{layer}, w{rows}, s{rows})\n"
        text += f"""a{layer}, nk{layer}, nv{layer} =
            com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>
            (q{layer}, k{layer}, v{layer}, pk{layer}, pv{layer}, lengths, total)
        x{layer + 1} = Add (x{layer}, a{layer})
        """
    proto = onnx.parser.parse_model(text + "}")
    random = np.random.default_rng(0)
    for rows in (64, 128):
        weights = random.integers(0, 256, (rows, 4, 16)).astype(np.uint8)
        scales = (random.random(rows * 4) * 0.02).astype(np.float32)
        proto.graph.initializer.extend(
            [numpy_helper.from_array(weights, f"w{rows}"), numpy_helper.from_array(scales, f"s{rows}")]
        )
    onnx.save(proto, path)
    return caches


@pytest.mark.parametrize("present", ["M", None])
def test_caches_grow_from_run_to_run_in_fp16(present, tmp_path):
    """The engine must not write the longer cache where the shorter was cast to, whatever the model calls its sizes."""
    caches = decoder(tmp_path / "m.onnx", present)
    x = np.random.default_rng(1).standard_normal((1, 8, 128)).astype(np.float32)

    def generated(precision):
        found, past = [], {f"p{cache}": np.zeros((1, 2, 0, 32), np.float32) for cache in caches}
        options = {"device": "cpu", "engine": "onnxruntime", "precision": precision, "policy": {"mode": "auto"}}
        with xrt.InferenceSession(tmp_path / "m.onnx", **options) as session:
            for start, end in ((0, 5), (5, 6), (6, 7), (7, 8)):
                results = session.run({"x0": x[:, start:end], "mask": np.ones((1, end), np.int64), **past})
                past = {f"p{cache}": results[f"n{cache}"] for cache in caches}
                found.append(results["x2"])
        assert {one.shape for one in past.values()} == {(1, 2, 8, 32)}
        return np.concatenate(found, axis=1)

    want = generated("model")
    assert np.abs(generated("fp16") - want).max() < 0.02 * np.abs(want).max()
