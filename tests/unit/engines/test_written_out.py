# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operations that models write out are found, and kernel keys for what is missing are never enforced or honoured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
import pytest

import xpuruntime as xrt
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.written_out import written_out
from xpuruntime.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from pathlib import Path

QKV = "float[1, 2, 8, 16] q, float[1, 2, 8, 16] k, float[1, 2, 8, 16] v"
CONSTANTS = "<float c = {4.0}, float two = {2.0}, float e = {0.00001}, float half = {0.5}, int64[1] last = {-1}>"
#: Body of a graph to what it writes out.
ATTENTIONS = {
    "plain": "kt = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, kt) p = Softmax<axis = -1>(s) y = MatMul(p, v)",
    "divided": "kt = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, kt) d = Div(s, c) p = Softmax(d) y = MatMul(p, v)",
    "scaled before": "a = Div(q, c) kt = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(a, kt) p = Softmax(s) "
    "y = MatMul(p, v)",
    "masked": "kt = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, kt) m = Add(s, c) n = Where(b, m, c) "
    "p = Softmax(n) z = Where(b, p, c) y = MatMul(z, v)",
    "einsum": 's = Einsum<equation = "bhid,bhjd->bhij">(q, k) p = Softmax(s) '
    'y = Einsum<equation = "bhij,bhjd->bhid">(p, v)',
    "softmax written out": "kt = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, kt) m = ReduceMax<axes = [-1]>(s) "
    "d = Sub(s, m) x = Exp(d) t = ReduceSum(x, last) p = Div(x, t) y = MatMul(p, v)",
    "softcap": "kt = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, kt) a = Div(s, c) b2 = Tanh(a) d = Mul(b2, c) "
    "p = Softmax(d) y = MatMul(p, v)",
    "half precision": "kt = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, kt) h = Cast<to = 1>(s) p = Softmax(h) "
    "g = Cast<to = 1>(p) y = MatMul(g, v)",
}
NORMS = {
    "layer norm by Pow": ("layer_norm", "m = ReduceMean<axes = [-1]>(q) d = Sub(q, m) d2 = Pow(d, two) "
     "v2 = ReduceMean<axes = [-1]>(d2) ve = Add(v2, e) r = Sqrt(ve) y = Div(d, r)"),
    "layer norm by Mul": ("layer_norm", "m = ReduceMean<axes = [-1]>(q) d = Sub(q, m) d2 = Mul(d, d) "
     "v2 = ReduceMean<axes = [-1]>(d2) ve = Add(v2, e) r = Pow(ve, half) y = Div(d, r)"),
    "rms norm by Reciprocal": ("rms_norm", "d2 = Pow(q, two) v2 = ReduceMean<axes = [-1]>(d2) ve = Add(v2, e) "
     "r = Sqrt(ve) i = Reciprocal(r) y = Mul(q, i)"),
    "rms norm by Div": ("rms_norm", "d2 = Mul(q, q) v2 = ReduceMean<axes = [-1]>(d2) ve = Add(v2, e) r = Sqrt(ve) "
     "y = Div(q, r)"),
}  # fmt: skip
#: Alike, and none.
NOT_ATTENTION = {
    "a classifier": "s = MatMul(q, c2) y = Softmax(s)",
    "a gate": "p = Softmax(q) y = Mul(p, q)",
    "a root": "a = Abs(q) y = Sqrt(a)",
    "a distance": "d2 = Mul(q, q) s = ReduceSum(d2, last) y = Sqrt(s)",
}


def model(body: str, folder: Path) -> Path:
    extra = ", bool[1, 1, 8, 8] b" if "Where(b" in body else ""
    constants = CONSTANTS
    if "c2" in body:
        constants = constants[:-1] + ", float[16, 1] c2 = {" + ", ".join(["1.0"] * 16) + "}>"
    text = f'<ir_version: 8, opset_import: ["": 17]> g ({QKV}{extra}) => (float y) {constants} {{ {body} }}'
    proto = onnx.parser.parse_model(text)
    del proto.graph.output[0].type.tensor_type.shape.dim[:]
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    path = folder / "model.onnx"
    onnx.save(proto, path)
    return path


def planned(path: Path, mode: str, engine: str = "onnxruntime", **kernels: Any) -> Any:
    execution = {"engine": engine, "device": "cpu"}
    return xrt.plan(path, policy={"mode": mode, "kernels": kernels, "execution": execution})


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention_written_out_is_found_and_refused_where_nothing_serves_it(kind: str, tmp_path: Path) -> None:
    path = model(ATTENTIONS[kind], tmp_path)
    assert "attention" in written_out(inspect_model(path).nodes)
    with pytest.raises(UnsupportedOperationError, match=r"writes attention out|serves another kind of device"):
        planned(path, "strict", attention="flash_v2")
    control = planned(path, "prefer", attention="flash_v2").control("kernels.attention")
    assert control.enforceability == "unsupported"


@pytest.mark.parametrize("kind", NORMS)
def test_norms_written_out_are_found(kind: str, tmp_path: Path) -> None:
    op, body = NORMS[kind]
    path = model(body, tmp_path)
    assert [name for name in written_out(inspect_model(path).nodes) if name.endswith("norm")] == [op]
    other = {"layer_norm": "rms_norm", "rms_norm": "layer_norm"}[op]
    absent = planned(path, "prefer", **{other: "cpu.reference"}).control(f"kernels.{other}")
    assert absent.enforceability == "unsupported"
    foreign = planned(path, "prefer", **{op: f"cuda_raw.{op}"}).control(f"kernels.{op}")
    assert foreign.enforceability == "unsupported"


@pytest.mark.parametrize("kind", NOT_ATTENTION)
@pytest.mark.parametrize("op", ["attention", "layer_norm", "rms_norm", "conv"])
def test_what_is_not_there_is_neither_enforced_nor_honoured(op: str, kind: str, tmp_path: Path) -> None:
    path = model(NOT_ATTENTION[kind], tmp_path)
    assert op not in written_out(inspect_model(path).nodes)
    fix = r"state the key for an operation that the model has|name a model with such a node"
    with pytest.raises(UnsupportedOperationError, match=rf"no {op} was found in the model.*Fix: ({fix})"):
        planned(path, "strict", **{op: "cpu.reference"})
    with pytest.raises(UnsupportedOperationError, match=r"kernels\.rules\[0\]"):
        planned(path, "strict", rules=[{"match": {"op": op}, "use": "cpu.reference"}])
    execution = {"engine": "onnxruntime", "device": "cpu"}
    with pytest.warns(xrt.XpuRuntimeWarning, match="chooses nothing"):
        session = xrt.InferenceSession(path, policy={"kernels": {op: "cpu.reference"}, "execution": execution})
    with session:
        report = session.explain(runs=1)
    assert {o.key: o.status for o in report.observations}[f"kernels.{op}"] == "unsupported"
    assert not report.honoured


@pytest.mark.parametrize("op", ["QAttention", "GroupQueryAttention", "MultiHeadAttention"])
def test_contributed_operators(op: str) -> None:
    from xpuruntime.engines.model import NodeInfo

    node = NodeInfo(name="n", op=op, domain="com.microsoft", inputs=("x",), outputs=("y",))
    assert written_out([node]) == {"attention": ("n",)}
