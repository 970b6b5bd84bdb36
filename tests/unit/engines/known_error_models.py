# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models that engines compute wrongly, one or more for each row of the known errors, and neighbours that are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from ml_dtypes import bfloat16
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

if TYPE_CHECKING:
    from collections.abc import Callable

RNG = np.random.default_rng(0)
F32 = {"INFERENCE_PRECISION_HINT": "f32"}


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


BOXES, SCORES = np.float32([[[0, 0, 2, 2], [4, 4, 5, 5], [7, 7, 8, 8]]]), np.float32([[[0.9, 0.8, 0.7]]])
X3, X4, IMAGE, SEQUENCE = floats(2, 3, 4), floats(2, 3, 4, 5), floats(1, 2, 7, 6), floats(4, 2, 3)


def one(op: str, x: Any, opset: int, weights: dict[str, Any] | None = None, *more: str, **attributes: Any) -> Any:
    """Return a model of one node; `more` are inputs after ``x``."""
    node = h.make_node(op, ["x", *more], ["y"], name="node", **attributes)
    info = h.make_tensor_value_info("x", T.FLOAT, x.shape)
    value_info = h.make_tensor_value_info("y", T.FLOAT, None)
    tensors = [nh.from_array(np.asarray(value), name) for name, value in (weights or {}).items()]
    graph = h.make_graph([node], "g", [info], [value_info], tensors)
    return h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=8)


def integers(op: str, x: Any, by: Any = None, *, open_: bool = False, opset: int = 18, **attributes: Any) -> Any:
    """Return a model of one node that computes in the type of ``x``."""
    more = {} if by is None else {"by": np.asarray(by, x.dtype)}
    model = one(op, x, opset, more, *more, **attributes)
    code = h.np_dtype_to_tensor_dtype(x.dtype)
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.elem_type = code
    if open_:
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    VALUES[model.SerializeToString()] = x
    return model


def lengths(op: str, gates: int) -> Any:
    """Return a recurrent model whose batch is open, with the length of each sequence."""
    weights = {"w": floats(1, gates * 5, 3), "r": floats(1, gates * 5, 5), "n": np.int32([4, 2])}
    model = one(op, SEQUENCE, 14, weights, "w", "r", "", "n", hidden_size=5)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "batch"
    VALUES[model.SerializeToString()] = SEQUENCE
    return model


def inside(model: Any) -> Any:
    """Move the nodes of a model into a branch of an If that depends on its input."""
    graph, branch = model.graph, h.make_graph(model.graph.node, "then", [], model.graph.output)
    other = h.make_graph([h.make_node("Identity", ["x"], ["y"], name="other")], "else", [], model.graph.output)
    nodes = [
        h.make_node("ReduceMax", ["x"], ["m"], name="max", keepdims=0),
        h.make_node("Greater", ["m", "low"], ["c"], name="greater"),
        h.make_node("If", ["c"], ["y"], name="if", then_branch=branch, else_branch=other),
    ]
    low = nh.from_array(np.float32(-1e9), "low")
    whole = h.make_graph(nodes, "g", graph.input, graph.output, [low])
    return h.make_model(whole, opset_imports=model.opset_import, ir_version=8)


def recurrent(op: str, gates: int, *, peepholes: bool = False, x: Any = SEQUENCE, **attributes: Any) -> Any:
    hidden = 5
    weights = {"w": floats(1, gates * hidden, 3), "r": floats(1, gates * hidden, hidden)}
    names = ["w", "r"]
    if peepholes:
        weights["p"] = floats(1, 3 * hidden)
        names += ["", "", "", "", "p"]
    return one(op, x, 14, weights, *names, hidden_size=hidden, **attributes)


def resize(opset: int = 19, sizes: Any = None, scale: float = 0.6, **attributes: Any) -> Any:
    if sizes is not None:
        return one("Resize", IMAGE, opset, {"n": np.int64(sizes)}, "", "", "n", **attributes)
    factors = np.float32([1, 1, scale, scale])
    return one("Resize", IMAGE, opset, {"s": factors}, "", "s", **attributes)


def roi_align() -> Any:
    weights = {"rois": np.float32([[0, 0, 5, 5], [1, 1, 4, 3]]), "batch": np.int64([0, 0])}
    where = {"coordinate_transformation_mode": "half_pixel", "output_height": 2, "output_width": 2}
    return one("RoiAlign", IMAGE, 16, weights, "rois", "batch", mode="max", sampling_ratio=2, **where)


