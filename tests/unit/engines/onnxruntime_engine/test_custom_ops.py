# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Our kernels as operators of ONNX Runtime, on its CPU execution provider: results, shapes and dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

ort = pytest.importorskip("onnxruntime")

from custom_op_models import (  # noqa: E402
    Normal,
    activate,
    assert_close,
    attention,
    model,
    name_rules,
    node,
    normalize,
    one_op,
    open_session,
    rounded,
    stock_conv,
)

from xpuruntime import _core  # noqa: E402

DTYPES = ("fp32", "fp16", "bf16", "fp64")
randn = Normal(11)


@pytest.fixture(autouse=True)
def fresh_log() -> None:
    _core.Dispatcher.instance().clear_decisions()


def test_the_operators_are_those_of_the_contract() -> None:
    ops = _core.onnxruntime_ops()
    assert list(ops) == ["MatMul", "Conv", "LayerNormalization", "RMSNormalization", "Attention"]
    assert ops["MatMul"]["inputs"] == ["A", "B"]
    assert ops["MatMul"]["optional_inputs"] == ["bias"]
    assert set(ops["Attention"]["attributes"]) == {
        *("rules", "node", "deterministic"),
        *("q_num_heads", "kv_num_heads", "is_causal", "scale", "allow_tf32"),
    }
    for op in ops.values():
        assert op["attributes"]["rules"] == op["attributes"]["node"] == "string"
        assert op["providers"][0] == "CPUExecutionProvider"
        assert ("CUDAExecutionProvider" in op["providers"]) == _core.build_info()["cuda"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matmul(dtype: str, activation: str, with_bias: bool) -> None:
    operands = {"a": randn(7, 33), "b": randn(33, 19)} | ({"c": randn(19)} if with_bias else {})
    found = one_op("MatMul", dtype, operands, name_rules(), activation=activation)
    a, b, *c = (rounded(x, dtype) for x in operands.values())
    assert_close(found, activate(a @ b + (c[0] if c else 0), activation), dtype)


@pytest.mark.parametrize(("trans_a", "trans_b"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("constant", [(), ("b",), ("a", "b", "c")])
def test_matmul_of_transposed_and_constant_operands(trans_a: int, trans_b: int, constant: tuple[str, ...]) -> None:
    a, b, c = randn(*((33, 7) if trans_a else (7, 33))), randn(*((19, 33) if trans_b else (33, 19))), randn(19)
    operands = {"a": a, "b": b, "c": c}
    found = one_op("MatMul", "fp32", operands, name_rules(), constant=constant, trans_a=trans_a, trans_b=trans_b)
    assert_close(found, (a.T if trans_a else a) @ (b.T if trans_b else b) + c, "fp32")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3, 4, 5), (5, 6)),
        ((2, 3, 4, 5), (2, 3, 5, 6)),
        ((4, 5), (3, 5, 6)),
        ((1, 4, 5), (3, 5, 6)),
        ((0, 5), (5, 6)),
        ((4, 0), (0, 6)),
        ((0, 4, 5), (0, 5, 6)),
        ((2, 0, 5), (5, 6)),
    ],
)
def test_matmul_of_batches(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = randn(*a), randn(*b)
    assert_close(one_op("MatMul", "fp32", {"a": x, "b": y}, name_rules()), x @ y, "fp32")


def test_shapes_that_change_in_every_run() -> None:
    """More of them than one node keeps descriptions for, and the first again at the end."""
    rules, w = name_rules(), randn(8, 5)
    source = model([node("MatMul", ["a", "w"], ["y"], rules)], {"a": ("fp32", ["n", 8])}, {"y": "fp32"}, {"w": w})
    session = open_session(source)
    for rows in (*range(1, 200), *range(1, 200)):
        a = randn(rows, 8)
        assert_close(session.run(None, {"a": a})[0], a @ w, "fp32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ((2, 6, 9, 8), (4, 6, 3, 3), {}),
        ((2, 6, 9, 8), (4, 3, 3, 2), {"group": 2, "strides": [2, 1], "pads": [1, 0, 2, 1], "dilations": [1, 2]}),
        ((1, 4, 7, 7), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1], "activation": "relu"}),
        ((2, 6, 20), (4, 6, 3), {"strides": [2], "pads": [2, 1], "dilations": [2]}),
        ((1, 3, 5, 5), (2, 3, 1, 1), {"activation": "silu"}),
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_conv(dtype: str, x: Any, w: Any, attributes: dict[str, Any], with_bias: bool) -> None:
    operands = {"x": randn(*x), "w": randn(*w)} | ({"b": randn(w[0])} if with_bias else {})
    found = one_op("Conv", dtype, operands, name_rules(), **attributes)
    # The stock operator computes in fp32 at best.
    assert_close(found, stock_conv(operands, dtype, attributes), "fp32" if dtype == "fp64" else dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), [((3, 5, 40), -1), ((3, 5, 40), 1), ((3, 5, 40), 0), ((40,), 0)])
