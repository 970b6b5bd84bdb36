# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Small ONNX models whose optimization by ONNX Runtime is known, and sessions that `observe` can instrument."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

node = helper.make_node
info = helper.make_tensor_value_info
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
_DTYPES = {1: np.float32, 10: np.float16, 7: np.int64, 9: np.bool_}


class Weights(list):
    """Initializers with reproducible values."""

    def __init__(self, seed=0):
        super().__init__()
        self.random = np.random.default_rng(seed)

    def normal(self, name, *shape, dtype=np.float32):
        return self.value(name, (self.random.standard_normal(shape) * 0.3).astype(dtype))

    def value(self, name, array):
        self.append(numpy_helper.from_array(np.asarray(array), name))
        return name


def model(nodes, inputs, outputs, weights, opset=17, dtype=TensorProto.FLOAT, functions=(), domains=()):
    def declare(entries):
        return [info(name, kind[0] if kind else dtype, shape) for name, shape, *kind in entries]

    graph = helper.make_graph(nodes, "graph", declare(inputs), declare(outputs), list(weights))
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    result = helper.make_model(graph, opset_imports=opsets, functions=list(functions))
    result.ir_version = 9
    onnx.checker.check_model(result)
    return result


def conv_net():
    """Conv, Relu, Conv + BatchNormalization + residual Add + Relu, Identity, pooling, MatMul + Add."""
    w = Weights()
    w.normal("w1", 16, 3, 3, 3), w.normal("b1", 16), w.normal("w2", 16, 16, 3, 3)
    w.normal("g", 16), w.normal("b", 16), w.normal("m", 16), w.value("v", np.ones(16, np.float32))
    w.normal("wf", 16, 10), w.normal("bf", 10)
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1_y"], name="c1", pads=[1] * 4),
        node("Relu", ["c1_y"], ["c1_r"], name="c1_relu"),
        node("Conv", ["c1_r", "w2"], ["c2_y"], name="c2", pads=[1] * 4),
        node("BatchNormalization", ["c2_y", "g", "b", "m", "v"], ["bn_y"], name="bn"),
        node("Add", ["bn_y", "c1_r"], ["a_y"], name="add"),
        node("Relu", ["a_y"], ["a_r"], name="add_relu"),
        node("Identity", ["a_r"], ["id_y"], name="identity"),
        node("GlobalAveragePool", ["id_y"], ["gap_y"], name="gap"),
        node("Flatten", ["gap_y"], ["flat"], name="flatten"),
        node("MatMul", ["flat", "wf"], ["mm"], name="matmul"),
        node("Add", ["mm", "bf"], ["y"], name="bias"),
    ]
    return model(nodes, [("x", [1, 3, 16, 16])], [("y", [1, 10])], w)


