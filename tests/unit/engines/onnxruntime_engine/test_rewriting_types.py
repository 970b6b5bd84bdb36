# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Types and sizes behind operators that ONNX does not define."""

from __future__ import annotations

import pytest
from rewriting_models import found, graph, normal

BODIES = {
    "MultiHeadAttention": "h = com.microsoft.MultiHeadAttention<num_heads=2>(x, x, x)",
    "SkipLayerNormalization": "h = com.microsoft.SkipLayerNormalization(x, x, g)",
    "sum of SkipLayerNormalization": "n, , , h = com.microsoft.SkipLayerNormalization(x, x, g)",
    "FastGelu": "h = com.microsoft.FastGelu(x)",
    "BiasGelu": "h = com.microsoft.BiasGelu(x, g)",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_product_behind_it_is_rewritten(body: str) -> None:
    model = graph(
        "float[b, s, 8] x",
        "float[b, s, 4] y",
        f"{body}\ny = MatMul(h, w)",
        {"w": normal(8, 4), "g": normal(8)},
        domains=', "com.microsoft" : 1',
    )
    result = found(model, {"matmul": "cpu.blas"})
    assert [rewrite.node for rewrite in result.rewrites] == ["MatMul_y"], [str(one) for one in result.left]


def test_packed_queries_keys_and_values_tell_nothing() -> None:
    model = graph(
        "float[b, s, 2, 3, 4] x",
        "float[b, s, 4] y",
        "h = com.microsoft.MultiHeadAttention<num_heads=2>(x)\ny = MatMul(h, w)",
        {"w": normal(8, 4)},
        domains=', "com.microsoft" : 1',
    )
    (left,) = found(model, {"matmul": "cpu.blas"}).left
    assert "not known before it runs" in str(left)
