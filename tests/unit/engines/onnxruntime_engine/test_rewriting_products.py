# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""MatMul, Gemm and Conv with what is folded into them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rewriting_models import accounted, close, found, graph, normal, only, refused, save, session, stock

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path

W, B = normal(6, 5), normal(5, seed=1)
HALF, ONE = np.float32(0.5), np.float32(1.0)
ROOT2, INV_ROOT2 = np.float32(math.sqrt(2)), np.float32(math.sqrt(0.5))
FLOAT_IN, FLOAT_OUT = "float[n, 6] x", "float[n, 5] y"


def erf(x: Any) -> Any:
    return np.vectorize(math.erf)(x)


ACTIVATIONS: dict[str, tuple[str, str, Any]] = {
    "relu": ("y = Relu(h)", "relu", lambda x: np.maximum(x, 0)),
    "gelu": ('y = Gelu<approximate="none">(h)', "gelu", lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2)))),
    "gelu_tanh": (
        'y = Gelu<approximate="tanh">(h)',
        "gelu_tanh",
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "silu": ("s = Sigmoid(h)\ny = Mul(h, s)", "silu", lambda x: x / (1 + np.exp(-x))),
    "silu turned round": ("s = Sigmoid(h)\ny = Mul(s, h)", "silu", lambda x: x / (1 + np.exp(-x))),
    "gelu by Div": (
        "d = Div(h, root2)\ne = Erf(d)\na = Add(e, one)\nm = Mul(h, a)\ny = Mul(m, half)",
        "gelu",
        lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    ),
    "gelu by Mul, half first": (
        "d = Mul(h, inv)\ne = Erf(d)\na = Add(one, e)\nm = Mul(h, half)\ny = Mul(m, a)",
        "gelu",
        lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    ),
    "gelu, half of the gate": (
        "d = Div(h, root2)\ne = Erf(d)\na = Add(e, one)\nm = Mul(a, half)\ny = Mul(h, m)",
        "gelu",
        lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    ),
}
SCALARS = {"half": HALF, "one": ONE, "root2": ROOT2, "inv": INV_ROOT2}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("matmul+add", name) for name in ACTIVATIONS),
        ("matmul", "relu"),
        ("matmul", "gelu by Div"),
        ("gemm", "silu"),
        ("gemm", "gelu by Div"),
    ],
)
def test_a_product_takes_its_bias_and_activation_along(name: str, form: str, tmp_path: Path) -> None:
    text, word, function = ACTIVATIONS[name]
    start = {
        "matmul+add": "p = MatMul(x, w)\nh = Add(p, b)",
        "matmul": "h = MatMul(x, w)",
        "gemm": "h = Gemm(x, w, b)",
    }[form]
    model = graph(FLOAT_IN, FLOAT_OUT, f"{start}\n{text}", {"w": W, "b": B, **SCALARS})
    rewrite = only(model)
    assert rewrite.op == "MatMul"
    assert rewrite.attributes["activation"] == word
    assert rewrite.output == "y"
    assert sorted(rewrite.nodes) == sorted(node.name for node in model.graph.node)
    x = normal(7, 6, seed=3)
    bias = 0.0 if form == "matmul" else B.astype(np.float64)
    wanted = function(x.astype(np.float64) @ W.astype(np.float64) + bias)
    with session(model, tmp_path) as opened:
        close(opened.run({"x": x})["y"], wanted)
        report = opened.explain({"x": x}, runs=1)
    unit = next(unit for unit in report.units if unit.kernel)
    assert (unit.kernel, unit.kernel_source) == ("cpu.blas", "reported")
    assert len(unit.source_nodes) == len(model.graph.node)
    accounted(opened, report)


@pytest.mark.parametrize(("trans_a", "trans_b", "bias"), [(0, 0, False), (1, 0, True), (0, 1, True), (1, 1, False)])
def test_gemm_may_be_transposed(trans_a: int, trans_b: int, bias: bool, tmp_path: Path) -> None:
    w = W.T.copy() if trans_b else W
    shape = "float[6, n] x" if trans_a else FLOAT_IN
    body = f"y = Gemm<transA={trans_a}, transB={trans_b}>(x, w{', b' if bias else ''})"
    model = graph(shape, FLOAT_OUT, body, {"w": w, "b": B} if bias else {"w": w})
    x = normal(6, 4) if trans_a else normal(4, 6)
    wanted = (x.T if trans_a else x).astype(np.float64) @ W + (B if bias else 0)
    with session(model, tmp_path) as opened:
        close(opened.run({"x": x})["y"], wanted)