def branching_conv_net():
    """Two convolution branches, concatenation, pooling, depthwise, transposes at the end."""
    w = Weights()
    (
        w.normal("w0", 16, 16, 3, 3),
        w.normal("w1", 16, 16, 1, 1),
        w.normal("w2", 32, 1, 3, 3),
        w.normal("w3", 16, 32, 1, 1),
    )
    nodes = [
        node("Conv", ["x", "w0"], ["p"], name="left", pads=[1] * 4),
        node("Conv", ["x", "w1"], ["q"], name="right"),
        node("Relu", ["q"], ["qr"], name="right_relu"),
        node("Concat", ["p", "qr"], ["cat"], name="concat", axis=1),
        node("Conv", ["cat", "w2"], ["d"], name="depthwise", pads=[1] * 4, group=32),
        node("Sigmoid", ["d"], ["s"], name="sigmoid"),
        node("MaxPool", ["s"], ["mp"], name="maxpool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["mp", "w3"], ["e"], name="last"),
        node("Add", ["e", "e"], ["f"], name="double"),
        node("Transpose", ["f"], ["y"], name="to_nhwc", perm=[0, 2, 3, 1]),
    ]
    return model(nodes, [("x", [1, 16, 8, 8])], [("y", [1, 4, 4, 16])], w)


def mlp():
    """Five dense layers; no node has a name of its own choosing."""
    w = Weights()
    nodes, last = [], "x"
    for i in range(5):
        w.normal(f"w{i}", 16, 16), w.normal(f"b{i}", 16)
        nodes += [
            node("MatMul", [last, f"w{i}"], [f"m{i}"], name=f"mm{i}"),
            node("Add", [f"m{i}", f"b{i}"], [f"a{i}"], name=f"add{i}"),
            node("Relu", [f"a{i}"], [f"r{i}"], name=f"relu{i}"),
        ]
        last = f"r{i}"
    nodes.append(node("Softmax", [last], ["y"], name="softmax"))
    return model(nodes, [("x", [2, 16])], [("y", [2, 16])], w)


def transformer(batch=1, length=8, width=16, heads=2):
    """One block written out in primitive operators: LayerNorm, attention, Erf-GELU, residuals."""
    w, nodes = Weights(), []

    def const(name, value):
        return w.value(name, value)

    def norm(x, p):
        const(f"{p}two", np.float32(2)), const(f"{p}eps", np.float32(1e-5))
        const(f"{p}g", np.ones(width, np.float32)), const(f"{p}b", np.zeros(width, np.float32))
        nodes.extend(
            [
                node("ReduceMean", [x], [f"{p}m"], name=f"{p}mean1", axes=[-1]),
                node("Sub", [x, f"{p}m"], [f"{p}d"], name=f"{p}sub"),
                node("Pow", [f"{p}d", f"{p}two"], [f"{p}p"], name=f"{p}pow"),
                node("ReduceMean", [f"{p}p"], [f"{p}v"], name=f"{p}mean2", axes=[-1]),
                node("Add", [f"{p}v", f"{p}eps"], [f"{p}ve"], name=f"{p}add_eps"),
                node("Sqrt", [f"{p}ve"], [f"{p}s"], name=f"{p}sqrt"),
                node("Div", [f"{p}d", f"{p}s"], [f"{p}n"], name=f"{p}div"),
                node("Mul", [f"{p}n", f"{p}g"], [f"{p}ng"], name=f"{p}scale"),
                node("Add", [f"{p}ng", f"{p}b"], [f"{p}o"], name=f"{p}shift"),
            ]
        )
        return f"{p}o"

    def dense(x, p, inside, outside):
        w.normal(f"{p}w", inside, outside), w.normal(f"{p}bias", outside)
        nodes.append(node("MatMul", [x, f"{p}w"], [f"{p}mm"], name=f"{p}matmul"))
        nodes.append(node("Add", [f"{p}bias", f"{p}mm"], [f"{p}o"], name=f"{p}add"))
        return f"{p}o"

    def split(x, p, perm):
        const(f"{p}shape", np.array([0, 0, heads, width // heads], np.int64))
        nodes.append(node("Reshape", [x, f"{p}shape"], [f"{p}r"], name=f"{p}reshape"))
        nodes.append(node("Transpose", [f"{p}r"], [f"{p}t"], name=f"{p}transpose", perm=perm))
        return f"{p}t"

    x = norm("x", "ln0_")
    q = split(dense(x, "q_", width, width), "qs_", [0, 2, 1, 3])
    k = split(dense(x, "k_", width, width), "ks_", [0, 2, 3, 1])
    v = split(dense(x, "v_", width, width), "vs_", [0, 2, 1, 3])
    const("scale", np.float32(np.sqrt(width // heads))), const("joined", np.array([0, 0, width], np.int64))
    nodes += [
        node("MatMul", [q, k], ["qk"], name="qk_matmul"),
        node("Div", ["qk", "scale"], ["qks"], name="qk_div"),
        node("Softmax", ["qks"], ["att"], name="att_softmax", axis=-1),
        node("MatMul", ["att", v], ["av"], name="av_matmul"),
        node("Transpose", ["av"], ["avt"], name="av_transpose", perm=[0, 2, 1, 3]),
        node("Reshape", ["avt", "joined"], ["avr"], name="av_reshape"),
    ]
    o = dense("avr", "o_", width, width)
    nodes.append(node("Add", [o, "x"], ["res"], name="res_add"))
    f = dense(norm("res", "ln1_"), "f1_", width, 4 * width)
    const("root2", np.float32(np.sqrt(2))), const("one", np.float32(1)), const("half", np.float32(0.5))
    nodes += [
        node("Div", [f, "root2"], ["g1"], name="gelu_div"),
        node("Erf", ["g1"], ["g2"], name="gelu_erf"),
        node("Add", ["g2", "one"], ["g3"], name="gelu_add"),
        node("Mul", [f, "g3"], ["g4"], name="gelu_mul"),
        node("Mul", ["g4", "half"], ["g5"], name="gelu_half"),
    ]
    o = dense("g5", "f2_", 4 * width, width)
    nodes.append(node("Add", [o, "res"], ["res2"], name="res2_add"))
    nodes.append(node("Identity", [norm("res2", "ln2_")], ["y"], name="out_identity"))
    return model(nodes, [("x", [batch, length, width])], [("y", [batch, length, width])], w)


def quantized(scale=0.02):
    """A QDQ model: Conv + Relu, MaxPool, then float again. Weights of 7 bits, whose products no processor cuts off."""
    w = Weights()
    w.value("s", np.float32(scale)), w.value("sw", np.float32(0.01)), w.value("sb", np.float32(scale * 0.01))
    w.value("z", np.uint8(128)), w.value("zw", np.int8(0)), w.value("zb", np.int32(0))
    w.value("wq", w.random.integers(-60, 60, (4, 3, 3, 3)).astype(np.int8)), w.value("bq", np.zeros(4, np.int32))
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["xq"], name="q0"),
        node("DequantizeLinear", ["xq", "s", "z"], ["xd"], name="dq0"),
        node("DequantizeLinear", ["wq", "sw", "zw"], ["wd"], name="dq_w"),
        node("DequantizeLinear", ["bq", "sb", "zb"], ["bd"], name="dq_b"),
        node("Conv", ["xd", "wd", "bd"], ["c"], name="conv", pads=[1] * 4),
        node("QuantizeLinear", ["c", "s", "z"], ["cq"], name="q1"),
        node("DequantizeLinear", ["cq", "s", "z"], ["cd"], name="dq1"),
        node("MaxPool", ["cd"], ["p"], name="pool", kernel_shape=[2, 2]),
        node("QuantizeLinear", ["p", "s", "z"], ["pq"], name="q2"),
        node("DequantizeLinear", ["pq", "s", "z"], ["pd"], name="dq2"),
        node("Add", ["pd", "pd"], ["a"], name="add"),
        node("Softmax", ["a"], ["y"], name="softmax"),
    ]
    return model(nodes, [("x", [1, 3, 8, 8])], [("y", [1, 4, 7, 7])], w)


def control_flow():
    """An If decided at run time, one with a constant condition, and a Loop; branches use equal names."""

    def branch(name, op):
        nodes = [node(op, ["r"], ["t"], name=name), node("Neg", ["t"], ["o"], name=f"{name}_neg")]
        return helper.make_graph(nodes, name, [], [info("o", TensorProto.FLOAT, [2, 3])])

    body = helper.make_graph(
        [
            node("Add", ["state", "r"], ["state2"], name="body_add"),
            node("Identity", ["c"], ["c2"], name="body_identity"),
        ],
        "body",
        [info("i", TensorProto.INT64, []), info("c", TensorProto.BOOL, []), info("state", TensorProto.FLOAT, [2, 3])],
        [info("c2", TensorProto.BOOL, []), info("state2", TensorProto.FLOAT, [2, 3])],
    )
    w = Weights()
    w.value("n", np.int64(3)), w.value("always", np.array(True))
    nodes = [
        node("Relu", ["x"], ["r"], name="relu"),
        node("If", ["cond"], ["z"], name="if_open", then_branch=branch("a", "Exp"), else_branch=branch("b", "Abs")),
        node("If", ["always"], ["z2"], name="if_fixed", then_branch=branch("c", "Exp"), else_branch=branch("d", "Abs")),
        node("Loop", ["n", "", "z"], ["w"], name="loop", body=body),
        node("Add", ["w", "z2"], ["y"], name="final"),
    ]
    return model(nodes, [("x", [2, 3]), ("cond", [], TensorProto.BOOL)], [("y", [2, 3])], w)


def eliminations():
    """Duplicates, Dropout, an operator expanded into others, a computed shape, constants, a dead end."""
    w = Weights()
    w.normal("w", 5, 12), w.value("one", np.float32(1))
    nodes = [
        node("Relu", ["x"], ["a1"], name="twin1"),
        node("Relu", ["x"], ["a2"], name="twin2"),
        node("Add", ["a1", "a2"], ["s"], name="add"),
        node("Dropout", ["s"], ["d"], name="dropout"),
        node("HardSwish", ["d"], ["hs"], name="hardswish"),
        node("Shape", ["hs"], ["sh"], name="shape"),
        node("Constant", [], ["k"], name="const0", value=numpy_helper.from_array(np.array([0], np.int64))),
        node("Gather", ["sh", "k"], ["g"], name="gather"),
        node("Constant", [], ["m1"], name="const1", value=numpy_helper.from_array(np.array([-1], np.int64))),
        node("Concat", ["g", "m1"], ["cc"], name="concat", axis=0),
        node("Reshape", ["hs", "cc"], ["rs"], name="reshape"),
        node("Transpose", ["w"], ["wt"], name="weight_transpose", perm=[1, 0]),
        node("MatMul", ["rs", "wt"], ["mm"], name="matmul"),
        node("Mul", ["mm", "one"], ["y"], name="times_one"),
        node("Exp", ["x"], ["dead"], name="unused"),
    ]
    return model(nodes, [("x", [2, 3, 4])], [("y", [2, 5])], w)


def half():
    """An fp16 model: the CPU provider has fp32 kernels only, and ONNX Runtime inserts casts."""
    w = Weights()
    w.normal("w", 8, 8, dtype=np.float16), w.normal("b", 8, dtype=np.float16)
    nodes = [
        node("MatMul", ["x", "w"], ["mm"], name="matmul"),
        node("Add", ["mm", "b"], ["a"], name="add"),
        node("Softmax", ["a"], ["s"], name="softmax"),
        node("Relu", ["s"], ["y"], name="relu"),
    ]
    return model(nodes, [("x", [2, 8])], [("y", [2, 8])], w, dtype=TensorProto.FLOAT16)


def local_function():
    """A function of the model itself, which ONNX Runtime expands."""
    inner = helper.make_function(
        "mine",
        "Twice",
        ["p"],
        ["q"],
        [node("Exp", ["p"], ["e"]), node("Neg", ["e"], ["n"]), node("Add", ["n", "e"], ["q"])],
        [helper.make_opsetid("", 17)],
    )
    nodes = [
        node("Relu", ["x"], ["r"], name="relu"),
        node("Twice", ["r"], ["t"], name="call1", domain="mine"),
        node("Twice", ["t"], ["u"], name="call2", domain="mine"),
        node("Abs", ["u"], ["y"], name="abs"),
    ]
    return model(nodes, [("x", [2, 3])], [("y", [2, 3])], Weights(), functions=[inner], domains=["mine"])


def passing_through():
    """Outputs that are inputs, constants, or one tensor under two names."""
    w = Weights()
    w.normal("c", 2, 3)
    nodes = [
        node("Identity", ["x"], ["y1"], name="input_identity"),
        node("Relu", ["x"], ["r"], name="relu"),
        node("Identity", ["r"], ["y2"], name="first"),
        node("Identity", ["r"], ["y3"], name="second"),
        node("Neg", ["c"], ["y4"], name="constant_neg"),
        node("Cast", ["x"], ["xc"], name="cast", to=TensorProto.DOUBLE),
        node("Cast", ["xc"], ["y5"], name="cast_back", to=TensorProto.FLOAT),
    ]
    return model(nodes, [("x", [2, 3])], [(f"y{i}", [2, 3]) for i in range(1, 6)], w)


MODELS = {
    f.__name__: f
    for f in (
        conv_net,
        branching_conv_net,
        mlp,
        transformer,
        quantized,
        control_flow,
        eliminations,
        half,
        local_function,
        passing_through,
    )
}


def random_model(seed, length=14):
    """A random graph of shape-keeping operators, with shared weights, duplicates, constants and unused ends."""
    rng = np.random.default_rng(seed)
    w = Weights(seed)
    w.normal("w0", 16, 16), w.normal("w1", 16, 16), w.normal("bias", 16), w.value("one", np.float32(1))
    w.value("shape", np.array([4, 16], np.int64)), w.value("two", np.float32(2))
    nodes, tensors = [], ["x"]
    unary = ["Relu", "Sigmoid", "Tanh", "Identity", "Neg", "Abs", "Dropout", "Softmax", "HardSwish", "Erf"]
    for i in range(length):
        a, b = (tensors[-1 - int(k)] for k in rng.integers(0, min(4, len(tensors)), 2))
        out, name, kind = f"t{i}", f"n{i}", int(rng.integers(0, 10))
        if kind < 4:
            nodes.append(node(unary[int(rng.integers(0, len(unary)))], [a], [out], name=name))
        elif kind < 6:
            nodes.append(node(str(rng.choice(["Add", "Mul", "Sub"])), [a, b], [out], name=name))
        elif kind == 6:
            nodes.append(node("MatMul", [a, str(rng.choice(["w0", "w1"]))], [out], name=name))
        elif kind == 7:
            nodes.append(node("Add", [a, str(rng.choice(["bias", "one"]))], [out], name=name))
        elif kind == 8:
            nodes.append(node("Transpose", [a], [f"{out}_t"], name=f"{name}_t", perm=[1, 0]))
            nodes.append(node("Transpose", [f"{out}_t"], [out], name=name, perm=[1, 0]))
        else:
            nodes.append(node("Neg", ["two"], [f"{out}_k"], name=f"{name}_k"))
            nodes.append(node("Mul", [a, f"{out}_k"], [out], name=name))
        tensors.append(out)
    return model(nodes, [("x", [4, 16])], [(tensors[-1], [4, 16]), (tensors[-3], [4, 16])], w)


def random_conv_model(seed, length=16):
    """A random net of convolutions, activations, residuals, normalizations, poolings and layout changes."""
    rng = np.random.default_rng(seed)
    w = Weights(seed)
    nodes, tensors = [], ["x"]
    for i in range(length):
        a, b = (tensors[-1 - int(k)] for k in rng.integers(0, min(3, len(tensors)), 2))
        out, name, kind = f"t{i}", f"n{i}", int(rng.integers(0, 9))
        if kind < 3:
            size = int(rng.choice([1, 3]))
            w.append(
                helper.make_tensor(
                    f"w{i}", TensorProto.FLOAT, [16, 16, size, size], rng.standard_normal(256 * size * size) / 9
                )
            )
            nodes.append(node("Conv", [a, f"w{i}"], [out], name=name, pads=[size // 2] * 4))
        elif kind == 3:
            nodes.append(node(str(rng.choice(["Relu", "Sigmoid", "Tanh", "HardSigmoid"])), [a], [out], name=name))
        elif kind == 4:
            nodes.append(node("Add", [a, b], [out], name=name))
        elif kind == 5:
            for part in "gbm":
                w.append(helper.make_tensor(f"{part}{i}", TensorProto.FLOAT, [16], rng.standard_normal(16)))
            w.value(f"v{i}", np.ones(16, np.float32))
            nodes.append(node("BatchNormalization", [a, f"g{i}", f"b{i}", f"m{i}", f"v{i}"], [out], name=name))
        elif kind == 6:
            nodes.append(node("MaxPool", [a], [out], name=name, kernel_shape=[3, 3], pads=[1] * 4))
        elif kind == 7:
            nodes.append(node("Transpose", [a], [f"{out}_t"], name=f"{name}_t", perm=[0, 2, 3, 1]))
            nodes.append(node("Relu", [f"{out}_t"], [f"{out}_r"], name=f"{name}_r"))
            nodes.append(node("Transpose", [f"{out}_r"], [out], name=name, perm=[0, 3, 1, 2]))
        else:
            nodes.append(node("Identity", [a], [out], name=name))
        tensors.append(out)
    nodes.append(node("GlobalAveragePool", [tensors[-1]], ["pooled"], name="pool"))
    read = {k for n in nodes for k in n.input}
    ends = [(t, [1, 16, 6, 6]) for t in tensors[1:] if t not in read]
    return model(nodes, [("x", [1, 16, 6, 6])], [("pooled", [1, 16, 1, 1]), *ends], w)


def feeds(proto, seed=1):
    rng = np.random.default_rng(seed)
    result = {}
    for i in proto.graph.input:
        shape = [d.dim_value or 2 for d in i.type.tensor_type.shape.dim]
        result[i.name] = np.asarray(rng.random(shape) * 2 - 0.5).astype(_DTYPES[i.type.tensor_type.elem_type])
    return result


def maker(proto, level="ORT_ENABLE_ALL"):
    """Return what `observe` calls to make an instrumented session."""
    import onnxruntime

    from xpuruntime.engines.onnxruntime.observing.instrumented_run import instrument

    def make(prefix, path):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        instrument(options, prefix, path)
        return onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"], enable_fallback=0
        )

    return make
