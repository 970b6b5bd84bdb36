# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models of unusual kinds in a session: sequences, optionals, unknown ranks and sizes, types NumPy does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

import xpuruntime as xrt
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

X = np.ones((2, 3), np.float32)
FLOATS = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [2, 3])


def tensor(name: str, shape: Any, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def saved(folder: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], opset: int = 17) -> Path:
    graph = helper.make_graph(nodes, "graph", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def concat(tmp_path: Path) -> Path:
    """A sequence in, a tensor out."""
    node = helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0)
    return saved(tmp_path, [node], [FLOATS], [tensor("y", ["M", 3])])


def test_a_sequence_is_given_as_a_list_of_arrays(concat: Path) -> None:
    with xrt.InferenceSession(concat, device="cpu") as session:
        assert session.run({"s": [X, 2 * X]})["y"].shape == (4, 3)
        assert session.run({"s": (X, X, X)})["y"].shape == (6, 3)
        assert session.explain({"s": [X]}, runs=1).honoured


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (X, "pass a list of float32 arrays"),
        ([X, X.astype(np.float64)], "dtype float64"),
        ([X, [1.0]], "not an array"),
        ([np.ones((2, 4), np.float32)], "axis 1 must be 3, got 4"),
    ],
)
def test_a_wrong_sequence_is_refused(concat: Path, value: Any, message: str) -> None:
    with xrt.InferenceSession(concat, device="cpu") as session, pytest.raises(xrt.InputError, match=message):
        session.run({"s": value})


def test_a_strided_array_in_a_sequence_is_copied_once_and_said(concat: Path) -> None:
    strided = np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2]
    with xrt.InferenceSession(concat, device="cpu") as session:
        np.testing.assert_array_equal(session.run({"s": [strided]})["y"], strided)
        conversions = session.explain({"s": [strided]}, runs=1).conversions
    assert any("copied once" in conversion.what for conversion in conversions)


def test_bind_refuses_a_sequence_by_name(concat: Path, tmp_path: Path) -> None:
    with xrt.InferenceSession(concat, device="cpu") as session, pytest.raises(xrt.InputError, match="use run"):
        session.bind({"s": [X]})
    node = helper.make_node("SequenceConstruct", ["x", "x"], ["s"])
    path = saved(tmp_path, [node], [tensor("x", [2, 3])], [FLOATS])
    with xrt.InferenceSession(path, device="cpu") as session:
        assert [one.shape for one in session.run({"x": X})["s"]] == [(2, 3), (2, 3)]
        with pytest.raises(xrt.InputError, match="'s' is no tensor"):
            session.bind({"x": X})


def test_an_optional_input_may_be_none(tmp_path: Path) -> None:
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [2, 3]))
    node = helper.make_node("OptionalHasElement", ["o"], ["y"])
    path = saved(tmp_path, [node], [helper.make_value_info("o", kind)], [tensor("y", [], TensorProto.BOOL)])
    with xrt.InferenceSession(path, device="cpu") as session:
        assert not session.run({"o": None})["y"]
        assert session.run({"o": X})["y"]
        with pytest.raises(xrt.InputError, match="dtype float64"):
            session.run({"o": X.astype(np.float64)})


def test_a_negative_size_in_the_model_is_a_free_size(tmp_path: Path) -> None:
    path = saved(tmp_path, [helper.make_node("Add", ["x", "x"], ["y"])], [tensor("x", [-1, 3])], [tensor("y", [-1, 3])])
    with xrt.InferenceSession(path, device="cpu") as session:
        assert session.inputs[0].shape == (None, 3)
        for rows in (0, 1, 5):
            assert session.run({"x": np.ones((rows, 3), np.float32)})["y"].shape == (rows, 3)
        assert session.explain(runs=1).honoured


