# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Small ONNX models of several kinds, with seeded weights."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

from xpuruntime.evidence.tolerances import compare_within


def weight(model, name, *shape, scale=None, seed=0, graph=None):
    """Add a seeded fp32 initializer."""
    random = np.random.default_rng((seed, *name.encode()))
    values = random.standard_normal(shape) * (scale if scale is not None else 1 / max(np.sqrt(np.prod(shape[1:])), 1))
    (graph or model.graph).initializer.append(numpy_helper.from_array(values.astype(np.float32), name))


def constant(model, name, values, dtype=np.float32):
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(values, dtype), name))


def mlp(opset=17, unnamed=False):
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": {opset}]>
    mlp (float[N,16] x) => (float[N,8] y) {{
        [fc1] h = Gemm<transB=1>(x, w1, b1)
        [act] a = Relu(h)
        [fc2] g = Gemm<transB=1>(a, w2, b2)
        [soft] y = Softmax<axis=-1>(g)
    }}""")
    weight(model, "w1", 32, 16)
    weight(model, "b1", 32, scale=0.1)
    weight(model, "w2", 8, 32)
    weight(model, "b2", 8, scale=0.1)
    if unnamed:
        for node in model.graph.node:
            node.name = ""
    return model


def convnet(opset=22):
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": {opset}]>
    convnet (float[N,3,16,16] image) => (float[N,10] logits, int64[N,1] label) {{
        [conv1] c1 = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(image, k1, kb1)
        [bn1] n1 = BatchNormalization(c1, s, b, m, v)
        [relu1] r1 = Relu(n1)
        [pool] p1 = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r1)
        [conv2] c2 = Conv<kernel_shape=[3,3]>(p1, k2)
        [gap] q = GlobalAveragePool(c2)
        [flat] f = Flatten(q)
        [fc] logits = Gemm(f, w, wb)
        [best] label = ArgMax<axis=1>(logits)
    }}""")
    weight(model, "k1", 8, 3, 3, 3)
    weight(model, "kb1", 8, scale=0.1)
    weight(model, "k2", 16, 8, 3, 3)
    weight(model, "w", 16, 10, scale=0.25)
    weight(model, "wb", 10, scale=0.1)
    constant(model, "s", np.linspace(0.5, 1.5, 8))
    constant(model, "b", np.linspace(-0.2, 0.2, 8))
    constant(model, "m", np.linspace(-0.1, 0.1, 8))
    constant(model, "v", np.linspace(0.5, 2, 8))
    return model


def encoder(opset=17):
    """A transformer block: embedding by Gather, masked attention, layer norms, and a mask constant beyond fp16."""
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": {opset}]>
    encoder (int64[B,S] ids, int64[B,S] attention_mask) => (float[B,S,32] hidden) {{
        [embed] e = Gather(table, ids)
        [ln_0] x = LayerNormalization<axis=-1>(e, g0, h0)
        [q] q0 = MatMul(x, wq)
        [k] k0 = MatMul(x, wk)
        [v] v0 = MatMul(x, wv)
        [split_q] q1 = Reshape(q0, heads)
        [split_k] k1 = Reshape(k0, heads)
        [split_v] v1 = Reshape(v0, heads)
        [tq] q2 = Transpose<perm=[0,2,1,3]>(q1)
        [tk] k2 = Transpose<perm=[0,2,3,1]>(k1)
        [tv] v2 = Transpose<perm=[0,2,1,3]>(v1)
        [scores] s0 = MatMul(q2, k2)
        [scale] s1 = Div(s0, root)
        [mask_cast] m0 = Cast<to=1>(attention_mask)
        [mask_shape] m1 = Unsqueeze(m0, axes)
        [one] one = Constant<value = float {{1.0}}>()
        [mask_sub] m2 = Sub(one, m1)
        [mask_mul] m3 = Mul(m2, lowest)
        [mask_add] s2 = Add(s1, m3)
        [soft] p = Softmax<axis=-1>(s2)
        [mix] c0 = MatMul(p, v2)
        [tc] c1 = Transpose<perm=[0,2,1,3]>(c0)
        [join] c2 = Reshape(c1, width)
        [out] o = MatMul(c2, wo)
        [add_1] r1 = Add(o, x)
        [ln_1] x1 = LayerNormalization<axis=-1>(r1, g1, h1)
        [up] u = MatMul(x1, wu)
        [gelu_div] d = Div(u, sqrt2)
        [erf] f = Erf(d)
        [gelu_add] f1 = Add(f, one)
        [gelu_mul] f2 = Mul(u, f1)
        [down] w = MatMul(f2, wd)
        [add_2] r2 = Add(w, x1)
        [ln_2] hidden = LayerNormalization<axis=-1>(r2, g2, h2)
    }}""")
    weight(model, "table", 50, 32, scale=1.0)
    for name in ("wq", "wk", "wv", "wo"):
        weight(model, name, 32, 32)
    weight(model, "wu", 32, 64)
    weight(model, "wd", 64, 32)
    for i in range(3):
        constant(model, f"g{i}", np.ones(32))
        constant(model, f"h{i}", np.zeros(32))
    constant(model, "root", np.sqrt(8.0))
    constant(model, "sqrt2", np.sqrt(2.0))
    constant(model, "lowest", np.finfo(np.float32).min)
    constant(model, "heads", [0, 0, 4, 8], np.int64)
    constant(model, "width", [0, 0, 32], np.int64)
    constant(model, "axes", [1, 2], np.int64)
    return model


def branch(opset=17):
    """An If whose branches capture a value and a weight of the graph around it."""
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": {opset}]>
    branch (float[N,4] x, bool c) => (float[N,4] y) {{
        [first] a = MatMul(x, w)
        [choice] b = If(c) <
            then_branch = t () => (float[N,4] o) {{
                [exp] e = Sigmoid(a)
                o = Mul(e, w0)
            }},
            else_branch = f () => (float[N,4] o2) {{
                n = Neg(a)
                o2 = Mul(n, n)
            }}>
        [last] y = Add(b, a)
    }}""")
    weight(model, "w", 4, 4)
    weight(model, "w0", 4)
    return model


def loop(opset=17):
    """A Loop that carries a float and collects one a turn."""
    body = parser.parse_graph("""body (int64 i, bool going, float[N,4] state) =>
        (bool still, float[N,4] next, float[N,4] seen) {
        [keep] still = Identity(going)
        [step] moved = MatMul(state, w)
        [squash] next = Tanh(moved)
        [show] seen = Mul(next, k)
    }""")
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": {opset}]>
    turns (float[N,4] x, int64 count) => (float[N,4] y, float[T,N,4] all) {{
        [start] s = MatMul(x, w)
        [yes] yes = Constant<value = bool {{1}}>()
    }}""")
    model.graph.node.append(helper.make_node("Loop", ["count", "yes", "s"], ["r", "all"], name="turn", body=body))
    model.graph.node.append(helper.make_node("Relu", ["r"], ["y"], name="last"))
    weight(model, "w", 4, 4)
    weight(model, "k", 4)
    return model


def save(model: onnx.ModelProto, path, **options):
    onnx.save(model, str(path), **options)
    return str(path)


def run_ort(model):
    """Return a function that runs a model on ONNX Runtime's CPU provider; where it has no fp16 kernel it casts."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    data = model if isinstance(model, (bytes, str)) else model.SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


def verify(reference, converted, feeds, tolerance):
    """Compare the outputs of two runs on the same feeds."""
    return compare_within(reference(feeds), converted(feeds), tolerance)
