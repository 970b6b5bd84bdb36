# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention, as nodes and as products around a Softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
import pytest
from rewriting_models import accounted, close, found, graph, normal, only, refused, session

if TYPE_CHECKING:
    from pathlib import Path

opset_24 = pytest.mark.skipif(ort.__version__.startswith("1.23."), reason="ONNX Runtime 1.23 knows opsets up to 23")

QKV = "float[b, 2, s, 4] q, float[b, 2, t, 4] k, float[b, 2, t, 4] v"
OUT = "float[b, 2, s, 4] y"
KERNEL = {"attention": "cpu.reference"}
CONSTANTS = {"half": np.float32(0.5), "root": np.float32(0.5**0.5), "two": np.float32(2.0)}


def feeds(s: int = 3, t: int = 5, batch: int = 2) -> dict[str, Any]:
    return {"q": normal(batch, 2, s, 4), "k": normal(batch, 2, t, 4, seed=1), "v": normal(batch, 2, t, 4, seed=2)}


def attention(q: Any, k: Any, v: Any, scale: float = 0.5, mask: Any = 0.0, causal: bool = False) -> Any:
    q, k, v = (one.astype(np.float64) for one in (q, k, v))
    scores = q @ np.swapaxes(k, -1, -2) * scale + mask
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


TURN = "kt = Transpose<perm=[0,1,3,2]>(k)"
PRODUCTS = {
    "scaled after": f"{TURN}\np = MatMul(q, kt)\ns = Mul(p, half)\nw = Softmax(s)\ny = MatMul(w, v)",
    "divided after": f"{TURN}\np = MatMul(q, kt)\ns = Div(p, two)\nw = Softmax<axis=3>(s)\ny = MatMul(w, v)",
    "query scaled": f"a = Mul(half, q)\n{TURN}\np = MatMul(a, kt)\nw = Softmax(p)\ny = MatMul(w, v)",
    "both scaled": (f"a = Mul(q, root)\n{TURN}\nc = Mul(kt, root)\np = MatMul(a, c)\nw = Softmax(p)\ny = MatMul(w, v)"),
}


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("scaled after", ""),
        ("scaled after", "last"),
        ("divided after", "first"),
        ("query scaled", "last"),
        ("both scaled", ""),
        ("both scaled", "first"),
    ],
)
def test_products(name: str, mask: str, tmp_path: Path) -> None:
    body, inputs, given = PRODUCTS[name], QKV, feeds()
    if mask:
        scores = "s" if "\ns = " in body else "p"
        order = f"{scores}, mask" if mask == "last" else f"mask, {scores}"
        body = body.replace(f"({scores})\ny", "(z)\ny").replace("w = Softmax", f"z = Add({order})\nw = Softmax", 1)
        inputs += ", float[b, 1, s, t] mask"
        given["mask"] = normal(2, 1, 3, 5, seed=9)
    model = graph(inputs, OUT, body, CONSTANTS)
    rewrite = only(model, KERNEL)
    assert (rewrite.op, rewrite.node) == ("Attention", "MatMul_y")
    assert rewrite.attributes["scale"] == pytest.approx(0.5)
    assert len(rewrite.nodes) == len(model.graph.node)
    assert rewrite.inputs == ("q", "k", "v", "mask") if mask else ("q", "k", "v")
    with session(model, tmp_path, kernels=KERNEL) as opened:
        close(opened.run(given)["y"], attention(given["q"], given["k"], given["v"], 0.5, given.get("mask", 0.0)))
        report = opened.explain(given, runs=1)
    accounted(opened, report)
    assert [unit.relation for unit in report.units] == ["fused"]


def test_keys_that_come_transposed_from_somewhere_else(tmp_path: Path) -> None:
    """From [b, t, h, d] in one step, and as an input: the keys get a Transpose of their own."""
    one_step = "kt = Transpose<perm=[0,2,3,1]>(k)\np = MatMul(q, kt)\nw = Softmax(p)\ny = MatMul(w, v)"
    model = graph("float[b, 2, s, 4] q, float[b, t, 2, 4] k, float[b, 2, t, 4] v", OUT, one_step)
    rewrite = only(model, KERNEL)
    assert rewrite.before[0].perm == (0, 2, 1, 3)
    given = feeds()
    wanted = attention(given["q"], given["k"], given["v"], 1.0)
    with session(model, tmp_path, kernels=KERNEL) as opened:
        turned = {**given, "k": np.ascontiguousarray(given["k"].transpose(0, 2, 1, 3))}
        close(opened.run(turned)["y"], wanted)
        accounted(opened, opened.explain(turned, runs=1))
    plain = graph(
        "float[b, 2, s, 4] q, float[b, 2, 4, t] kt, float[b, 2, t, 4] v", OUT,
        "p = MatMul(q, kt)\nw = Softmax(p)\ny = MatMul(w, v)",
    )  # fmt: skip
    with session(plain, tmp_path, kernels=KERNEL) as opened:
        turned = {"q": given["q"], "v": given["v"], "kt": np.ascontiguousarray(given["k"].swapaxes(2, 3))}
        close(opened.run(turned)["y"], wanted)
        accounted(opened, opened.explain(turned, runs=1))