def test_an_input_of_unknown_rank_is_checked_by_dtype(tmp_path: Path) -> None:
    path = saved(tmp_path, [helper.make_node("Add", ["x", "x"], ["y"])], [tensor("x", None)], [tensor("y", None)])
    with xrt.InferenceSession(path, device="cpu") as session:
        assert session.run({"x": X})["y"].shape == (2, 3)
        assert session.run({"x": np.float32(2)})["y"].shape == ()
        with pytest.raises(xrt.InputError, match=r"expects float32; nothing is converted silently"):
            session.run({"x": X.astype(np.int64)})
        with pytest.raises(xrt.InputError, match="rank of input 'x' is not known"):
            session.bind()
        binding = session.bind({"x": X})
        binding.run()
        np.testing.assert_array_equal(binding.outputs["y"], 2 * X)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_bound_output_whose_size_depends_on_values_is_made_by_the_engine(tmp_path: Path, engine: str) -> None:
    pytest.importorskip(engine)
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (int64[1, M] y) { y = NonZero(x) }"""
    with xrt.InferenceSession(models.save(parser.parse_model(text), tmp_path), device="cpu", engine=engine) as session:
        binding = session.bind({"x": (3,)})
        binding.inputs["x"][...] = [1, 0, 2]
        binding.run()
        np.testing.assert_array_equal(binding.outputs["y"], [[0, 2]])
        assert session.run({"x": np.ones(3, np.float32)})["y"].shape == (1, 3)


@pytest.mark.torch
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("kind", ["float", "bfloat16"])
def test_torch_tensors_that_cannot_be_taken_are_named(tmp_path: Path, engine: str, kind: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip(engine)
    text = (
        f"""<ir_version: 8, opset_import: ["" : 17]> g ({kind}[2, 2] x) => (float[2, 2] y) {{ y = Cast<to = 1>(x) }}"""
    )
    path = models.save(parser.parse_model(text), tmp_path)
    mine, other = (torch.float32, torch.bfloat16)[:: 1 if kind == "float" else -1]
    with xrt.InferenceSession(path, device="cpu", engine=engine) as session:
        np.testing.assert_array_equal(session.run({"x": torch.ones(2, 2, dtype=mine)})["y"], np.ones((2, 2)))
        for given, said in [
            (torch.ones(2, 2, dtype=other), rf"input 'x' has dtype .*, the model expects .*x.to\({mine}\)"),
            (torch.ones(2, 2, dtype=mine, requires_grad=True), r"input 'x' .* requires grad. Fix: pass x.detach\(\)"),
            (torch.ones(2, 2, dtype=mine, device="meta"), r"input 'x' .*meta.*; pass a dense array"),
            (torch.ones(2, 2, dtype=mine).to_sparse(), r"input 'x' .*; pass a dense array .*to_dense"),
        ]:
            with pytest.raises(xrt.InputError, match=said):
                session.run({"x": given})
            if kind == "float":
                with pytest.raises(xrt.InputError, match=said):
                    session.bind({"x": given})
        if kind == "float":
            with pytest.raises(xrt.InputError, match=r"a shape is a tuple. Fix: pass bind\({'x': \(2, 2\)}\)"):
                session.bind({"x": [2, 2]})
        else:
            with pytest.raises(xrt.InputError, match=r"input 'x': array type '\|V2' cannot be shared"):
                session.run({"x": np.zeros((2, 2), "V2")})


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_read_only_inputs_of_models_with_bfloat16(tmp_path: Path, engine: str) -> None:
    small = pytest.importorskip("ml_dtypes")
    pytest.importorskip(engine)
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[2] x, bfloat16[2] z) => (bfloat16[2] y, float[2] w, float[2] x)
    { y = Cast<to = 16>(x) w = Cast<to = 1>(z) }"""
    path = models.save(parser.parse_model(text), tmp_path)
    feeds = {"x": np.array([1.5, -2], np.float32), "z": np.array([3, 0.5], small.bfloat16)}
    for array in feeds.values():
        array.flags.writeable = False
    strict = {"mode": "strict", "execution": {"engine": engine, "device": "cpu", "precision": "model"}}
    with xrt.InferenceSession(path, policy=strict) as session:
        for made in (session.run(feeds), session.run_async(feeds).result()):
            np.testing.assert_array_equal(made["y"].astype(np.float32), feeds["x"])
            np.testing.assert_array_equal(made["w"], feeds["z"].astype(np.float32))
            np.testing.assert_array_equal(made["x"], feeds["x"])
        session.explain(feeds, runs=1)


def test_bfloat16_is_run_and_explained(tmp_path: Path) -> None:
    small = pytest.importorskip("ml_dtypes")
    kind = TensorProto.BFLOAT16
    nodes = [helper.make_node("Cast", ["x"], ["f"], to=1), helper.make_node("Add", ["f", "f"], ["y"])]
    path = saved(tmp_path, nodes, [tensor("x", [2, 3], kind)], [tensor("y", [2, 3])], 21)
    x = X.astype(small.bfloat16)
    with xrt.InferenceSession(path, device="cpu") as session:
        np.testing.assert_array_equal(session.run({"x": x})["y"], 2 * X)
        report = session.explain({"x": x}, runs=1)
    assert report.honoured, report
    assert not report.partial


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT8E4M3FN, TensorProto.INT4, TensorProto.COMPLEX64])
def test_a_type_without_arrays_is_refused_before_anything_is_loaded(tmp_path: Path, kind: int, engine: str) -> None:
    pytest.importorskip(engine)
    node = helper.make_node("Identity", ["x"], ["y"])
    path = saved(tmp_path, [node], [tensor("x", [2, 3], kind)], [tensor("y", [2, 3], kind)], 21)
    with pytest.raises(xrt.UnsupportedOperationError, match="put a Cast"):
        xrt.plan(path, device="cpu", engine=engine)


@pytest.mark.parametrize("dtype", ["object", "<U4"])
def test_bind_refuses_strings_by_name(tmp_path: Path, dtype: str) -> None:
    kind = TensorProto.STRING
    path = saved(
        tmp_path, [helper.make_node("Identity", ["x"], ["y"])], [tensor("x", ["N"], kind)], [tensor("y", ["N"], kind)]
    )
    words = np.array(["a", "한글"], dtype)
    with xrt.InferenceSession(path, device="cpu") as session:
        assert session.run({"x": words})["y"].tolist() == ["a", "한글"]
        with pytest.raises(xrt.InputError, match=r"string \[N\]\) has no fixed buffer"):
            session.bind({"x": words})


def test_an_operator_without_a_kernel_for_its_type_is_unsupported(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (bfloat16[2, 2] x) => (bfloat16[2, 2] y) { y = Gemm(x, x) }"""
    path = models.save(parser.parse_model(text), tmp_path)
    with pytest.raises(xrt.UnsupportedOperationError, match=r"implementation for Gemm.*Fix: use an engine that has it"):
        xrt.InferenceSession(path, device="cpu", engine="onnxruntime")
