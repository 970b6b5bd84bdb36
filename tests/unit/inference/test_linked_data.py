# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models in a download cache: the file and its external data are links to files of other names in another folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from onnx import helper as h

import xpuruntime as xrt

X = {"x": np.random.default_rng(3).standard_normal((3, 64)).astype(np.float32)}


def build(folder: Path, name: str, *, files: int = 1, below: bool = False) -> Path:
    """Write ``relu(x @ w0) @ w1`` as a cache has it: everything in ``blobs``, links in ``snapshots/abc/onnx``."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "abc" / "onnx"
    blobs.mkdir(parents=True)
    (snapshot / "data" if below else snapshot).mkdir(parents=True)
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in ((64, 32), (32, 8))]
    tensors = []
    for number, array in enumerate(arrays):
        location = f"{'data/' if below else ''}model.onnx_data{min(number, files - 1)}"
        tensor = numpy_helper.from_array(array, f"w{number}")
        blob = blobs / f"b{min(number, files - 1)}"
        offset = blob.stat().st_size if blob.exists() else 0
        with blob.open("ab") as file:
            file.write(tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, location, offset, len(tensor.raw_data))
        tensor.ClearField("raw_data")
        tensors.append(tensor)
        link = snapshot / location
        if not link.is_symlink():
            link.symlink_to(Path("../../../../blobs" if below else "../../../blobs") / blob.name)
    nodes = [
        h.make_node("MatMul", ["x", "w0"], ["a"], name=name),
        h.make_node("Relu", ["a"], ["b"], name=name and "relu"),
        h.make_node("MatMul", ["b", "w1"], ["y"], name=name and "second"),
    ]
    graph = h.make_graph(
        nodes,
        "g",
        [h.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [h.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
        tensors,
    )
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9)
    (blobs / "aaa").write_bytes(model.SerializeToString())
    path = snapshot / "model.onnx"
    path.symlink_to("../../../blobs/aaa")
    return path


def raw(path: Path) -> Any:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, X)[0]


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(
    ("name", "files", "below", "stated"),
    [
        ("first", 1, False, {}),
        ("", 1, False, {"shapes": {"x": [3, 64]}}),
        ("first", 2, False, {"shapes": {"x": ["1..4", 64]}}),
        ("", 2, True, {"shapes": {"x": [3, 64]}}),
    ],
)
def test_sessions(engine: str, name: str, files: int, below: bool, stated: dict[str, Any], tmp_path: Path) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino")
    path = build(tmp_path, name, files=files, below=below)
    want = raw(path)
    policy = {"execution": {"engine": engine, "device": "cpu", **stated}}
    with xrt.InferenceSession(path, policy=policy) as session:
        np.testing.assert_allclose(session.run(X)["y"], want, rtol=1e-4, atol=1e-4)
        assert session.explain(X, runs=1).units
        inside = session.intermediates(X, ["b"])["b"]
    w0 = np.frombuffer((tmp_path / "blobs" / "b0").read_bytes()[: 64 * 32 * 4], np.float32).reshape(64, 32)
    np.testing.assert_allclose(inside, np.maximum(X["x"] @ w0, 0), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::xpuruntime.XpuRuntimeWarning")
def test_what_is_made_of_it(tmp_path: Path) -> None:
    """Conversions, int8, rewriting, compiled artifacts and comparisons read the same data."""
    path = build(tmp_path / "cache", "first")
    want, scale = raw(path), float(np.abs(raw(path)).max())
    precisions: Any = (("fp16", None), ("int8", X))
    for precision, given in precisions:
        with xrt.InferenceSession(
            path, device="cpu", engine="onnxruntime", precision=precision, calibration=given
        ) as session:
            assert np.abs(session.run(X)["y"] - want).max() < 0.1 * scale
    pytest.importorskip("openvino")
    xrt.compile_model(path, tmp_path / "model.xrt", engine="openvino", device="cpu")
    shutil.rmtree(tmp_path / "cache")
    with xrt.InferenceSession(tmp_path / "model.xrt") as session:
        np.testing.assert_allclose(session.run(X)["y"], want, rtol=1e-4, atol=1e-4)


def test_the_simulator_of_qnn(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn")
    path = build(tmp_path, "")
    policy = {"execution": {"shapes": {"x": [3, 64]}, "provider_options": {"qnn": {"soc": "sm8650"}}}}
    with xrt.InferenceSession(path, engine="qnn", device="npu", policy=policy) as session:
        got = session.run(X)["y"]
    assert np.abs(got - raw(path)).max() < 0.02 * np.abs(raw(path)).max()


def test_a_link_out_of_the_cache_is_refused(tmp_path: Path) -> None:
    """ONNX Runtime refuses it too: data of a model that is no link has to lie in its folder."""
    path = build(tmp_path, "first")
    model = path.read_bytes()
    path.unlink()
    path.write_bytes(model)
    with pytest.raises(xrt.ModelError, match=r"a symbolic link to .* outside the model's own folder"):
        xrt.InferenceSession(path, device="cpu")
    if not ort.__version__.startswith("1.23."):  # it follows the link
        with pytest.raises(Exception, match="escapes"):
            raw(path)
