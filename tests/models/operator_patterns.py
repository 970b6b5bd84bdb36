# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operator patterns: small graphs of what exporters write, each with inputs and weights of its own."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from onnx import numpy_helper, parser

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["PATTERNS", "QUANTIZED", "Pattern", "inputs_of", "write"]

F32 = np.float32
NORM = "two = Constant<value_float = 2.0>() eps = Constant<value_float = 0.00001>()"


class Pattern(NamedTuple):
    """One graph.

    Attributes
    ----------
    inputs, outputs : str
        As ONNX's text format has them, such as ``"float[2, 8] x"``.
    body : str
        The nodes.
    weights : dict of str to (tuple of int, or ndarray)
        Initializers: a shape is filled with random numbers.
    opset : int
    functions : str
        Model-local functions, in the text format.
    """

    inputs: str
    outputs: str
    body: str
    weights: dict[str, Any] = {}  # noqa: RUF012 - never written
    opset: int = 17
    functions: str = ""


def _ints(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


X = "float[2, 4, 8] x"
Y = "float[] y"
IMAGE = "float[1, 4, 9, 9] x"
CONV = {"w": (6, 4, 3, 3), "b": (6,)}
LSTM = {"w": (1, 16, 8), "r": (1, 16, 4), "b": (1, 32)}

PATTERNS: dict[str, Pattern] = {
    # Products.
    "matmul": Pattern(X, Y, "y = MatMul(x, w)", {"w": (8, 6)}),
    "matmul_bias_relu": Pattern(X, Y, "m = MatMul(x, w) a = Add(m, b) y = Relu(a)", {"w": (8, 6), "b": (6,)}),
    "matmul_bias_row": Pattern(X, Y, "m = MatMul(x, w) y = Add(b, m)", {"w": (8, 6), "b": (1, 6)}),
    "matmul_silu": Pattern(X, Y, "m = MatMul(x, w) s = Sigmoid(m) y = Mul(m, s)", {"w": (8, 6)}),
    "transpose_matmul": Pattern(X, Y, "t = Transpose<perm = [1, 0, 2]>(x) y = MatMul(t, w)", {"w": (8, 6)}),
    "matmul_transposed_weight": Pattern(X, Y, "t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t)", {"w": (6, 8)}),
    "matmul_of_two_inputs": Pattern("float[2, 4, 8] x, float[2, 8, 3] z", Y, "y = MatMul(x, z)"),
    "matmul_vector": Pattern(X, Y, "y = MatMul(x, w)", {"w": (8,)}),
    "gemm": Pattern("float[4, 8] x", Y, "y = Gemm(x, w, b)", {"w": (8, 6), "b": (6,)}),
    "gemm_transposed": Pattern("float[8, 4] x", Y, "y = Gemm<transA = 1, transB = 1>(x, w)", {"w": (6, 8)}),
    "gemm_factors": Pattern(
        "float[4, 8] x", Y, "y = Gemm<alpha = 0.5, beta = 2.0>(x, w, b)", {"w": (8, 6), "b": (4, 1)}
    ),
    "gemm_scalar_bias": Pattern("float[4, 8] x", Y, "y = Gemm(x, w, b)", {"w": (8, 6), "b": np.array(0.3, F32)}),
    "shared_weight": Pattern("float[4, 8] x", Y, "m = MatMul(x, w) t = Tanh(m) y = MatMul(t, w)", {"w": (8, 8)}),
    "weight_that_is_an_output": Pattern("float[4, 8] x", "float[] y, float[8, 6] w", "y = MatMul(x, w)", {"w": (8, 6)}),
    "einsum": Pattern(X, Y, 'y = Einsum<equation = "bij,jk->bik">(x, w)', {"w": (8, 6)}),
    "residual_mlp": Pattern(
        X, Y, "m = MatMul(x, u) r = Relu(m) d = MatMul(r, v) y = Add(d, x)", {"u": (8, 16), "v": (16, 8)}
    ),
    # Convolutions.
    "conv": Pattern(IMAGE, Y, "y = Conv(x, w, b)", CONV),
    "conv_relu": Pattern(IMAGE, Y, "c = Conv<pads = [1, 1, 1, 1]>(x, w, b) y = Relu(c)", CONV),
    "conv_add_relu": Pattern(
        IMAGE, Y, "c = Conv<pads = [1, 1, 1, 1]>(x, w) a = Add(c, x) y = Relu(a)", {"w": (4, 4, 3, 3)}
    ),
    "conv_batch_norm": Pattern(
        IMAGE,
        Y,
        "c = Conv(x, w, b) y = BatchNormalization(c, s, o, m, v)",
        {**CONV, "s": (6,), "o": (6,), "m": (6,), "v": np.full(6, 0.7, F32)},
    ),
    "conv_silu": Pattern(IMAGE, Y, "c = Conv(x, w, b) s = Sigmoid(c) y = Mul(c, s)", CONV),
    "conv_strided": Pattern(IMAGE, Y, "y = Conv<strides = [2, 2], dilations = [2, 1]>(x, w)", {"w": (6, 4, 3, 3)}),
    "conv_depthwise": Pattern(IMAGE, Y, "y = Conv<group = 4, pads = [1, 1, 1, 1]>(x, w)", {"w": (4, 1, 3, 3)}),
    "conv_grouped": Pattern(IMAGE, Y, "y = Conv<group = 2>(x, w)", {"w": (6, 2, 3, 3)}),
    "conv_1d": Pattern("float[1, 4, 20] x", Y, "y = Conv(x, w)", {"w": (6, 4, 5)}),
    "conv_3d": Pattern("float[1, 2, 5, 6, 7] x", Y, "y = Conv(x, w)", {"w": (3, 2, 2, 2, 2)}),
    "conv_transposed": Pattern(IMAGE, Y, "y = ConvTranspose<strides = [2, 2]>(x, w)", {"w": (4, 3, 2, 2)}),
    "conv_same_upper": Pattern(
        IMAGE, Y, 'y = Conv<auto_pad = "SAME_UPPER", strides = [2, 2]>(x, w)', {"w": (6, 4, 2, 2)}
    ),
    # Pools and sizes.
    "max_pool_ceil": Pattern(IMAGE, Y, "y = MaxPool<kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1>(x)"),
    "average_pool": Pattern(
        IMAGE, Y, "y = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1], count_include_pad = 1>(x)"
    ),
    "global_pool": Pattern(IMAGE, Y, "c = Conv(x, w, b) g = GlobalAveragePool(c) y = Flatten(g)", CONV),
    "resize": Pattern(IMAGE, Y, 'y = Resize<mode = "linear">(x, , s)', {"s": np.array([1, 1, 2, 2], F32)}),
    "pad_reflect": Pattern(IMAGE, Y, 'y = Pad<mode = "reflect">(x, p)', {"p": _ints(0, 0, 1, 2, 0, 0, 2, 1)}),
    "depth_to_space": Pattern(IMAGE, Y, "y = DepthToSpace<blocksize = 2>(x)"),
    # Norms and activations, native and written out.
    "layer_norm": Pattern(X, Y, "y = LayerNormalization(x, g, b)", {"g": (8,), "b": (8,)}),
    "layer_norm_written_out": Pattern(
        X,
        Y,
        f"{NORM} m = ReduceMean<axes = [-1]>(x) d = Sub(x, m) p = Pow(d, two) v = ReduceMean<axes = [-1]>(p) "
        "e = Add(v, eps) s = Sqrt(e) n = Div(d, s) h = Mul(n, g) y = Add(h, b)",
        {"g": (8,), "b": (8,)},
    ),
    "rms_norm_written_out": Pattern(
        X,
        Y,
        f"{NORM} p = Pow(x, two) v = ReduceMean<axes = [-1]>(p) e = Add(v, eps) s = Sqrt(e) n = Div(x, s) "
        "y = Mul(n, g)",
        {"g": (8,)},
    ),
    "instance_norm": Pattern(IMAGE, Y, "y = InstanceNormalization(x, g, b)", {"g": (4,), "b": (4,)}),
    "group_norm_written_out": Pattern(
        IMAGE,
        Y,
        "r = Reshape(x, s) n = InstanceNormalization(r, one, zero) z = Shape(x) y = Reshape(n, z)",
        {"s": _ints(0, 2, -1), "one": np.ones(2, F32), "zero": np.zeros(2, F32)},
    ),
    "gelu_written_out": Pattern(
        X,
        Y,
        "h = Constant<value_float = 0.5>() q = Constant<value_float = 1.4142135>() i = Constant<value_float = 1.0>() "
        "m = MatMul(x, w) d = Div(m, q) e = Erf(d) a = Add(e, i) p = Mul(m, a) y = Mul(p, h)",
        {"w": (8, 6)},
    ),
    "hard_swish": Pattern(IMAGE, Y, "c = Conv(x, w, b) y = HardSwish(c)", CONV),
    "clip": Pattern(
        IMAGE,
        Y,
        "c = Conv(x, w, b) lo = Constant<value_float = 0.0>() hi = Constant<value_float = 6.0>() y = Clip(c, lo, hi)",
        CONV,
    ),
    "prelu": Pattern(IMAGE, Y, "y = PRelu(x, s)", {"s": (4, 1, 1)}),
    "softmax": Pattern(X, Y, "y = Softmax<axis = 1>(x)"),
    "softmax_opset_11": Pattern(X, Y, "y = Softmax(x)", opset=11),
    "log_softmax": Pattern(X, Y, "y = LogSoftmax(x)"),
    "attention_written_out": Pattern(
        X,
        Y,
        "q = MatMul(x, u) k = MatMul(x, v) t = Transpose<perm = [0, 2, 1]>(k) s = MatMul(q, t) "
        "f = Constant<value_float = 0.4>() h = Mul(s, f) p = Softmax(h) y = MatMul(p, x)",
        {"u": (8, 8), "v": (8, 8)},
    ),
    # Recurrent layers.
    "lstm": Pattern("float[5, 2, 8] x", Y, "y, h, c = LSTM<hidden_size = 4>(x, w, r, b)", LSTM),
    "gru": Pattern(
        "float[5, 2, 8] x",
        Y,
        "y, h = GRU<hidden_size = 4>(x, w, r, b)",
        {"w": (1, 12, 8), "r": (1, 12, 4), "b": (1, 24)},
    ),
    # Shapes, indices and other types.
    "slice_concat": Pattern(
        X,
        Y,
        "a = Slice(x, s, e, d) c = Concat<axis = 2>(x, a) y = MatMul(c, w)",
        {"s": _ints(2), "e": _ints(6), "d": _ints(2), "w": (12, 3)},
    ),
    "split": Pattern(X, Y, "a, b = Split<axis = 2>(x) s = Sigmoid(b) y = Mul(a, s)"),
    "reshape_by_shape": Pattern(
        X,
        Y,
        "s = Shape(x) h = Gather(s, i) k = Concat<axis = 0>(h, n) y = Reshape(x, k)",
        {"i": _ints(0), "n": _ints(-1)},
    ),
    "gather_embedding": Pattern(
        "int64[2, 5] i, float[2, 5, 4] x",
        Y,
        "e = Gather(t, i) a = Add(e, x) y = MatMul(a, w)",
        {"t": (3, 4), "w": (4, 6)},
    ),
    "scatter": Pattern("float[4, 3] x", Y, "y = ScatterND(x, i, u)", {"i": _ints(0, 2).reshape(2, 1), "u": (2, 3)}),
    "reduce_sum_axes": Pattern(X, Y, "y = ReduceSum<keepdims = 0>(x, a)", {"a": _ints(1)}),
    "top_k": Pattern(X, "float[] y, int64[] i", "y, i = TopK(x, k)", {"k": _ints(3)}),
    "arg_max": Pattern(X, "int64[] y", "m = MatMul(x, w) y = ArgMax<axis = 2>(m)", {"w": (8, 6)}),
    "where_mask": Pattern(X, Y, "z = Constant<value_float = 0.0>() g = Greater(x, z) n = Neg(x) y = Where(g, x, n)"),
    "cast_chain": Pattern(
        X, Y, "h = Cast<to = 10>(x) i = Mul(h, h) f = Cast<to = 1>(i) y = MatMul(f, w)", {"w": (8, 6)}
    ),
    "cumulative_sum": Pattern(X, Y, "y = CumSum(x, a)", {"a": np.array(1, np.int64)}),
    "triangle": Pattern("float[1, 6, 6] x", Y, "t = Trilu<upper = 0>(x) y = MatMul(t, x)"),
    "integers": Pattern("int64[3, 4] i, float[3, 4] x", Y, "s = Add(i, i) f = Cast<to = 1>(s) y = Mul(f, x)"),
    # Control flow that reads values of the outer graph, and functions.
    "if_reads_outer": Pattern(
        "float[4, 8] x",
        Y,
        "m = MatMul(x, w) z = Constant<value_float = 0.0>() t = ReduceSum<keepdims = 0>(m) c = Greater(t, z) "
        "y = If(c) <then_branch = a () => (float[] u) { u = Relu(m) }, "
        "else_branch = b () => (float[] v) { v = MatMul(x, w) }>",
        {"w": (8, 6)},
    ),
    "function": Pattern(
        "float[4, 8] x",
        Y,
        "y = local.Twice(x, w)",
        {"w": (8, 8)},
        functions='<domain: "local", opset_import: ["" : 17]> '
        "Twice (a, k) => (b) { c = MatMul(a, k) b = MatMul(c, k) }",
    ),
    # Quantized already.
    "qdq_conv": Pattern(
        IMAGE,
        Y,
        "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) e = DequantizeLinear(w, t, o) y = Conv(d, e)",
        {
            "s": np.array(0.03, F32),
            "z": np.array(128, np.uint8),
            "t": np.array(0.01, F32),
            "o": np.array(0, np.int8),
            "w": np.arange(-60, 60, 1).astype(np.int8)[:108].reshape(3, 4, 3, 3),
        },
    ),
    "weight_only_int8": Pattern(
        "float[4, 8] x",
        Y,
        "d = DequantizeLinear(w, t, o) y = MatMul(x, d)",
        {"t": np.array(0.02, F32), "o": np.array(0, np.int8), "w": np.arange(-32, 16).astype(np.int8).reshape(8, 6)},
    ),
}

#: Those that are quantized already, and take no calibration.
QUANTIZED = ("qdq_conv", "weight_only_int8")


def write(name: str, folder: Path) -> Path:
    """Write a pattern's model into a folder; the same bytes each time."""
    one = PATTERNS[name]
    domains = f'"" : {one.opset}' + (', "local" : 1' if one.functions else "")
    chance = np.random.default_rng(zlib.crc32(name.encode()))
    head = f"<ir_version: 8, opset_import: [{domains}]>"
    model = parser.parse_model(f"{head} g ({one.inputs}) => ({one.outputs}) {{ {one.body} }} {one.functions}")
    for key, given in one.weights.items():
        array = (chance.standard_normal(given) * 0.3).astype(F32) if isinstance(given, tuple) else given
        model.graph.initializer.append(numpy_helper.from_array(array, key))
    path = folder / f"{name}.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def inputs_of(name: str, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs for a pattern: floats of about 1, integers below 3."""
    chance = np.random.default_rng([zlib.crc32(name.encode()), seed])
    inputs: dict[str, np.ndarray[Any, Any]] = {}
    for declared in PATTERNS[name].inputs.split("]"):
        kind, _, rest = declared.strip(", ").partition("[")
        if not rest:
            continue
        # "float[2, 4] x, int64[3" splits at each "]": the name stands before the next type.
        key = PATTERNS[name].inputs.split(declared + "]", 1)[1].split(",")[0].strip()
        kind = kind.split()[-1]
        shape = tuple(int(size) for size in rest.split(","))
        array = chance.integers(0, 3, shape) if kind == "int64" else chance.standard_normal(shape).astype(F32)
        inputs[key] = array
    return inputs