def test_a_transpose_that_others_read_stays(tmp_path: Path) -> None:
    body = PRODUCTS["scaled after"] + "\nz = Neg(kt)"
    model = graph(QKV, OUT + ", float[b, 2, 4, t] z", body, CONSTANTS)
    assert "Transpose_kt" not in only(model, KERNEL).nodes
    given = feeds()
    with session(model, tmp_path, kernels=KERNEL) as opened:
        got = opened.run(given)
        close(got["y"], attention(**given))
        assert np.array_equal(got["z"], -given["k"].swapaxes(2, 3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("y = MatMul(w, v)", "y = MatMul(w, v)\nz = Neg(w)"), "scores are read elsewhere"),
        (("float[b, 2, t, 4] v", "float[b, 2, t, 8] v"), "sizes of its heads"),
        (("float[b, 2, t, 4] k", "float[c, 2, t, 4] k"), "batches are not known to be alike"),
        (("float[b, 2, s, 4] q", "float[b, h, s, 4] q"), "numbers of heads"),
    ],
)
def test_why_products_stay(change: tuple[str, str], reason: str) -> None:
    inputs, body, outputs = QKV.replace(*change), PRODUCTS["scaled after"].replace(*change), "float[d, e, f, g] y"
    if "z =" in body:
        outputs += ", float[d, e, f, h] z"
    assert reason in refused(graph(inputs, outputs, body, CONSTANTS), KERNEL)


@pytest.mark.parametrize(
    "change",
    [
        ("w = Softmax(s)", "w = Softmax<axis=2>(s)"),
        ("s = Mul(p, half)", "s = Mul(p, p)"),
        ("s = Mul(p, half)", "s = Exp(p)"),
    ],
)
def test_products_that_are_no_attention(change: tuple[str, str]) -> None:
    result = found(graph(QKV, OUT, PRODUCTS["scaled after"].replace(*change), CONSTANTS), KERNEL)
    assert not result.rewrites
    assert not result.left


NODE = "y = Attention{}({})"


