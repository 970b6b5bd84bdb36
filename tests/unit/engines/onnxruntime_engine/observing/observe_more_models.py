# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""More small models: what else the optimizers of ONNX Runtime rewrite."""

from __future__ import annotations

import numpy as np
from observe_models import Weights, info, model, node
from onnx import TensorProto, helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def resampling():
    """Pad into Conv, Clip, Resize, ConvTranspose, InstanceNormalization, Slice, Concat, pooling with a Transpose."""
    w = Weights()
    w.normal("w0", 16, 3, 3, 3), w.normal("w1", 16, 16, 2, 2), w.normal("w2", 16, 16, 3, 3), w.normal("b2", 16)
    (
        w.value("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)),
        w.value("low", np.float32(0)),
        w.value("high", np.float32(6)),
    )
    w.value("scales", np.array([1, 1, 2, 2], np.float32)), w.normal("is", 16), w.normal("ib", 16)
    for name, value in (("from", [0]), ("to", [8]), ("axis", [2])):
        w.value(name, np.array(value, np.int64))
    nodes = [
        node("Pad", ["x", "pads"], ["p"], name="pad"),
        node("Conv", ["p", "w0"], ["c0"], name="conv0"),
        node("Clip", ["c0", "low", "high"], ["cl"], name="clip"),
        node("Resize", ["cl", "", "scales"], ["up"], name="resize", mode="nearest"),
        node("Conv", ["up", "w2", "b2"], ["c1"], name="conv1", pads=[1] * 4, strides=[2, 2]),
        node("LeakyRelu", ["c1"], ["lr"], name="leaky", alpha=0.1),
        node("ConvTranspose", ["lr", "w1"], ["ct"], name="conv_transpose", strides=[2, 2]),
        node("InstanceNormalization", ["ct", "is", "ib"], ["inorm"], name="instance_norm"),
        node("Slice", ["inorm", "from", "to", "axis"], ["sl"], name="slice"),
        node("AveragePool", ["up"], ["ap"], name="average_pool", kernel_shape=[1, 1]),
        node("Slice", ["ap", "from", "to", "axis"], ["sl2"], name="slice2"),
        node("Concat", ["sl", "sl2"], ["cat"], name="concat", axis=1),
        node("Transpose", ["cat"], ["t"], name="to_nhwc", perm=[0, 2, 3, 1]),
        node("Relu", ["t"], ["tr"], name="relu_nhwc"),
        node("Transpose", ["tr"], ["y"], name="to_nchw", perm=[0, 3, 1, 2]),
    ]
    return model(nodes, [("x", [1, 3, 8, 8])], [("y", [1, 32, 8, 16])], w)


def channels_last():
    """As exported from a framework that puts channels last: Transposes around every convolution."""
    w = Weights()
    w.normal("w0", 16, 16, 3, 3), w.normal("w1", 16, 16, 3, 3), w.normal("bias", 16)
    nodes, last = [], "x"
    for i in range(2):
        nodes += [
            node("Transpose", [last], [f"n{i}"], name=f"in{i}", perm=[0, 3, 1, 2]),
            node("Conv", [f"n{i}", f"w{i}"], [f"c{i}"], name=f"conv{i}", pads=[1] * 4),
            node("Transpose", [f"c{i}"], [f"o{i}"], name=f"out{i}", perm=[0, 2, 3, 1]),
            node("Add", [f"o{i}", "bias"], [f"a{i}"], name=f"bias{i}"),
            node("Relu", [f"a{i}"], [f"r{i}"], name=f"relu{i}"),
        ]
        last = f"r{i}"
    nodes.append(node("Add", [last, "x"], ["y"], name="residual"))
    return model(nodes, [("x", [1, 8, 8, 16])], [("y", [1, 8, 8, 16])], w)


def activations():
    """Tanh-GELU, x*sigmoid(1.702x), bias before softmax, RMS normalization, bias before an Erf-GELU."""
    w = Weights()
    consts = {"c0": 0.044715, "c1": 0.7978846, "one": 1, "half": 0.5, "three": 3, "q": 1.702, "two": 2, "eps": 1e-6}
    for name, value in {**consts, "root2": float(np.sqrt(2))}.items():
        w.value(name, np.float32(value))
    w.normal("bias", 16), w.normal("mask", 4, 16), w.normal("gamma", 16)
    nodes = [
        node("Pow", ["x", "three"], ["g0"], name="pow3"),
        node("Mul", ["g0", "c0"], ["g1"], name="times_c0"),
        node("Add", ["x", "g1"], ["g2"], name="plus_x"),
        node("Mul", ["g2", "c1"], ["g3"], name="times_c1"),
        node("Tanh", ["g3"], ["g4"], name="tanh"),
        node("Add", ["g4", "one"], ["g5"], name="plus_one"),
        node("Mul", ["x", "half"], ["g6"], name="half_x"),
        node("Mul", ["g6", "g5"], ["gelu"], name="gelu_out"),
        node("Mul", ["gelu", "q"], ["s0"], name="times_q"),
        node("Sigmoid", ["s0"], ["s1"], name="sigmoid"),
        node("Mul", ["gelu", "s1"], ["quick"], name="quick_out"),
        node("Add", ["quick", "mask"], ["masked"], name="add_mask"),
        node("Softmax", ["masked"], ["soft"], name="softmax", axis=-1),
        node("Pow", ["soft", "two"], ["r0"], name="square"),
        node("ReduceMean", ["r0"], ["r1"], name="mean_square", axes=[-1]),
        node("Add", ["r1", "eps"], ["r2"], name="plus_eps"),
        node("Sqrt", ["r2"], ["r3"], name="root"),
        node("Div", ["soft", "r3"], ["r4"], name="normalize"),
        node("Mul", ["r4", "gamma"], ["rms"], name="rms_out"),
        node("Add", ["rms", "bias"], ["b0"], name="add_bias"),
        node("Div", ["b0", "root2"], ["e0"], name="erf_div"),
        node("Erf", ["e0"], ["e1"], name="erf"),
        node("Add", ["e1", "one"], ["e2"], name="erf_plus_one"),
        node("Mul", ["b0", "e2"], ["e3"], name="erf_mul"),
        node("Mul", ["e3", "half"], ["y"], name="erf_half"),
    ]
    return model(nodes, [("x", [4, 16])], [("y", [4, 16])], w)


def computed_shapes():
    """Shapes that are not known before the run: Shape, Gather, Concat, Expand, Where, a chain of casts."""
    w = Weights()
    w.value("zero", np.array([0], np.int64)), w.value("minus", np.array([-1], np.int64))
    w.value("nothing", np.float32(0)), w.value("axes", np.array([0], np.int64))
    nodes = [
        node("Shape", ["x"], ["sh"], name="shape"),
        node("Gather", ["sh", "zero"], ["n"], name="gather"),
        node("Concat", ["n", "minus"], ["target"], name="concat", axis=0),
        node("Reshape", ["x", "target"], ["flat"], name="reshape"),
        node("Greater", ["flat", "nothing"], ["pos"], name="greater"),
        node("Where", ["pos", "flat", "nothing"], ["wh"], name="where"),
        node("Shape", ["wh"], ["sh2"], name="shape2"),
        node("Unsqueeze", ["nothing", "axes"], ["u"], name="unsqueeze"),
        node("Expand", ["u", "sh2"], ["ex"], name="expand"),
        node("Add", ["wh", "ex"], ["s"], name="sum"),
        node("Cast", ["s"], ["d"], name="to_double", to=TensorProto.DOUBLE),
        node("Cast", ["d"], ["i"], name="to_int", to=INT64),
        node("Cast", ["i"], ["y"], name="to_float", to=FLOAT),
    ]
    return model(nodes, [("x", ["batch", 3, 4])], [("y", ["batch", 12])], w)


def nested_control_flow():
    """A Loop that holds an If, both reading outer tensors, and a Scan."""

    def branch(name, op):
        nodes = [node(op, ["state"], ["t"], name=f"{name}_op"), node("Add", ["t", "outer"], ["o"], name=f"{name}_add")]
        return helper.make_graph(nodes, name, [], [info("o", FLOAT, [2, 3])])

    body = helper.make_graph(
        [
            node("Greater", ["i", "limit"], ["late"], name="compare"),
            node(
                "If",
                ["late"],
                ["new"],
                name="choose",
                then_branch=branch("late", "Neg"),
                else_branch=branch("early", "Exp"),
            ),
            node("Tanh", ["new"], ["state2"], name="squash"),
            node("Identity", ["go"], ["go2"], name="go_on"),
        ],
        "body",
        [info("i", INT64, []), info("go", BOOL, []), info("state", FLOAT, [2, 3])],
        [info("go2", BOOL, []), info("state2", FLOAT, [2, 3])],
    )
    step = helper.make_graph(
        [node("Add", ["acc", "row"], ["acc2"], name="scan_add"), node("Relu", ["acc2"], ["out"], name="scan_relu")],
        "step",
        [info("acc", FLOAT, [3]), info("row", FLOAT, [3])],
        [info("acc2", FLOAT, [3]), info("out", FLOAT, [3])],
    )
    w = Weights()
    w.value("n", np.int64(4)), w.value("limit", np.int64(1)), w.normal("start", 3)
    nodes = [
        node("Abs", ["x"], ["outer"], name="outer"),
        node("Loop", ["n", "", "outer"], ["looped"], name="loop", body=body),
        node("Scan", ["start", "looped"], ["final", "rows"], name="scan", body=step, num_scan_inputs=1),
        node("Add", ["rows", "final"], ["y"], name="join"),
    ]
    return model(nodes, [("x", [2, 3])], [("y", [2, 3])], w)


def shared_parts():
    """One subexpression under two fusions, equal weights under two names, an output that is read on."""
    w = Weights()
    w.normal("w", 16, 16)
    w.value("w_again", np.array(Weights(0).random.standard_normal((16, 16)) * 0.3, np.float32)), w.normal("b", 16)
    w.value("k1", np.float32(2)), w.value("k2", np.float32(2))
    nodes = [
        node("Mul", ["x", "k1"], ["d1"], name="double1"),
        node("Mul", ["x", "k2"], ["d2"], name="double2"),
        node("MatMul", ["d1", "w"], ["m1"], name="matmul1"),
        node("MatMul", ["d2", "w_again"], ["m2"], name="matmul2"),
        node("Add", ["m1", "b"], ["y1"], name="bias1"),
        node("Add", ["m2", "b"], ["a2"], name="bias2"),
        node("Relu", ["y1"], ["r1"], name="relu1"),
        node("Relu", ["a2"], ["r2"], name="relu2"),
        node("Sub", ["r1", "r2"], ["y2"], name="difference"),
    ]
    return model(nodes, [("x", [4, 16])], [("y1", [4, 16]), ("y2", [4, 16])], w)


def dynamic_quantization():
    """Weights in int8 with activations quantized as they come."""
    w = Weights()
    w.value("wq", w.random.integers(-100, 100, (16, 16)).astype(np.int8)), w.value("ws", np.float32(0.01))
    w.value("wz", np.int8(0)), w.normal("bias", 16)
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], name="quantize"),
        node("MatMulInteger", ["q", "wq", "z", "wz"], ["i"], name="matmul"),
        node("Cast", ["i"], ["f"], name="cast", to=FLOAT),
        node("Mul", ["s", "ws"], ["scale"], name="scales"),
        node("Mul", ["f", "scale"], ["m"], name="rescale"),
        node("Add", ["m", "bias"], ["a"], name="add_bias"),
        node("Relu", ["a"], ["y"], name="relu"),
    ]
    return model(nodes, [("x", [4, 16])], [("y", [4, 16])], w)


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
                helper.make_tensor(f"w{i}", FLOAT, [16, 16, size, size], rng.standard_normal(256 * size * size) / 9)
            )
            nodes.append(node("Conv", [a, f"w{i}"], [out], name=name, pads=[size // 2] * 4))
        elif kind == 3:
            nodes.append(node(str(rng.choice(["Relu", "Sigmoid", "Tanh", "HardSigmoid"])), [a], [out], name=name))
        elif kind == 4:
            nodes.append(node("Add", [a, b], [out], name=name))
        elif kind == 5:
            for part in "gbm":
                w.append(helper.make_tensor(f"{part}{i}", FLOAT, [16], rng.standard_normal(16)))
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


MORE = {
    f.__name__: f
    for f in (
        resampling,
        channels_last,
        activations,
        computed_shapes,
        nested_control_flow,
        shared_parts,
        dynamic_quantization,
    )
}
