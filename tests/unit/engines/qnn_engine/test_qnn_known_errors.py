# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Known silent errors of QNN: each row reproduced on the installed version, and its warning in plans."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser
from qnn_models import chip

import xpuruntime as xrt
from xpuruntime.engines.known_errors import applies_to, known_errors, nodes_with_errors
from xpuruntime.engines.model import inspect_model

pytest.importorskip("onnxruntime_qnn")

X = {"x": np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)}
NODES = {
    "cumsum-of-integers": (
        "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) c = CumSum(d, a) "
        "r = QuantizeLinear(c, t, z) y = DequantizeLinear(r, t, z)"
    ),
    "in floats": "c = CumSum(x, a) y = Identity(c)",
}


def model(name: str, folder: Path) -> Path:
    head = '<ir_version: 8, opset_import: ["" : 17]>'
    made = parser.parse_model(f"{head} g (float[2, 4, 8] x) => (float[2, 4, 8] y) {{ {NODES[name]} }}")
    values = {"s": np.float32(0.03), "t": np.float32(0.06), "z": np.uint8(128), "a": np.int64(1)}
    read = {one for node in made.graph.node for one in node.input}
    made.graph.initializer.extend(numpy_helper.from_array(np.array(v), k) for k, v in values.items() if k in read)
    onnx.save(made, folder / "model.onnx")
    return folder / "model.onnx"


def test_every_row_has_a_model() -> None:
    assert {row.id for row in known_errors("qnn")} == set(NODES) - {"in floats"}


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
@pytest.mark.parametrize("name", NODES)
def test_a_row_and_the_installed_version_agree(name: str, tmp_path: Path) -> None:
    path = model(name, tmp_path)
    rows = known_errors("qnn")
    named = [error for _, error in nodes_with_errors(inspect_model(path), rows)]
    assert [error.id for error in named] == [row.id for row in rows if row.id == name]
    want = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, X)[0]
    with xrt.InferenceSession(path, device="npu", engine="qnn", policy=chip()) as session:
        wrong = np.abs(session.run(X)["y"] - want).max() > 0.2
    here = metadata.version("onnxruntime-qnn")
    assert wrong == any(applies_to(error, here, "npu") for error in named)
    if wrong:
        with pytest.raises(xrt.UnsupportedOperationError, match="zero point"):
            xrt.plan(path, policy=xrt.Policy(mode="strict", execution=execution()))


def execution() -> dict[str, object]:
    return {"device": "npu", "engine": "qnn", "provider_options": {"qnn": {"soc": "sm8650"}}}