@pytest.mark.parametrize("opset", [23, pytest.param(24, marks=opset_24)])
@pytest.mark.parametrize(
    ("given", "operands", "extra", "wanted"),
    [
        ("", "q, k, v", "", {}),
        ("<scale=0.25>", "q, k, v", "", {"scale": 0.25}),
        ("<is_causal=1>", "q, k, v", "", {"causal": True}),
        ("", "q, k, v, mask", ", float[b, 2, s, t] mask", {"mask": "float"}),
        ("", "q, k, v, mask", ", bool[s, t] mask", {"mask": "bool"}),
    ],
)
def test_the_node_of_the_standard(
    opset: int, given: str, operands: str, extra: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    model = graph(QKV + extra, OUT, NODE.format(given, operands), opset=opset)
    arrays, added = feeds(), 0.0
    if wanted.get("mask") == "float":
        arrays["mask"] = added = normal(2, 2, 3, 5, seed=4)
    elif wanted.get("mask") == "bool":
        arrays["mask"] = np.tril(np.ones((3, 5), bool), 1)
        added = np.where(arrays["mask"], 0.0, -np.inf)
    rewrite = only(model, KERNEL)
    assert rewrite.op == "Attention"
    result = attention(
        arrays["q"], arrays["k"], arrays["v"], wanted.get("scale", 0.5), added, wanted.get("causal", False)
    )
    with session(model, tmp_path, kernels=KERNEL) as opened:
        close(opened.run(arrays)["y"], result)


def test_the_node_with_heads_in_one_dimension(tmp_path: Path) -> None:
    """Grouped: four heads of queries on two of keys."""
    model = graph(
        "float[b, s, 16] q, float[b, t, 8] k, float[b, t, 8] v", "float[b, s, 16] y",
        "y = Attention<q_num_heads=4, kv_num_heads=2>(q, k, v)", opset=23,
    )  # fmt: skip
    assert only(model, KERNEL).attributes["kv_num_heads"] == 2
    q, k, v = normal(2, 3, 16), normal(2, 5, 8, seed=1), normal(2, 5, 8, seed=2)
    heads = [one.reshape(2, -1, n, 4).swapaxes(1, 2) for one, n in ((q, 4), (k, 2), (v, 2))]
    wanted = attention(heads[0], heads[1].repeat(2, 1), heads[2].repeat(2, 1)).swapaxes(1, 2).reshape(2, 3, 16)
    with session(model, tmp_path, kernels=KERNEL) as opened:
        close(opened.run({"q": q, "k": k, "v": v})["y"], wanted)


@pytest.mark.parametrize(
    ("body", "extra", "outputs", "reason"),
    [
        (NODE.format("<softcap=5.0>", "q, k, v"), "", OUT, "softcap is 5"),
        ("y, p, w = Attention(q, k, v, , pk, pv)", ", float[b, 2, u, 4] pk, float[b, 2, u, 4] pv", OUT, "past keys"),
        ("y, , , w = Attention(q, k, v)", "", OUT + ", float[b, 2, s, t] w", "scores are read"),
    ],
)
def test_why_the_node_stays(body: str, extra: str, outputs: str, reason: str) -> None:
    assert reason in refused(graph(QKV + extra, outputs, body, opset=23), KERNEL)


MULTI = "float[b, s, 8] q, float[b, t, 8] k, float[b, t, 8] v"


@pytest.mark.parametrize("bias", [False, True])
def test_multi_head_attention_of_onnx_runtime(bias: bool, tmp_path: Path) -> None:
    inputs = MULTI + (", float[1, 2, s, t] added" if bias else "")
    body = f"y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v{', , , added' if bias else ''})"
    model = graph(inputs, "float[b, s, 8] y", body, domains=', "com.microsoft" : 1')
    assert only(model, KERNEL).attributes["q_num_heads"] == 2
    arrays = {"q": normal(2, 3, 8), "k": normal(2, 5, 8, seed=1), "v": normal(2, 5, 8, seed=2)}
    heads = [array.reshape(2, -1, 2, 4).swapaxes(1, 2) for array in arrays.values()]
    added = normal(1, 2, 3, 5, seed=4) if bias else 0.0
    if bias:
        arrays["added"] = added
    wanted = attention(*heads, mask=added).swapaxes(1, 2).reshape(2, 3, 8)
    with session(model, tmp_path, kernels=KERNEL) as opened:
        close(opened.run(arrays)["y"], wanted)


@pytest.mark.parametrize(
    ("body", "extra", "reason"),
    [
        ("y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v, c)", ", float[24] c", "it takes bias"),
        ("y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v, , m)", ", int32[b] m", "key_padding_mask"),
        ("y = com.microsoft.MultiHeadAttention<num_heads=2, unidirectional=1>(q, k, v)", "", "it is causal"),
        ("y = com.microsoft.Attention<num_heads=2>(q, w)", ", float[8, 24] w", "its own weights"),
    ],
)
def test_why_nodes_of_onnx_runtime_stay(body: str, extra: str, reason: str) -> None:
    model = graph(MULTI + extra, "float[b, s, 8] y", body, domains=', "com.microsoft" : 1')
    assert reason in refused(model, KERNEL)


@pytest.mark.needs_build("cuda")
@pytest.mark.parametrize(("kernels", "rewritten", "free"), [
    ({"layer_norm": "cuda_raw"}, [], ["MatMul_y"]),
    ({"matmul": "cuda_raw"}, ["MatMul_p", "MatMul_y"], []),
    ({"rules": [{"match": {"node": "MatMul_p"}, "use": "cuda_raw"}]}, ["MatMul_p"], ["MatMul_y"]),
])  # fmt: skip
def test_a_product_with_a_key_of_its_own_is_not_measured_as_a_part_of_attention(
    kernels: dict[str, Any], rewritten: list[str], free: list[str]
) -> None:
    sizes = "float16[2, 2, 8, 64] q, float16[2, 2, 16, 64] k, float16[2, 2, 16, 64] v"
    model = graph(sizes, "float16[2, 2, 8, 64] y", f"{TURN}\np = MatMul(q, kt)\nw = Softmax(p)\ny = MatMul(w, v)")
    seen = found(model, kernels, device="cuda:0", tune=True)
    assert [rewrite.node for rewrite in seen.rewrites] == rewritten
    assert [one.node for one in seen.free] == free
    nodes = [name for rewrite in (*seen.rewrites, *seen.free) for name in rewrite.nodes]
    assert len(nodes) == len(set(nodes)), "a node belongs to one rewrite"
