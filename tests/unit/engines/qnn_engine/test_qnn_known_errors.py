# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Known silent errors of QNN: each row reproduced on the installed version, and its warning in plans.

Models run in a process of their own: an operator that reads stale memory may end it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import yaml
from onnx import numpy_helper, parser
from sampled import part

import xpuruntime as xrt
from xpuruntime.engines.known_errors import applies_to, known_errors, nodes_with_errors
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.registry import default_registry
from xpuruntime.planning import PlanRequest, resolve
from xpuruntime.policies import Policy
from xpuruntime.runtime.snapshot import machine_snapshot

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("onnxruntime_qnn")

RANDOM = np.random.default_rng(0)
F32 = np.float32
IMAGE = {"x": RANDOM.standard_normal((1, 1, 8, 8)).astype(F32)}
X = {"x": RANDOM.standard_normal((2, 4, 8)).astype(F32)}
UP = {"w": RANDOM.standard_normal((1, 1, 2, 2)).astype(F32)}
POOL = "float[1, 1, 8, 8] x) => (float[1, 1, h, w] y) { y = AveragePool"
LARGE = np.int32([[2**31 - 1, -(2**31), 16777217, 1900000000]])
#: Row, or words where it is right, to a graph, its inputs and its constants.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cumsum-of-integers": (
        "float[2, 4, 8] x) => (float[2, 4, 8] y) { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) "
        "c = CumSum(d, a) r = QuantizeLinear(c, t, z) y = DequantizeLinear(r, t, z) }",
        X,
        {"s": F32(0.03), "t": F32(0.06), "z": np.uint8(128), "a": np.int64(1)},
    ),
    "cumsum in floats": ("float[2, 4, 8] x) => (float[2, 4, 8] y) { y = CumSum(x, a) }", X, {"a": np.int64(1)}),
    "saturating-32-bits": (
        "int32[1, 4] x, int32[1, 4] k) => (int32[1, 4] y) { y = Add(x, k) }",
        {"x": LARGE, "k": np.int32([[5, -7, 1, 1900000000]])},
        {},
    ),
    "average-pool-ceil": (f"{POOL} <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1> (x) }}", IMAGE, {}),
    "average-pool-padding": (
        f"{POOL} <kernel_shape = [3, 3], pads = [1, 1, 1, 1], count_include_pad = 1> (x) }}",
        IMAGE,
        {},
    ),
    "average-pool-same": (
        "float[1, 32, 9, 9] x) => (float[1, 32, 9, 9] y) { y = AveragePool <kernel_shape = [2, 2], "
        'auto_pad = "SAME_UPPER"> (x) }',
        {"x": RANDOM.standard_normal((1, 32, 9, 9)).astype(F32)},
        {},
    ),
    "average pool": (f"{POOL} <kernel_shape = [3, 3], strides = [2, 2]> (x) }}", IMAGE, {}),
    "cast-of-uint8": (
        "uint8[1, 4] x) => (float[1, 4] y) { y = Cast <to = 1> (x) }",
        {"x": np.uint8([[1, 2, 3, 255]])},
        {},
    ),
    "cast to int32 first": (
        "uint8[1, 4] x) => (float[1, 4] y) { i = Cast <to = 6> (x) y = Cast <to = 1> (i) }",
        {"x": np.uint8([[1, 2, 3, 255]])},
        {},
    ),
    "cast-like-of-uint8": (
        "uint8[1, 4] x, float[1] k) => (float[1, 4] y) { y = CastLike (x, k) }",
        {"x": np.uint8([[1, 2, 3, 255]]), "k": np.ones(1, F32)},
        {},
    ),
    "conv-transpose-output-padding": (
        "float[1, 1, 8, 8] x) => (float[1, 1, h, w] y) "
        "{ y = ConvTranspose <strides = [2, 2], output_padding = [1, 1]> (x, w) }",
        IMAGE,
        UP,
    ),
    "conv-transpose-output-shape": (
        "float[1, 1, 8, 8] x) => (float[1, 1, h, w] y) "
        "{ y = ConvTranspose <strides = [2, 2], output_shape = [17, 17]> (x, w) }",
        IMAGE,
        UP,
    ),
    "cos-and-sin-of-large-numbers": (
        "float[1, 3] x) => (float[1, 3] y) { y = Sin (x) }",
        {"x": F32([[1000, 3000, 1]])},
        {},
    ),
    "exp-of-small-numbers": ("float[1, 3] x) => (float[1, 3] y) { y = Exp (x) }", {"x": F32([[-1000, -88.5, 1]])}, {}),
    "exp of a Max": (
        "float[1, 3] x) => (float[1, 3] y) { m = Max (x, k) y = Exp (m) }",
        {"x": F32([[-1000, -88.5, 1]])},
        {"k": F32([[-80]])},
    ),
    "gather-at-negative-indices": (
        "int32[5, 4] x, int64[3] i) => (int32[3, 4] y) { y = Gather <axis = 0> (x, i) }",
        {"x": np.arange(20, dtype=np.int32).reshape(5, 4), "i": np.int64([0, -1, -2])},
        {},
    ),
    "grid-sample-nearest": (
        "float[1, 1, 3, 2] x, float[1, 1, 4, 2] g) => (float[1, 1, 1, 4] y) "
        '{ y = GridSample <mode = "nearest"> (x, g) }',
        {"x": np.arange(6, dtype=F32).reshape(1, 1, 3, 2), "g": np.zeros((1, 1, 4, 2), F32)},
        {},
    ),
    "is-nan-of-infinities": (
        "float[1, 4] x) => (bool[1, 4] y) { y = IsNaN (x) }",
        {"x": F32([[1, np.inf, np.nan, -np.inf]])},
        {},
    ),
    "pad-with-the-edge": (
        'float[1, 1, 8, 8] x) => (float[1, 1, 10, 10] y) { y = Pad <mode = "edge"> (x, p) }',
        IMAGE,
        {"p": np.int64([0, 0, 1, 1, 0, 0, 1, 1])},
    ),
    "integers-in-fp32": (
        "int32[1, 3] x) => (int32[1, 1] y) { y = ReduceSum <keepdims = 1> (x, a) }",
        {"x": np.int32([[777777777, 5, -13]])},
        {"a": np.int64([1])},
    ),
    "lp-pool": (
        "float[1, 1, 8, 8] x) => (float[1, 1, h, w] y) { y = LpPool <kernel_shape = [3, 3], pads = [2, 2, 2, 2]> (x) }",
        IMAGE,
        {},
    ),
    "max-pool-ceil-outside": (
        "float[1, 1, 8, 8] x) => (float[1, 1, h, w] y) "
        "{ y = MaxPool <kernel_shape = [1, 1], strides = [2, 2], ceil_mode = 1> (x) }",
        IMAGE,
        {},
    ),
    "mish-of-small-numbers": ("float[1, 2] x) => (float[1, 2] y) { y = Mish (x) }", {"x": F32([[-88.5, 1]])}, {}),
    "mod-of-integers": (
        "int32[1, 2] x, int32[1, 2] k) => (int32[1, 2] y) { y = Mod (x, k) }",
        {"x": np.int32([[777777777, -999999999]]), "k": np.int32([[1900000000, 5]])},
        {},
    ),
    "mod-of-8-bits": (
        "uint8[1, 3] x, uint8[1, 3] k) => (uint8[1, 3] y) { y = Mod (x, k) }",
        {"x": np.uint8([[7, 8, 9]]), "k": np.uint8([[4, 3, 2]])},
        {},
    ),
    "pow-of-negative-zero": (
        "float[1, 3] x) => (float[1, 3] y) { y = Pow (x, k) }",
        {"x": F32([[-0.0, -1e-9, 2.5]])},
        {"k": F32(2)},
    ),
    "square as a Mul": ("float[1, 3] x) => (float[1, 3] y) { y = Mul (x, x) }", {"x": F32([[-0.0, -1e-9, 2.5]])}, {}),
    "reduce-l2-of-large-numbers": (
        "float[1, 3] x) => (float[1, 1] y) { y = ReduceL2 <axes = [1]> (x) }",
        {"x": F32([[1000, 1000, 1000]])},
        {},
    ),
    "reduce-log-sum-exp-of-distant-numbers": (
        "float[1, 3] x) => (float[1, 1] y) { y = ReduceLogSumExp <axes = [1]> (x) }",
        {"x": F32([[-88, 1, 2]])},
        {},
    ),
    "resize-by-a-fraction": (
        'float[1, 1, 8, 8] x) => (float[1, 1, h, w] y) { y = Resize <mode = "linear"> (x, , f) }',
        IMAGE,
        {"f": F32([1, 1, 0.6, 0.6])},
    ),
    "resize by an integer": (
        'float[1, 1, 8, 8] x) => (float[1, 1, h, w] y) { y = Resize <mode = "nearest"> (x, , f) }',
        IMAGE,
        {"f": F32([1, 1, 2, 2])},
    ),
    "scatter-elements-of-small-integers": (
        "uint8[1, 5] x, int64[1, 2] i, uint8[1, 2] u) => (uint8[1, 5] y) "
        '{ y = ScatterElements <axis = 1, reduction = "add"> (x, i, u) }',
        {"x": np.uint8([[3, 6, 255, 12, 15]]), "i": np.int64([[1, 1]]), "u": np.uint8([[255, 255]])},
        {},
    ),
    "softplus": ("float[1, 2] x) => (float[1, 2] y) { y = Softplus (x) }", {"x": F32([[-88.5, 1]])}, {}),
    "tan-near-its-poles": ("float[1, 2] x) => (float[1, 2] y) { y = Tan (x) }", {"x": F32([[1e4, 1.0]])}, {}),
    "top-k-of-equal-values": (
        "float[1, 4] x) => (float[1, 4] v, int64[1, 4] y) { v, y = TopK (x, k) }",
        {"x": F32([[1, 1, 1, 1]])},
        {"k": np.int64([4])},
    ),
}
#: Right, although nodes of it have a row: its values cannot be seen before it runs.
RIGHT_BY_VALUES = {"exp of a Max": "exp-of-small-numbers"}
#: Wrong only where the process has run other models, whose results they then return a part of.
STALE = {"conv-transpose-output-padding", "conv-transpose-output-shape"}
RUN = """
import sys
import numpy as np
import xpuruntime as xrt
policy = {"execution": {"provider_options": {"qnn": {"soc": "sm8650"}}}}
with xrt.InferenceSession(sys.argv[1] + "/model.onnx", device="npu", engine="qnn", policy=policy) as session:
    np.save(sys.argv[1] + "/y.npy", session.run(dict(np.load(sys.argv[1] + "/x.npz")))["y"])
"""