def typed(op: str, inputs: list[Any], outputs: int = 1, opset: int = 18, open_: bool = False, **attributes: Any) -> Any:
    """Return a model of one node whose first input is fed; others are constants, or fed where they are in a tuple."""
    names = [name if value is not None else "" for name, value in zip("xabcdef", inputs, strict=False)]
    fed = {
        n: v[0] if isinstance(v, tuple) else v
        for n, v in zip(names, inputs, strict=False)
        if n == "x" or isinstance(v, tuple)
    }
    fixed = [nh.from_array(v, n) for n, v in zip(names, inputs, strict=False) if n and n not in fed]
    texts = [f"y{i}" if i else "y" for i in range(outputs)]
    values = [h.make_tensor_value_info(n, h.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in fed.items()]
    graph = h.make_graph(
        [h.make_node(op, names, texts, name="node", **attributes)], "g", values,
        [onnx.ValueInfoProto(name=name) for name in texts], fixed,
    )  # fmt: skip
    if open_:
        graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=8 if opset < 23 else 10)
    kinds = {one.name: one.type for one in onnx.shape_inference.infer_shapes(model).graph.output}
    for value in model.graph.output:
        value.type.CopyFrom(kinds[value.name])
    VALUES[model.SerializeToString()] = fed
    return model


def attention(keys: int, *, past: int = 0, open_: bool = False, **attributes: Any) -> Any:
    """Return an Attention of four queries; open lengths that are equal have the same name."""
    heads: list[Any] = [floats(1, 2, 4, 8), floats(1, 2, keys, 8), floats(1, 2, keys, 8)]
    if open_:
        heads[1:] = [(head,) for head in heads[1:]]
    more = [None, floats(1, 2, past, 8), floats(1, 2, past, 8)] if past else []
    model = typed("Attention", [*heads, *more], 3 if past else 1, 25 if not past else 23, **attributes)
    fed = VALUES[model.SerializeToString()]
    for value in model.graph.input if open_ else ():
        length = value.type.tensor_type.shape.dim[2]
        length.dim_param = f"n{length.dim_value}"
    VALUES[model.SerializeToString()] = fed
    return model


#: The input of models whose values matter, by the model.
VALUES: dict[bytes, Any] = {}