@pytest.mark.parametrize(
    ("left", "right", "a", "b"),
    [
        ("2, 3, n, 6", "6, 5", (2, 3, 4, 6), (6, 5)),
        ("2, n, 6", "2, 6, 5", (2, 4, 6), (2, 6, 5)),
        ("h, n, 6", "h, 6, 5", (3, 4, 6), (3, 6, 5)),
        ("1, n, 6", "2, 6, 5", (1, 4, 6), (2, 6, 5)),
        ("n, 6", "2, 6, 5", (4, 6), (2, 6, 5)),
        ("2, n, 6", "1, 6, 5", (2, 4, 6), (1, 6, 5)),
    ],
)
def test_batches(left: str, right: str, a: tuple[int, ...], b: tuple[int, ...], tmp_path: Path) -> None:
    rank = max(len(a), len(b))
    model = graph(f"float[{left}] x, float[{right}] w", f"float[{', '.join('abcd'[:rank])}] y", "y = MatMul(x, w)")
    feeds = {"x": normal(*a), "w": normal(*b, seed=1)}
    with session(model, tmp_path) as opened:
        close(opened.run(feeds)["y"], feeds["x"].astype(np.float64) @ feeds["w"])


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (("int32[2, 3] x, int32[3, 2] w", "int32[2, 2] y", "y = MatMul(x, w)"), "no floating-point numbers"),
        (("float[6] x", "float[5] y", "y = MatMul(x, w)", {"w": W}), "a vector"),
        (("float x, float[6, 5] w", "float y", "y = MatMul(x, w)"), "a vector|number of dimensions"),
        (("float[2, 1, n, 6] x, float[2, 3, 6, 5] w", "float[a, b, c, d] y", "y = MatMul(x, w)"), "repeated along"),
        (("float[p, n, 6] x, float[q, 6, 5] w", "float[a, b, c] y", "y = MatMul(x, w)"), "repeated along"),
        ((FLOAT_IN, FLOAT_OUT, "y = Gemm<alpha=2.0>(x, w)", {"w": W}), "alpha is 2"),
        ((FLOAT_IN, FLOAT_OUT, "y = Gemm<beta=0.5>(x, w, b)", {"w": W, "b": B}), "beta is 0.5"),
        ((FLOAT_IN, FLOAT_OUT, "y = Gemm(x, w, b)", {"w": W, "b": B[None]}), "no constant vector"),
        ((FLOAT_IN + ", float[5] b", FLOAT_OUT, "y = Gemm(x, w, b)", {"w": W}), "no constant vector"),
        (
            ("float16[n, 6] x", "float16[n, 5] y", "y = MatMul(x, w)", {"w": W.astype(np.float16)}),
            "cpu.blas: OpenBLAS multiplies fp32 and fp64",
        ),
        (
            (
                FLOAT_IN, FLOAT_OUT, "d = DequantizeLinear(q, s)\ny = MatMul(x, d)",
                {"q": np.ones((6, 5), np.int8), "s": np.float32(0.1)},
            ),
            "dequantized",
        ),
    ],
)  # fmt: skip
def test_why_a_product_stays(model: tuple[Any, ...], reason: str) -> None:
    import re

    assert re.search(reason, refused(graph(*model), {"matmul": "cpu.blas"}))


@pytest.mark.parametrize(
    ("body", "folded"),
    [
        # Somebody else reads what would be folded away.
        ("h = MatMul(x, w)\ny = Relu(h)\nz = Neg(h)", 1),
        ("p = MatMul(x, w)\nh = Add(p, b)\ny = Relu(h)\nz = Neg(h)", 2),
        ("p = MatMul(x, w)\nh = Add(p, b)\ny = Relu(h)\nz = Neg(p)", 1),
        ("h = MatMul(x, w)\ns = Sigmoid(h)\ny = Mul(h, s)\nz = Neg(s)", 1),
    ],
)
def test_what_others_read_is_kept(body: str, folded: int, tmp_path: Path) -> None:
    model = graph(FLOAT_IN, FLOAT_OUT + ", float[n, 5] z", body, {"w": W, "b": B})
    assert len(only(model).nodes) == folded
    x = normal(3, 6)
    with session(model, tmp_path) as opened:
        got, wanted = opened.run({"x": x}), stock(model, {"x": x})
        for name in ("y", "z"):
            close(got[name], wanted[name])


