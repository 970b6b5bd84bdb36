# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Our kernels as operators of ONNX Runtime, on its CUDA execution provider: results, and the kernels asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bound_sessions import PROVIDER
from custom_op_models import (
    Normal,
    activate,
    assert_close,
    attention,
    decisions_of,
    heads_first,
    model,
    name_rules,
    node,
    normalize,
    one_op,
    open_session,
    rounded,
    stock_conv,
)

from xpuruntime import _core

pytestmark = [pytest.mark.usefixtures("operators_of_onnxruntime"), pytest.mark.cuda_onnxruntime]
randn = Normal(21)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize(("activation", "with_bias"), [("none", False), ("relu", True), ("gelu_tanh", True)])
def test_matmul(dtype: str, rows: int, activation: str, with_bias: bool) -> None:
    operands = {"a": randn(rows, 256), "b": randn(256, 192) / 16} | ({"c": randn(192)} if with_bias else {})
    rules = name_rules()
    found = one_op("MatMul", dtype, operands, rules, PROVIDER, ("b",), activation=activation)
    a, b, *c = (rounded(x, dtype) for x in operands.values())
    assert_close(found, activate(a @ b + (c[0] if c else 0), activation), dtype)


@pytest.mark.parametrize(
    ("kernel", "dtype", "rows"),
    [
        ("cuda_raw.skinny", "fp16", 3),
        ("cuda_raw.skinny", "bf16", 16),
        ("cublas.cublasLt", "fp32", 16),
        ("cublas.cublasLt", "bf16", 100),
        ("cublas.cublas", "fp16", 16),
    ],
)
def test_matmul_by_the_kernel_asked_for(kernel: str, dtype: str, rows: int) -> None:
    operands = {"a": randn(rows, 512), "b": randn(512, 384) / 16}
    rules = name_rules(matmul=kernel)
    found = one_op("MatMul", dtype, operands, rules, PROVIDER, ("b",))
    a, b = (rounded(x, dtype) for x in operands.values())
    assert_close(found, a @ b, dtype)
    (made,) = decisions_of("MatMul_y")
    assert (made["chosen"], made["device"]) == (kernel, "cuda:0")


def test_matmul_of_transposed_operands_and_batches() -> None:
    rules = name_rules()
    a, b = randn(6, 64, 32), randn(48, 64)
    found = one_op("MatMul", "fp16", {"a": a, "b": b}, rules, PROVIDER, trans_a=1, trans_b=1)
    assert_close(found, rounded(a, "fp16").swapaxes(1, 2) @ rounded(b, "fp16").T, "fp16")
    a, b = randn(2, 3, 16, 32), randn(2, 3, 32, 24)
    found = one_op("MatMul", "fp16", {"a": a, "b": b}, rules, PROVIDER)
    assert_close(found, rounded(a, "fp16") @ rounded(b, "fp16"), "fp16")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("rows", [8, 256])
def test_a_pinned_algorithm(dtype: str, rows: int) -> None:
    """The configuration that one session settled on, demanded by the next, is the one that runs."""
    operands = {"a": randn(rows, 1024), "b": randn(1024, 512) / 32}
    rules = name_rules(matmul="cublas.cublasLt")
    first = one_op("MatMul", dtype, operands, rules, PROVIDER, ("b",))
    config = decisions_of("MatMul_y")[0]["config"]
    assert config
    _core.Dispatcher.instance().clear_decisions()
    pinned = name_rules(matmul=f"cublas.cublasLt@{config}")
    second = one_op("MatMul", dtype, operands, pinned, PROVIDER, ("b",))
    (made,) = decisions_of("MatMul_y")
    assert (made["chosen"], made["config"], made["asked"]) == ("cublas.cublasLt", config, [f"cublas.cublasLt@{config}"])
    np.testing.assert_array_equal(first, second)


