# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Names of dimensions: no promise that sizes are equal, and sizes for dimensions without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from onnx import helper as h
from sampled import part

import xpuruntime as xrt
from xpuruntime.cli.entry import run
from xpuruntime.engines.model import inspect_bytes
from xpuruntime.engines.precision import probe_feeds

if TYPE_CHECKING:
    from pathlib import Path

#: What exporters write, or mean, for a size that is not known; and a name that is used for two sizes.
WORDS = ["?", "-1", "None", "", "*", "unk__7", "N", None]
ENGINES = ["onnxruntime", "openvino"]


def value(name: str, *shape: Any) -> onnx.ValueInfoProto:
    proto = h.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    for dim, size in zip(proto.type.tensor_type.shape.dim, shape, strict=True):
        if isinstance(size, str):
            dim.dim_param = size
    return proto


def convolution(word: Any) -> onnx.ModelProto:
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    nodes = [
        h.make_node("Conv", ["x", "w"], ["c"], name="conv"),
        h.make_node("GlobalAveragePool", ["c"], ["y"], name="pool"),
    ]
    graph = h.make_graph(
        nodes,
        "g",
        [value("x", word, 3, word, word)],
        [value("y", word, 4, 1, 1)],
        [numpy_helper.from_array(weight, "w")],
    )
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9)


def broadcast(word: Any) -> onnx.ModelProto:
    nodes = [h.make_node("Mul", ["a", "b"], ["p"], name="mul"), h.make_node("Relu", ["p"], ["y"], name="relu")]
    graph = h.make_graph(nodes, "g", [value("a", word, 4), value("b", word, 4)], [value("y", word, 4)])
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9)


def image() -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.random.default_rng(1).standard_normal((1, 3, 12, 48)).astype(np.float32)}


def rows() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(2)
    return {n: random.standard_normal((r, 4)).astype(np.float32) for n, r in (("a", 3), ("b", 1))}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("word", part(WORDS, 3))
@pytest.mark.parametrize(("build", "feeds"), [(convolution, image), (broadcast, rows)])
def test_different_sizes_under_one_name(word: Any, engine: str, build: Any, feeds: Any, tmp_path: Path) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino")
    path, given = tmp_path / "model.onnx", feeds()
    onnx.save(build(word), path)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    want = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, given)[0]
    shapes = {name: list(array.shape) for name, array in given.items()}
    for stated in ({}, {"shapes": shapes}):
        with xrt.InferenceSession(path, policy={"execution": {"engine": engine, "device": "cpu", **stated}}) as session:
            np.testing.assert_allclose(session.run(given)["y"], want, rtol=1e-4, atol=1e-5)
            binding = session.bind(given)
            binding.run()
            np.testing.assert_allclose(binding.outputs["y"], want, rtol=1e-4, atol=1e-5)
            assert session.explain(given, runs=1).units
    name, array = next(iter(given.items()))
    held = {"engine": engine, "device": "cpu", "shapes": {**shapes, name: ["1..3", *array.shape[1:]]}}
    with (
        xrt.InferenceSession(path, policy={"execution": held}) as session,
        pytest.raises(xrt.InputError, match=r"execution\.shapes states"),
    ):
        session.run({**given, name: np.concatenate([array] * 4)})


def batches(first: Any, second: Any, **sizes: int) -> list[int]:
    nodes = [h.make_node("Concat", ["a", "b"], ["y"], axis=0)]
    graph = h.make_graph(nodes, "g", [value("a", first, 4), value("b", second, 4)], [value("y", None, 4)])
    info = inspect_bytes(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9))
    return [array.shape[0] for array in probe_feeds(info, dims=sizes).values()]


def test_made_up_batches_agree() -> None:
    assert batches(None, None) == [1, 1]
    assert batches("batch", None, batch=4) == [4, 4]
    assert batches("batch", "?", batch=4) == [4, 4]
    assert batches(8, None) == [8, 8]
    assert batches(None, None, **{"b.0": 3}) == [3, 3]
    assert batches(None, None, **{"a.0": 2, "b.0": 3}) == [2, 3]
    assert batches("rows", "columns", rows=4) == [4, 1]
    assert batches(512, None) == [512, 1]


@pytest.mark.parametrize("word", ["?", None])
def test_dimensions_without_a_name_are_sized_by_their_place(word: Any, tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(convolution(word), path)
    sized = ["--dim", "x.0=2", "--dim", "x.2=5", "--dim", "x.3=9"]
    assert run(["run", str(path), "-d", "cpu", *sized]) == 0
    out, err = capfd.readouterr()
    assert "x [2, 3, 5, 9]" in " ".join((out + err).split())
    assert run(["run", str(path), "-d", "cpu", "--dim", "x.1=2"]) != 0
    assert "It has: x.0, x.2, x.3" in " ".join(capfd.readouterr().err.split())