@pytest.mark.parametrize("shape", [(1, 5), (7, 1), (1,), ()])
def test_an_add_that_is_no_bias_is_left_alone(shape: tuple[int, ...], tmp_path: Path) -> None:
    model = graph("float[7, 6] x", "float[7, 5] y", "p = MatMul(x, w)\ny = Add(p, b)", {"w": W, "b": normal(*shape)})
    assert only(model).nodes == ("MatMul_p",)
    with session(model, tmp_path) as opened:
        x = normal(7, 6)
        close(opened.run({"x": x})["y"], stock(model, {"x": x})["y"])


def test_a_bias_that_widens_the_result_is_left_alone() -> None:
    model = graph("float[n, 6] x", "float[n, 5] y", "p = MatMul(x, w)\ny = Add(p, b)", {"w": normal(6, 1), "b": B})
    assert only(model).nodes == ("MatMul_p",)


@pytest.mark.needs_build("cublas")
def test_only_what_the_kernel_can_do_is_folded() -> None:
    """cublas.cublas adds no bias, and cublas.cublasLt has no silu."""
    model = graph(
        FLOAT_IN, FLOAT_OUT, "p = MatMul(x, w)\nh = Add(p, b)\ns = Sigmoid(h)\ny = Mul(h, s)", {"w": W, "b": B}
    )
    for kernel, count in (("cublas.cublas", 1), ("cublas.cublasLt", 2)):
        result = found(model, {"matmul": kernel}, device="cuda:0")
        assert [len(rewrite.nodes) for rewrite in result.rewrites] == [count], kernel
    result = found(model, {"matmul": "cpu.blas"}, device="cuda:0")
    assert "serves another kind of device" in result.left[0].reason


@pytest.mark.needs_build("cublas")
def test_tf32_is_what_the_provider_is_told() -> None:
    model = graph(FLOAT_IN, FLOAT_OUT, "y = MatMul(x, w)", {"w": W})
    rules = {"rules": [{"match": {"op": "matmul", "dtype": "tf32"}, "use": "cublas"}]}
    assert found(model, rules, device="cuda:0", allow_tf32=True).rewrites[0].attributes["allow_tf32"] == 1
    assert not found(model, rules, device="cuda:0", allow_tf32=False).rewrites


CONVS = [
    ("", (4, 3, 3, 3), True, "relu"),
    ("<strides=[2,1], pads=[1,0,2,1]>", (4, 3, 3, 2), False, "silu"),
    ("<dilations=[2,2], pads=[2,2,2,2]>", (4, 3, 3, 3), True, "none"),
    ("<group=3>", (6, 1, 3, 3), True, "gelu"),
    ('<auto_pad="VALID">', (4, 3, 5, 5), False, "none"),
]


@pytest.mark.parametrize(("given", "shape", "bias", "activation"), CONVS)
def test_convolutions(given: str, shape: tuple[int, ...], bias: bool, activation: str, tmp_path: Path) -> None:
    tail = {
        "none": "y = Identity(h)",
        "relu": "y = Relu(h)",
        "silu": "s = Sigmoid(h)\ny = Mul(h, s)",
        "gelu": "y = Gelu(h)",
    }[activation]
    weights = {"w": normal(*shape), "b": normal(shape[0], seed=1)}
    body = f"h = Conv{given}(x, w{', b' if bias else ''})\n{tail}"
    model = graph("float[n, 3, 9, 10] x", "float[a, b, c, d] y", body, weights if bias else {"w": weights["w"]})
    rewrite = only(model)
    assert (rewrite.op, rewrite.attributes["activation"]) == ("Conv", activation)
    x = normal(2, 3, 9, 10, seed=4)
    with session(model, tmp_path) as opened:
        close(opened.run({"x": x})["y"], stock(model, {"x": x})["y"])


@pytest.mark.parametrize(
    ("shape", "weight", "body", "reason"),
    [
        ("n, 3, 9", (4, 3, 3), "y = Conv(x, w)", "over 1 dimensions"),
        ("n, 3, 9, 9", (4, 3, 3, 3), 'y = Conv<auto_pad="SAME_UPPER">(x, w)', "auto_pad is SAME_UPPER"),
        ("n, 3, 9, 9", (3, 4, 3, 3), "y = ConvTranspose(x, w)", "transposed convolution"),
    ],
)
def test_why_a_convolution_stays(shape: str, weight: tuple[int, ...], body: str, reason: str) -> None:
    model = graph(f"float[{shape}] x", "float y", body, {"w": normal(*weight)})
    assert reason in refused(model)