def test_a_pinned_algorithm_that_cannot_be_read_is_refused() -> None:
    rules = name_rules(matmul="cublas.cublasLt@nonsense=1")
    with pytest.raises(Exception, match="nonsense"):
        one_op("MatMul", "fp16", {"a": randn(8, 64), "b": randn(64, 64)}, rules, PROVIDER)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ((2, 16, 14, 14), (32, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
        ((2, 16, 15, 13), (32, 8, 3, 3), {"group": 2, "strides": [2, 1], "pads": [1, 1, 1, 1]}),
        ((4, 64, 7, 7), (128, 64, 1, 1), {"activation": "relu"}),
        ((2, 16, 40), (32, 16, 3), {"strides": [2], "pads": [1, 1]}),
    ],
)
def test_conv_against_float64_and_stock(dtype: str, x: Any, w: Any, attributes: dict[str, Any]) -> None:
    operands = {"x": randn(*x), "w": randn(*w) / 8, "b": randn(w[0])}
    rules = name_rules()
    found = one_op("Conv", dtype, operands, rules, PROVIDER, ("w", "b"), **attributes)
    assert_close(found, stock_conv(operands, dtype, attributes), dtype)
    assert decisions_of("Conv_y")[0]["chosen"].startswith("cudnn.")


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("shape", "axis"), [((4, 33, 768), -1), ((4, 3, 64), 1)])
@pytest.mark.parametrize("op", ["LayerNormalization", "RMSNormalization"])
@pytest.mark.parametrize("weights", ["same", "fp32"])
def test_norms(op: str, dtype: str, shape: tuple[int, ...], axis: int, weights: str) -> None:
    rms = op == "RMSNormalization"
    tail = "_fp32" if weights == "fp32" else ""
    names = ("x", f"s{tail}") if rms else ("x", f"s{tail}", f"b{tail}")
    operands = {name: randn(*(shape if name == "x" else shape[axis:])) for name in names}
    rules = name_rules(**{"rms_norm" if rms else "layer_norm": "cuda_raw"})
    found = one_op(op, dtype, operands, rules, PROVIDER, names[1:], axis=axis)
    values = [rounded(v, "fp32" if n.endswith("_fp32") else dtype) for n, v in operands.items()]
    assert_close(found, normalize(*values, axis=axis, rms=rms), dtype)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kernel", ["cuda_raw.flash_attention_v2", "cudnn.sdpa"])
@pytest.mark.parametrize(("q_length", "causal"), [(64, 1), (64, 0), (1, 2)])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_attention(dtype: str, kernel: str, q_length: int, causal: int, kv_heads: int) -> None:
    shapes = {"q": (2, 8, q_length, 64), "k": (2, kv_heads, 128, 64), "v": (2, kv_heads, 128, 64)}
    operands = {name: randn(*shape) for name, shape in shapes.items()}
    rules = name_rules("prefer", attention=kernel)
    found = one_op("Attention", dtype, operands, rules, PROVIDER, is_causal=causal)
    assert_close(found, attention(*(rounded(x, dtype) for x in operands.values()), causal=causal), dtype)
    (made,) = decisions_of("Attention_y")
    if kernel.startswith("cuda_raw"):
        assert made["chosen"] == kernel


def test_attention_on_joined_heads_and_with_a_mask() -> None:
    rules = name_rules(attention="cuda_raw.flash_attention_v2")
    operands = {"q": randn(2, 40, 8 * 64), "k": randn(2, 72, 4 * 64), "v": randn(2, 72, 4 * 64)}
    mask = randn(2, 1, 40, 72) > -0.5
    found = one_op("Attention", "fp16", {**operands, "m": mask}, rules, PROVIDER, q_num_heads=8, kv_num_heads=4)
    q, k, v = (rounded(x, "fp16") for x in operands.values())
    wanted = attention(heads_first(q, 8), heads_first(k, 4), heads_first(v, 4), mask)
    assert_close(found, wanted.swapaxes(1, 2).reshape(2, 40, 512), "fp16")


def test_strict_rules_refuse_by_name_of_every_candidate() -> None:
    rules = name_rules(matmul="cuda_raw.skinny")
    with pytest.raises(Exception, match=r"cuda_raw\.skinny(.|\n)*cublas\.cublasLt"):
        one_op("MatMul", "fp32", {"a": randn(8, 64), "b": randn(64, 64)}, rules, PROVIDER)
    rules = name_rules(matmul="cpu.blas")
    with pytest.raises(Exception, match=r"cpu\.blas(.|\n)*operands are on cuda"):
        one_op("MatMul", "fp32", {"a": randn(8, 64), "b": randn(64, 64)}, rules, PROVIDER)


def test_inputs_that_need_no_work() -> None:
    rules = name_rules()
    source = model([node("MatMul", ["a", "b"], ["y"], rules)], {n: ("fp16", [None, None]) for n in "ab"}, {"y": "fp16"})
    session = open_session(source, PROVIDER)
    for m, k, n in ((0, 8, 8), (8, 8, 0), (8, 0, 8)):
        (found,) = session.run(None, {"a": np.ones((m, k), np.float16), "b": np.ones((k, n), np.float16)})
        np.testing.assert_array_equal(found, np.zeros((m, n), np.float16))