@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
def test_norms(op: str, dtype: str, shape: tuple[int, ...], axis: int) -> None:
    rms = op == "RMSNormalization"
    names = ("x", "s") if rms else ("x", "s", "b")
    operands = {name: randn(*(shape if name == "x" else shape[axis:])) for name in names}
    found = one_op(op, dtype, operands, name_rules(), axis=axis, epsilon=1e-3)
    values = [rounded(v, dtype) for v in operands.values()]
    assert_close(found, normalize(*values, axis=axis, epsilon=1e-3, rms=rms), dtype)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("constant", [False, True])
def test_norm_weights_may_be_fp32(dtype: str, constant: bool) -> None:
    """The output has the dtype of the first input, also where ONNX Runtime would guess that of the last."""
    operands = {"x": randn(6, 32), "s_fp32": randn(32), "b_fp32": randn(32)}
    names = ("s_fp32", "b_fp32") if constant else ()
    found = one_op("LayerNormalization", dtype, operands, name_rules(), constant=names)
    x, s, b = rounded(operands["x"], dtype), operands["s_fp32"], operands["b_fp32"]
    assert_close(found, normalize(x, s, b), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [0, 1, 2])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention(dtype: str, causal: int, kv_heads: int) -> None:
    shapes = {"q": (2, 4, 5, 8), "k": (2, kv_heads, 9, 8), "v": (2, kv_heads, 9, 8)}
    operands = {name: randn(*shape) for name, shape in shapes.items()}
    found = one_op("Attention", dtype, operands, name_rules(), is_causal=causal)
    assert_close(found, attention(*(rounded(x, dtype) for x in operands.values()), causal=causal), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 9), (2, 1, 5, 9), (2, 4, 5, 9), (1, 1, 1, 9), (9,)])
@pytest.mark.parametrize("kind", ["bool", "fp32", "same"])
def test_attention_masks(dtype: str, shape: tuple[int, ...], kind: str) -> None:
    operands = {"q": randn(2, 4, 5, 8), "k": randn(2, 4, 9, 8), "v": randn(2, 4, 9, 8)}
    mask = randn(*shape) > -0.5 if kind == "bool" else randn(*shape)
    name = "m_fp32" if kind == "fp32" else "m"
    found = one_op("Attention", dtype, {**operands, name: mask}, name_rules())
    seen = mask if kind != "same" else rounded(mask, dtype)
    assert_close(found, attention(*(rounded(x, dtype) for x in operands.values()), mask=seen), dtype)


def test_shapes_are_known_to_what_follows() -> None:
    rules = name_rules()
    nodes = [
        node("MatMul", ["x", "w"], ["a"], rules),
        node("LayerNormalization", ["a", "g"], ["b"], rules),
        node("Attention", ["b", "b", "b"], ["c"], rules, q_num_heads=2),
        node("Conv", ["i", "k"], ["d"], rules, strides=[2, 2]),
        node("Conv", ["j", "k"], ["e"], rules, name="other"),
        node("MatMul", ["u", "w"], ["f"], rules),
    ]
    inputs: dict[str, tuple[str, Any]] = {
        "x": ("fp32", ["batch", "length", 8]),
        "i": ("fp32", ["images", 3, 9, 8]),
        "j": ("fp32", ["images", 3, "height", 8]),
        "u": ("fp32", None),
    }
    weights = {"w": randn(8, 6), "g": randn(6), "k": randn(5, 3, 3, 3)}
    session = open_session(model(nodes, inputs, dict.fromkeys("abcdef", "fp32"), weights))
    shapes = {output.name: output.shape for output in session.get_outputs()}
    assert shapes["a"] == shapes["b"] == shapes["c"] == ["batch", "length", 6]
    assert shapes["d"] == ["images", 5, 4, 3]
    assert shapes["e"][:2] == ["images", 5]
    assert shapes["e"][2] not in ("height", -1)
    assert shapes["e"][3] == 6
    assert shapes["f"] == []
    x, u = randn(2, 3, 8), randn(4, 1, 8)
    feeds = {"x": x, "i": randn(1, 3, 9, 8), "j": randn(2, 3, 7, 8), "u": u}
    results = dict(zip("abcdef", session.run(list("abcdef"), feeds), strict=True))
    assert_close(results["f"], u @ weights["w"], "fp32")
    assert [results[name].shape for name in "de"] == [(1, 5, 4, 3), (2, 5, 5, 6)]


@pytest.mark.skipif(ort.__version__.startswith("1.23."), reason="ONNX Runtime 1.23 crashes at an input without a name")
def test_optional_inputs_may_be_left_out_by_name() -> None:
    rules = name_rules()
    nodes = [
        node("MatMul", ["a", "b", ""], ["y"], rules),
        node("Attention", ["q", "q", "q", ""], ["z"], rules),
    ]
    inputs: dict[str, tuple[str, Any]] = {
        "a": ("fp32", ["n", 4]),
        "b": ("fp32", [4, 3]),
        "q": ("fp32", [1, 2, 5, 8]),
    }
    feeds = {"a": randn(2, 4), "b": randn(4, 3), "q": randn(1, 2, 5, 8)}
    y, z = open_session(model(nodes, inputs, {"y": "fp32", "z": "fp32"})).run(["y", "z"], feeds)
    assert_close(y, feeds["a"] @ feeds["b"], "fp32")
    assert_close(z, attention(*[feeds["q"].astype(np.float64)] * 3), "fp32")