def saved(name: str, folder: Path) -> Path:
    text, inputs, weights = MODELS[name]
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : {18 if "Mish" in text else 17}]> g ({text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in weights.items())
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "x.npz", **inputs)
    return folder / "model.onnx"


def differs(want: Any, got: Any) -> bool:
    if want.shape != got.shape or want.dtype.kind != "f":
        return not np.array_equal(want, got)
    return bool(np.abs(got.astype(np.float64) - want).max() > 0.02 * (1 + np.abs(want.astype(np.float64)).max()))


def test_every_row_has_a_model() -> None:
    assert {row.id for row in known_errors("qnn")} == {name for name in MODELS if " " not in name}


@pytest.mark.parametrize("name", part([name for name in MODELS if name not in STALE], 4))
def test_a_row_and_the_installed_version_agree(name: str, tmp_path: Path) -> None:
    path = saved(name, tmp_path)
    inputs = MODELS[name][1]
    named = [error for _, error in nodes_with_errors(inspect_model(path), known_errors("qnn"))]
    assert [error.id for error in named] == [row for row in (name, RIGHT_BY_VALUES.get(name)) if row and " " not in row]
    (want,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(["y"], inputs)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", RUN, str(tmp_path)], capture_output=True, check=False)
    ended = done.returncode < 0
    assert ended or not done.returncode, done.stderr.decode()[-2000:]
    wrong = ended or differs(want, np.load(tmp_path / "y.npy"))
    here = metadata.version("onnxruntime-qnn")
    assert wrong == any(applies_to(error, here, "npu") for error in named if name not in RIGHT_BY_VALUES)


@pytest.mark.parametrize("name", part([name for name in MODELS if " " not in name], 4))
def test_strict_refuses_with_a_fix_that_works(name: str, tmp_path: Path) -> None:
    path = saved(name, tmp_path)
    execution = {"device": "npu", "engine": "qnn", "provider_options": {"qnn": {"soc": "sm8650"}}}
    with pytest.raises(xrt.UnsupportedOperationError, match="known to compute some nodes wrongly") as refused:
        xrt.plan(path, policy={"mode": "strict", "execution": execution})
    (fix,) = re.findall(r"\((execution: {[^}]*})\)", str(refused.value))
    with xrt.InferenceSession(path, policy={"mode": "strict", **yaml.safe_load(fix)}) as session:
        assert session.plan.engine == "onnxruntime"
        assert session.run(MODELS[name][1])


@pytest.mark.parametrize("runs_on", ["simulator", "device"])
def test_strict_refuses_on_the_simulator_alone_where_nothing_else_was_executed(runs_on: str, tmp_path: Path) -> None:
    engines = default_registry().engines()
    facts = engines["qnn"].probe()
    facts = msgspec.structs.replace(facts, detail={**facts.detail, "runs_on": runs_on})
    machine = machine_snapshot().with_engines({"qnn": facts})
    execution = {"device": "npu", "engine": "qnn", "provider_options": {"qnn": {"soc": "sm8650"}}}
    request = PlanRequest(model=inspect_model(saved("exp-of-small-numbers", tmp_path)))
    policy = Policy.coerce({"mode": "strict", "execution": execution})
    if runs_on == "simulator":
        with pytest.raises(xrt.UnsupportedOperationError, match="known to compute some nodes wrongly"):
            resolve(request, policy, machine, engines)
    else:
        notes = resolve(request, policy, machine, engines).notes
        assert [note for note in notes if "returns 131008" in note and "not executed on a device" in note]