@pytest.mark.parametrize("seed", range(6))
def test_random_graphs(seed: int, tmp_path: Path) -> None:
    """Chains with branches, shared tensors and several outputs compute the same as without rewrites."""
    random = np.random.default_rng(seed)
    weights: dict[str, Any] = dict(SCALARS)
    live, lines = ["x"], []
    for step in range(14):
        source, other, name = random.choice(live), random.choice(live), f"t{step}"
        kind = random.choice(["matmul", "gemm", "bias", "relu", "gelu", "silu", "add", "norm", "erf"])
        if kind in ("matmul", "gemm"):
            weights[f"w{step}"] = normal(6, 6, seed=step) / 3
            if kind == "gemm":
                weights[f"b{step}"] = normal(6, seed=step)
            lines.append(
                f"{name} = "
                + (f"MatMul({source}, w{step})" if kind == "matmul" else f"Gemm({source}, w{step}, b{step})")
            )
        elif kind in ("bias", "norm"):
            weights[f"b{step}"] = normal(6, seed=step)
            weights[f"g{step}"] = normal(6, seed=step + 50)
            lines.append(
                f"{name} = "
                + (f"Add({source}, b{step})" if kind == "bias" else f"LayerNormalization({source}, g{step}, b{step})")
            )
        elif kind == "add":
            lines.append(f"{name} = Add({source}, {other})")
        elif kind == "silu":
            lines.append(f"s{step} = Sigmoid({source})\n{name} = Mul({source}, s{step})")
        elif kind == "erf":
            lines.append(
                f"d{step} = Div({source}, root2)\ne{step} = Erf(d{step})\na{step} = Add(e{step}, one)\n"
                f"m{step} = Mul({source}, a{step})\n{name} = Mul(m{step}, half)"
            )
        else:
            lines.append(f"{name} = {'Relu' if kind == 'relu' else 'Gelu'}({source})")
        live = [*live, name][-4:]
    outputs = live[-2:]
    model = graph("float[n, 6] x", ", ".join(f"float[n, 6] {o}" for o in outputs), "\n".join(lines), weights)
    x = normal(3, 6, seed=seed)
    with session(model, tmp_path) as opened:
        got, wanted = opened.run({"x": x}), stock(model, {"x": x})
        for name in outputs:
            close(got[name], wanted[name], rtol=2e-4)
        accounted(opened, opened.explain({"x": x}, runs=1))


def test_inside_a_branch(tmp_path: Path) -> None:
    body = """
        y = If (c) <
          then_branch = t () => (float[n, 5] ty) { th = MatMul(x, w) ty = Relu(th) },
          else_branch = e () => (float[n, 5] ey) { ey = Gemm(x, w, b) }
        >"""
    model = graph(FLOAT_IN + ", bool c", FLOAT_OUT, body, {"w": W, "b": B})
    path = save(model, tmp_path)
    x = normal(3, 6)
    with session(path, tmp_path) as opened:
        assert len(opened.plan.settings["rewrites"]) == 2
        for c in (True, False):
            feeds = {"x": x, "c": np.array(c)}
            close(opened.run(feeds)["y"], stock(model, feeds)["y"])
            accounted(opened, opened.explain(feeds, runs=1))


def test_a_function_of_the_model_is_not_looked_into(tmp_path: Path) -> None:
    """Its nodes have no names of their own before ONNX Runtime expands it, so a key cannot reach them."""
    import onnx
    from onnx import parser

    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21, "local" : 1]>
        g (float[n, 6] x, float[6, 5] w) => (float[n, 5] y) { y = local.Twice(x, w) }
        <domain: "local", opset_import: ["" : 21]>
        Twice (a, b) => (c) { m = MatMul(a, b) c = Add(m, m) }
    """)
    onnx.checker.check_model(model)
    policy = xrt.Policy(kernels={"matmul": "cpu.blas"}, mode="prefer")
    path = save(model, tmp_path)
    plan = xrt.plan(path, engine="onnxruntime", device="cpu", policy=policy)
    control = plan.control("kernels.matmul")
    assert control is not None
    assert control.enforceability == "unsupported"
    assert "function" in control.reason