def contrib(
    op: str, fed: dict[str, Any], constants: dict[str, Any], *outputs: str, open_: bool = False, **more: Any
) -> Any:
    """Return a model of one operator of ONNX Runtime's own domain; what is fed comes before the constants."""
    node = h.make_node(op, [*fed, *constants], ["y", *outputs], name="node", domain="com.microsoft", **more)
    code = h.np_dtype_to_tensor_dtype
    infos = [
        h.make_tensor_value_info(k, code(v.dtype), ["n", *v.shape[1:]] if open_ and v.ndim else v.shape)
        for k, v in fed.items()
    ]
    values = [onnx.ValueInfoProto(name=name) for name in ("y", *outputs)]
    tensors = [nh.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = h.make_graph([node], "g", infos, values, tensors)
    imports = [h.make_opsetid("", 21), h.make_opsetid("com.microsoft", 1)]
    model = h.make_model(graph, opset_imports=imports, ir_version=10)
    VALUES[model.SerializeToString()] = fed
    return model


def quantized(op: str, kind: Any, point: int, scale: float, *, open_: bool = False, **more: Any) -> Any:
    """Return a model of an operator of one quantized input; its zero points are `point`."""
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    x = np.linspace(low, high, 32).astype(kind).reshape(1, 2, 4, 4)
    parts = {"scale": np.float32(0.02), "point": kind(point), "result": np.float32(scale), "zero": kind(point)}
    return contrib(op, {"x": x}, parts, open_=open_, **more)


def added(op: str, kind: Any, *, open_: bool = False) -> Any:
    """Return a model of an operator of two quantized inputs, one of them constant, whose results are beyond 8 bits."""
    high, scale, zero = np.iinfo(kind).max, np.float32(0.02), kind(0)
    parts = {"x_scale": scale, "x_zero": zero, "by": np.array([[high, high]], kind), "by_scale": scale, "by_zero": zero}
    parts |= {"result": np.float32(0.01), "zero": zero}
    return contrib(op, {"x": np.array([[high, high - 50]], kind)}, parts, open_=open_)


def grouped(past: int, *, open_: bool = False) -> Any:
    """Return a model of grouped attention of five tokens, of which none is in its past; its sizes may be open."""
    fed = {"x": floats(1, 5, 64), "k": floats(1, 5, 32), "v": floats(1, 5, 32)}
    fed |= {"pk": floats(1, 2, past, 16), "pv": floats(1, 2, past, 16)}
    fed |= {"last": np.int32([4]), "total": np.array(5, np.int32)}
    return contrib("GroupQueryAttention", fed, {}, "key", "value", open_=open_, num_heads=4, kv_num_heads=2)


def masked(op: str, value: float) -> Any:
    """Return a model of attention whose mask is added to its scores."""
    more: dict[str, Any] = {"num_heads": 2, "mask_filter_value": value}
    if op == "MultiHeadAttention":
        fed = {name: floats(2, 5, 16) for name in "xkv"}
        return contrib(op, fed, {}, unidirectional=1, **more)
    mask = np.int32([[1, 1, 1, 0, 0], [1] * 5])
    return contrib(op, {"x": floats(2, 5, 16)}, {"w": floats(16, 48), "b": floats(48), "mask": mask}, **more)


def branch(op: str, x: Any) -> Any:
    """Return a model that computes ``op(x, 4)`` in a branch."""
    head = '<ir_version: 8, opset_import: ["" : 18]>'
    model = onnx.parser.parse_model(
        f"{head} g (uint8[{x.size}] x) => (uint8[{x.size}] y) <uint8[1] k = {{4}}> {{ m = ReduceMax <keepdims = 0> (x) "
        f"c = Cast <to = 9> (m) y = If (c) <then_branch = t () => (uint8[{x.size}] p) {{ p = {op} (x, k) }}, "
        f"else_branch = e () => (uint8[{x.size}] p) {{ p = Identity (x) }}> }}"
    )
    then = next(part.g for part in model.graph.node[-1].attribute if part.name == "then_branch")
    then.node[0].name = "node"
    VALUES[model.SerializeToString()] = x
    return model


U8, S8, LARGE = np.arange(1, 9, dtype=np.uint8), np.int8([-7, -5, 5, 7]), [777777777, 1900000001, 33554435, 3]
WIDE = [np.array(LARGE, kind) for kind in (np.int32, np.int64)]
TIES = (np.arange(192, dtype=np.float32) % 3).reshape(3, 64)
#: Numbers whose neighbors fp32 does not have.
GAPS = np.int32([2**24, 2**25, 2**24 + 2])
#: Numbers that bf16 rounds up.
BETWEEN = np.array([1.0059, 1.0047, -1.0137])
POOL = {"kernel_shape": [3, 3], "strides": [2, 2]}
#: Row to models that it is about.
OPENVINO: dict[str, Callable[[], list[Any]]] = {
    "softmax-of-opset-11-in-a-subgraph": lambda: [
        inside(one("Softmax", x, opset, **({} if axis is None else {"axis": axis})))
        for opset in (11, 12)
        for x, axis in ((X3, None), (X3, 0), (X4, 2))
    ],
    "recurrent-layout": lambda: [recurrent(op, gates, layout=1) for op, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1))],
    "lstm-peepholes": lambda: [
        recurrent("LSTM", 4, peepholes=True),
        recurrent("LSTM", 4, peepholes=True, direction="reverse"),
    ],
    "lstm-input-forget": lambda: [recurrent("LSTM", 4, input_forget=1)],
    "average-pool-ceil-with-padding": lambda: [
        one("AveragePool", floats(1, 2, 6, 6), opset, ceil_mode=1, count_include_pad=1, pads=[1, 1, 1, 1], **POOL)
        for opset in (10, 19)
    ],
    "max-pool-ceil-outside": lambda: [
        one("MaxPool", floats(1, 2, 6, 6), 19, kernel_shape=[k, k], strides=[s, s], pads=[p] * 4, ceil_mode=1)
        for k, s, p in ((1, 2, 0), (2, 3, 0))
    ],
    "reduce-with-axes-as-attribute": lambda: [
        one(op, np.abs(X3), opset, axes=[1], keepdims=0)
        for op in ("ReduceL1", "ReduceLogSum", "ReduceLogSumExp")
        for opset in (13, 17)
    ],
    "attention-windows": lambda: [
        attention(6, left_window_size=1, right_window_size=1),
        attention(6, is_causal=1, left_window_size=2),
    ],
    "attention-causal-with-past": lambda: [
        attention(6, past=12, is_causal=1),
        attention(6, past=12, is_causal=1, open_=True),
    ],
    "conv-transpose-same-with-open-sizes": lambda: [
        typed("ConvTranspose", [floats(1, 1, 3, 3), floats(1, 2, 3, 3)], strides=[2, 2], auto_pad=pad, open_=True)
        for pad in ("SAME_UPPER", "SAME_LOWER")
    ],
    "dft-onesided": lambda: [
        typed("DFT", [floats(1, 6, 10, 2)], opset=17, axis=1, inverse=1, onesided=1),
        typed("DFT", [floats(1, 6, 10, 1)], opset=17, axis=1, onesided=1),
    ],
    "gemm-of-integers-with-fractions": lambda: [
        typed("Gemm", [np.int32([[1, 2], [3, 5]]), np.int32([[3, 1], [2, 7]])], alpha=0.5)
    ],
    "einsum-of-8-bits": lambda: [
        typed("Einsum", [x], equation="ij->i") for x in (np.int8([[100, 100]]), np.uint8([[200, 100]]))
    ],
    "einsum-of-integers-in-fp32": lambda: [
        typed("Einsum", [np.array([[2**24, 1], [7, 3]], kind)], equation="ij->i") for kind in (np.int32, np.int64)
    ],
    "einsum-of-other-integers-in-fp32": lambda: [
        typed("Einsum", [np.uint32([[2**24, 1], [7, 3]])], equation="ij->i"),
        typed("Einsum", [np.int16([[30001]]), (np.int16([[29999]]),)], equation="ij,jk->ik"),
    ],
    "lp-normalization-of-small-numbers": lambda: [
        typed("LpNormalization", [np.float32([[size, size / 2]])], axis=1, p=p) for size, p in ((1e-3, 2), (1e-5, 1))
    ],
    "mod-of-floats": lambda: [
        typed("Mod", [np.array([33, 6, 1], kind), np.array([-1e-3, 0.1, 0.1], kind)], fmod=1)
        for kind in (np.float32, np.float64)
    ],
    "suppression-without-overlap": lambda: [
        typed("NonMaxSuppression", [BOXES, SCORES, np.int64([4]), *threshold])
        for threshold in ([], [np.float32([0])], [(np.float32([0]),)])
    ],
    "tile-with-variable-repeats": lambda: [typed("Tile", [X4, (np.int64([1, 2, 2, 2]),)])],
    "top-k-of-equal-values": lambda: [
        typed("TopK", [np.zeros((1, 64), np.float32), np.int64([10])], 2),
        typed("TopK", [TIES, np.int64([1])], 2),
        typed("TopK", [TIES, (np.int64([5]),)], 2),
        typed("TopK", [np.zeros((4, 8), np.int32), np.int64([3])], 2, open_=True),
    ],
    "unique-along-an-axis": lambda: [
        typed("Unique", [np.int8([[127, -127, 5, -1], [3, 5, 2, 0]]).reshape(2, 4, 1)], 4, axis=1)
    ],
    "resize-antialias": lambda: [resize(mode=mode, antialias=1) for mode in ("linear", "cubic")],
    "resize-cubic-exclude-outside": lambda: [
        resize(opset, scale=2.0, mode="cubic", exclude_outside=1, coordinate_transformation_mode=mode)
        for opset in (13, 19)
        for mode in ("half_pixel", "asymmetric")
    ],
    "resize-keep-aspect-ratio": lambda: [
        resize(sizes=[4, 9], axes=[2, 3], mode="nearest", keep_aspect_ratio_policy=policy)
        for policy in ("not_larger", "not_smaller")
    ],
    "roi-align-max": lambda: [roi_align()],
    "recurrent-lengths-with-open-sizes": lambda: [
        lengths(op, gates) for op, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1))
    ],
    "saturating-8-bits": lambda: [
        integers("Sub", U8, 5),
        integers("Add", U8, 250),
        integers("Mul", S8, 100),
        integers("Mul", S8, 100, open_=True),
    ],
    "div-of-8-bits-with-open-sizes": lambda: [integers("Div", U8, 4, open_=True), integers("Div", S8, 2, open_=True)],
    "bit-shift-left-of-8-bits": lambda: [
        integers("BitShift", x, 6, opset=opset, direction="LEFT") for x, opset in ((U8, 18), (S8, 28))
    ],
    "bit-shift-left-by-31": lambda: [
        integers("BitShift", np.array([2, 4], kind), bits, direction="LEFT")
        for kind, bits in (("uint32", 31), ("uint64", 63))
    ],
    "bit-shift-left-of-signed-by-31": lambda: [integers("BitShift", np.int64([-1, 0]), 31, opset=28, direction="LEFT")],
    "bit-shift-right-of-signed": lambda: [
        integers("BitShift", np.array(S8, kind), 1, opset=28, direction="RIGHT")
        for kind in ("int8", "int16", "int32", "int64")
    ],
    "bit-shift-right-of-8-bits-with-open-sizes": lambda: [integers("BitShift", U8, 1, open_=True, direction="RIGHT")],
    "bit-shift-right-in-fp32": lambda: [
        integers("BitShift", np.array(LARGE, kind), 1, direction="RIGHT") for kind in ("uint32", "uint64")
    ],
    "div-of-integers-in-fp32": lambda: [integers("Div", x, 11, open_=o) for x in WIDE for o in (False, True)],
    "mod-of-integers-in-fp32": lambda: [integers("Mod", x, 13, open_=o) for x in WIDE for o in (False, True)],
    "pow-of-integers-in-fp32": lambda: [integers("Pow", np.array([3, 4099], x.dtype), 2, open_=True) for x in WIDE],
    "products-of-integers-in-fp32": lambda: [integers("MatMul", x, np.eye(4)) for x in WIDE],
    "shrink-of-integers": lambda: [integers("Shrink", x, bias=1.5, lambd=1.5) for x in (S8, WIDE[0])],
    "space-to-depth-crd": lambda: [one("SpaceToDepth", floats(1, 2, 4, 6), 28, blocksize=2, mode="CRD")],
    "qlinear-with-fixed-sizes": lambda: [
        *(added(op, kind) for op in ("QLinearAdd", "QLinearMul") for kind in (np.uint8, np.int8)),
        quantized("QLinearSigmoid", np.int8, 0, 1 / 256),
    ],
    "qlinear-leaky-relu": lambda: [
        quantized("QLinearLeakyRelu", np.uint8, 100, 0.02, open_=open_, alpha=0.1) for open_ in (False, True)
    ],
    "qlinear-average-pool": lambda: [
        quantized("QLinearAveragePool", np.int8, -128, 0.01, open_=open_, kernel_shape=[2, 2])
        for open_ in (False, True)
    ],
    "qlinear-sigmoid-of-int8": lambda: [
        quantized("QLinearSigmoid", np.int8, -128, 1 / 256, open_=open_) for open_ in (False, True)
    ],
    "fused-attention-scale": lambda: [
        contrib("Attention", {"x": floats(2, 5, 16)}, {"w": floats(16, 48), "b": floats(48)}, num_heads=2, scale=0.9)
    ],
    "group-query-attention-of-an-empty-past": lambda: [grouped(0)],
    "group-query-attention-of-a-static-cache": lambda: [grouped(16, open_=True)],
    "fused-attention-mask-value": lambda: [masked("Attention", value) for value in (-1.0, -5.0)],
    "causal-attention-mask-value": lambda: [masked("MultiHeadAttention", -1.0)],
    "cast-to-bf16-with-open-sizes": lambda: [
        typed(op, [BETWEEN.astype(kind), *like], opset=19, open_=True, **more)
        for kind in (np.float32, np.float16)
        for op, like, more in (("Cast", [], {"to": T.BFLOAT16}), ("CastLike", [np.array([1], bfloat16)], {}))
    ],
    "cast-of-float64-to-bf16": lambda: [
        typed("Cast", [BETWEEN.astype(np.float64)], opset=19, open_=open_, to=T.BFLOAT16) for open_ in (False, True)
    ],
    "infinities-of-float64": lambda: [typed("IsInf", [np.array([1, np.inf, -np.inf])], opset=20)],
    "comparisons-of-integers-in-fp32": lambda: [
        typed(op, [x, x + x.dtype.type(by)], open_=open_)
        for op, by in (("Equal", 1), ("Greater", -1), ("GreaterOrEqual", 1), ("Less", 1), ("LessOrEqual", -1))
        for x in (GAPS, GAPS.astype(np.int64))
        for open_ in (False, True)
    ],
    "div-of-8-bits-in-a-subgraph": lambda: [branch("Div", U8)],
    "other-integers-in-fp32": lambda: [
        integers(op, np.int32([[777777777, -3], [3, -16777219]])) for op in ("ReduceMax", "ReduceMin", "ReduceSum")
    ],
}
#: Alike, and right.
RIGHT: list[Callable[[], Any]] = [
    lambda: typed("NonMaxSuppression", [BOXES, SCORES, np.int64([4]), np.float32([1e-6])]),
    lambda: one("Softmax", X3, 12, axis=2),
    lambda: one("Softmax", X3, 12, axis=-1),
    lambda: one("Softmax", X3, 13, axis=1),
    lambda: one("LogSoftmax", X3, 12),
    lambda: one("Hardmax", X3, 12),
    lambda: recurrent("LSTM", 4),
    lambda: recurrent("LSTM", 4, clip=0.3),
    lambda: recurrent("GRU", 3, linear_before_reset=1),
    lambda: one("AveragePool", IMAGE, 19, ceil_mode=1, count_include_pad=1, **POOL),
    lambda: one("MaxPool", IMAGE, 19, ceil_mode=1, pads=[1, 1, 1, 1], **POOL),
    lambda: resize(mode="cubic"),
    lambda: resize(mode="linear"),
    lambda: integers("Div", U8, 4),
    lambda: one("MaxPool", floats(1, 2, 6, 6), 19, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4, ceil_mode=1),
    lambda: one("ReduceL2", X3, 13, axes=[1]),
    lambda: attention(4, past=3, is_causal=1),
    lambda: attention(4, past=3, is_causal=1, open_=True),
    lambda: attention(6, left_window_size=-1, right_window_size=-1),
    lambda: typed("DFT", [floats(1, 6, 10, 1)], opset=17, axis=1),
    lambda: integers("BitShift", np.array(LARGE, np.uint32), 4, direction="LEFT"),
    lambda: integers("BitShift", U8, 2, direction="RIGHT"),
    lambda: integers("BitShift", np.uint16([65535, 7]), 2, direction="RIGHT"),
    *(
        lambda k=k: typed("TopK", [TIES, np.int64([k])], 2)  # type: ignore[misc]
        for k in (2, 6)
    ),
    lambda: typed("Tile", [X4, np.int64([1, 2, 2, 2])]),
    lambda: typed("Tile", [X3, (np.int64([2, 2, 2]),)]),
    lambda: typed("Gemm", [np.int16([[1, 2], [3, 5]]).astype(np.float32), floats(2, 2)], alpha=0.5),
    lambda: integers("Sub", WIDE[0], 5),
    lambda: integers("Mul", np.int16([300, -181]), 3),
    *(
        lambda op=op: added(op, np.uint8, open_=True)  # type: ignore[misc]
        for op in ("QLinearAdd", "QLinearMul")
    ),
    lambda: contrib("Attention", {"x": floats(2, 5, 16)}, {"w": floats(16, 48), "b": floats(48)}, num_heads=2),
    lambda: masked("Attention", -10000.0),
    lambda: typed("Greater", [WIDE[0], np.int32([2**24 - 1])]),
    lambda: typed("Cast", [BETWEEN.astype(np.float32)], opset=19, to=T.BFLOAT16),
    lambda: typed("CastLike", [BETWEEN.astype(np.float32), np.float16([1])], opset=19, open_=True),
]


def feeds_of(model: Any) -> dict[str, Any]:
    if (stated := VALUES.get(model.SerializeToString())) is not None:
        return stated if isinstance(stated, dict) else {"x": stated}
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    found = {tuple(one.shape): one for one in (X3, X4, IMAGE, SEQUENCE)}
    return {"x": found.get(tuple(shape), floats(*shape))}
