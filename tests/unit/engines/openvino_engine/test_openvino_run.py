# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sessions on OpenVINO: memory, types, shapes, errors."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from openvino_sessions import VALUE, model, open_, x_of

import xpuruntime as xrt
from xpuruntime.engines.openvino.probing import translate
from xpuruntime.engines.openvino.slots import SHARED_FROM
from xpuruntime.testing import models

ov = pytest.importorskip("openvino")


class TestMemory:
    def test_large_inputs_are_read_where_they_are(self, wide: Path) -> None:
        """A change of the caller's array is seen by the next run, and nothing is written to it."""
        x = x_of(0, 64)
        assert x.nbytes >= SHARED_FROM
        with open_(wide) as session:
            session.run({"x": x})
            first = session.run({"x": x})["y"]
            before = x.copy()
            x *= 2
            second = session.run({"x": x})["y"]
            np.testing.assert_allclose(second, 2 * first, rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(x, 2 * before)

    def test_large_read_only_arrays(self, wide: Path) -> None:
        x = x_of(2, 64)
        with open_(wide, policy={"mode": "strict"}) as session:
            want = session.run({"x": x.copy()})["y"]
            x.flags.writeable = False
            for _ in range(3):
                np.testing.assert_array_equal(session.run({"x": x})["y"], want)
        np.testing.assert_array_equal(x, x_of(2, 64))

    def test_an_array_whose_shape_is_changed_in_place(self, wide: Path) -> None:
        x = x_of(3, 64)
        with open_(wide) as session:
            session.run({"x": x})
            want = session.run({"x": x[:32].copy()})["y"]
            session.run({"x": x})
            np.testing.assert_array_equal(session.run({"x": x[:32]})["y"], want)

    @pytest.mark.parametrize("rows", [1, 64])
    @pytest.mark.parametrize("batch", ["N", "fixed"])
    def test_results_are_the_callers(self, tmp_path: Path, rows: int, batch: str) -> None:
        path = models.save(models.mlp(width=512, batch="N" if batch == "N" else rows), tmp_path)
        with open_(path) as session:
            results = [session.run({"x": x_of(seed, rows)})["y"] for seed in range(5)]
            kept = [result.copy() for result in results]
            for seed in range(5, 10):
                session.run({"x": x_of(seed, rows)})
            for one, copy in zip(results, kept, strict=True):
                np.testing.assert_array_equal(one, copy)
                assert one.flags.writeable
        gc.collect()
        for one, copy in zip(results, kept, strict=True):
            np.testing.assert_array_equal(one, copy)

    def test_an_output_that_is_an_input(self, tmp_path: Path) -> None:
        nodes = [helper.make_node("Identity", ["x"], ["y"], name="i"), helper.make_node("Relu", ["x"], ["z"], name="r")]
        shape = ["N", 3]
        path = models.save(
            model(
                nodes,
                [VALUE("x", TensorProto.FLOAT, shape)],
                [VALUE("y", TensorProto.FLOAT, shape), VALUE("z", TensorProto.FLOAT, shape)],
            ),
            tmp_path,
        )
        with open_(path) as session:
            for rows in (2, 40_000):
                x = x_of(0, rows, 3)
                before = x.copy()
                out = session.run({"x": x})
                out = session.run({"x": x})
                np.testing.assert_array_equal(out["y"], before)
                np.testing.assert_array_equal(out["z"], np.maximum(before, 0))
                out["y"][...] = 7
                np.testing.assert_array_equal(x, before)


class TestTypes:
    @pytest.mark.filterwarnings("ignore:.*computes fp64 in fp32")
    @pytest.mark.parametrize("kind", ["float16", "float64", "int8", "uint8", "int16", "uint16", "int32", "bool"])
    def test_each_goes_through(self, tmp_path: Path, kind: str) -> None:
        code = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        node = helper.make_node("Identity", ["x"], ["y"], name="i")
        path = models.save(model([node], [VALUE("x", code, ["N"])], [VALUE("y", code, ["N"])]), tmp_path)
        x = np.array([0, 1, 1, 0, 1]).astype(kind)
        with open_(path) as session:
            for _ in range(2):
                y = session.run({"x": x})["y"]
                assert y.dtype == x.dtype
                np.testing.assert_array_equal(y, x)

    @pytest.mark.parametrize("kind", ["int64", "uint32", "uint64"])
    def test_integers_that_would_wrap_are_refused(self, tmp_path: Path, kind: str) -> None:
        code = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        node = helper.make_node("Identity", ["x"], ["y"], name="i")
        path = models.save(model([node], [VALUE("x", code, ["N"])], [VALUE("y", code, ["N"])]), tmp_path)
        good = np.array([0, 2**31 - 1], kind)
        bad = np.array([0, 2**31 + 5], kind)
        with open_(path) as session:
            for _ in range(2):
                np.testing.assert_array_equal(session.run({"x": good})["y"], good)
                with pytest.raises(xrt.InputError, match=r"integers outside .* computes .* in 32 bits"):
                    session.run({"x": bad})
            with pytest.raises(xrt.InputError, match="in 32 bits"):
                session.run_async({"x": bad}).result(60)
            binding = session.bind({"x": good.copy()})
            binding.run()
            binding.inputs["x"][...] = bad
            with pytest.raises(xrt.InputError, match="in 32 bits"):
                binding.run()


class TestModels:
    def test_an_input_that_nothing_reads(self, tmp_path: Path) -> None:
        """OpenVINO drops it; it is checked all the same, and the others keep their places."""
        node = helper.make_node("Sub", ["a", "c"], ["y"], name="s")
        inputs = [VALUE(name, TensorProto.FLOAT, ["N"]) for name in ("a", "b", "c")]
        path = models.save(model([node], inputs, [VALUE("y", TensorProto.FLOAT, ["N"])]), tmp_path)
        with open_(path) as session:
            for rows in (3, 3, 40_000):
                feeds = {name: np.full(rows, value, np.float32) for name, value in (("a", 5), ("b", 9), ("c", 2))}
                for out in (session.run(feeds), session.run(feeds), session.run_async(feeds).result(60)):
                    np.testing.assert_array_equal(out["y"], np.full(rows, 3))
            binding = session.bind(feeds)
            binding.run()
            np.testing.assert_array_equal(binding.outputs["y"], np.full(rows, 3))
            assert not session.explain(feeds, runs=1).partial
            with pytest.raises(xrt.InputError, match="input 'b' is missing"):
                session.run({"a": feeds["a"], "c": feeds["c"]})

    def test_an_input_with_a_default_is_a_constant(self, tmp_path: Path) -> None:
        node = helper.make_node("Add", ["x", "w"], ["y"], name="a")
        weight = numpy_helper.from_array(np.ones(3, np.float32), "w")
        shape = ["N", 3]
        inputs = [VALUE("x", TensorProto.FLOAT, shape), VALUE("w", TensorProto.FLOAT, [3])]
        path = models.save(model([node], inputs, [VALUE("y", TensorProto.FLOAT, shape)], (weight,)), tmp_path)
        x = np.zeros((1, 3), np.float32)
        with open_(path) as session:
            np.testing.assert_array_equal(session.run({"x": x})["y"], 1 + x)
            for call in (session.run, session.run_async):
                with pytest.raises(xrt.InputError, match="'w' has a default in the model, and OpenVINO makes that"):
                    call({"x": x, "w": np.ones(3, np.float32)})

    def test_external_data_beside_a_model_that_is_renamed(self, tmp_path: Path) -> None:
        proto = models.mlp()
        for node in proto.graph.node:
            node.name = ""
        inside = models.save(proto, tmp_path, "inside.onnx")
        outside = models.save(proto, tmp_path, "outside.onnx", external=True)
        x = x_of(0, 2, 64)
        with open_(inside) as one, open_(outside) as two:
            np.testing.assert_array_equal(one.run({"x": x})["y"], two.run({"x": x})["y"])

    def test_a_model_too_large_for_one_message_goes_through_a_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from xpuruntime.engines.openvino import loading

        monkeypatch.setattr(loading, "_LARGEST", 100)
        proto = models.mlp()
        proto.graph.node[0].name = ""
        path = models.save(proto, tmp_path, external=True)
        x = x_of(0, 2, 64)
        with open_(path) as session, xrt.InferenceSession(path, device="cpu", engine="onnxruntime") as other:
            np.testing.assert_allclose(session.run({"x": x})["y"], other.run({"x": x})["y"], rtol=1e-5, atol=1e-5)
            gc.collect()
            session.explain({"x": x}, runs=1)

    def test_unknown_operators_are_named(self, tmp_path: Path) -> None:
        proto = models.mlp()
        proto.graph.node[1].op_type = "FusedNonsense"
        proto.graph.node[1].domain = "com.microsoft"
        proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        with pytest.raises(
            xrt.UnsupportedOperationError, match=r"no conversion for the operators .*FusedNonsense.* \(node 'relu'\)"
        ):
            open_(models.save(proto, tmp_path))

    def test_shapes_that_do_not_fit_inside_the_model(self, tmp_path: Path) -> None:
        nodes = [helper.make_node("MatMul", ["a", "b"], ["y"], name="m")]
        inputs = [VALUE("a", TensorProto.FLOAT, ["N", "K"]), VALUE("b", TensorProto.FLOAT, ["L", "M"])]
        path = models.save(model(nodes, inputs, [VALUE("y", TensorProto.FLOAT, ["N", "M"])]), tmp_path)
        with open_(path) as session:
            with pytest.raises(xrt.EngineError, match=r"running .* failed in OpenVINO") as caught:
                session.run({"a": np.ones((2, 3), np.float32), "b": np.ones((4, 5), np.float32)})
            assert caught.value.engine == "openvino"
            with pytest.raises(xrt.EngineError, match="failed in OpenVINO"):
                session.run_async({"a": np.ones((2, 3), np.float32), "b": np.ones((4, 5), np.float32)}).result(60)
            good = {"a": np.ones((2, 3), np.float32), "b": np.ones((3, 5), np.float32)}
            np.testing.assert_array_equal(session.run(good)["y"], np.full((2, 5), 3))
            np.testing.assert_array_equal(session.run_async(good).result(60)["y"], np.full((2, 5), 3))

    def test_fixed_and_ranged_shapes_reach_openvino(self, mlp: Path) -> None:
        fixed = {"execution": {"static_shape": True, "shapes": {"x": [4, 64]}}}
        with open_(mlp, policy=fixed) as session:
            assert session._open()._handle.compiled.inputs[0].get_partial_shape().is_static
            binding = session.bind()
            binding.run()
            report = session.explain(runs=1)
            assert report.honoured, report.headline
            with pytest.raises(xrt.InputError, match="axis 0 is 4, got 3"):
                session.run({"x": x_of(0, 3, 64)})
        ranged = {"mode": "strict", "execution": {"engine": "ov", "device": "cpu", "shapes": {"x": ["1..8", 64]}}}
        with xrt.InferenceSession(mlp, policy=ranged) as session:
            assert str(session._open()._handle.compiled.inputs[0].get_partial_shape()) == "[1..8,64]"
            assert session.run({"x": x_of(0, 8, 64)})["y"].shape == (8, 64)
            assert session.explain(runs=1).honoured
            with pytest.raises(xrt.InputError, match="from 1 to 8, got 9"):
                session.run({"x": x_of(0, 9, 64)})


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("std::bad_alloc", xrt.OutOfMemoryError, "smaller batch"),
        ("[CL_OUT_OF_RESOURCES]", xrt.OutOfMemoryError, "smaller batch"),
        ("No conversion rule found for operations: a.B, c.D\nTo facilitate", xrt.UnsupportedOperationError, "a.B, c.D"),
        (
            "Model wasn't fully converted.\n-- Split-20 with a message:\nThe split number is invalid\nSummary:\n"
            "-- Conversion is failed for: Split-20",
            xrt.UnsupportedOperationError,
            "cannot convert the operators Split-20 as they are used here: The split number is invalid.",
        ),
        (
            "Unexpected: CPU plug-in doesn't support ReduceSum operation with dynamic rank. Operation name: a",
            xrt.UnsupportedOperationError,
            "execution.shapes",
        ),
        ("Unable to read the model. Please check", xrt.ModelError, "Unable to read"),
        ("[CPU] Could not deserialize by device xml header.", xrt.ModelError, "deserialize"),
        ("No CPU resources available!", xrt.EngineError, "ENABLE_CPU_RESERVATION"),
        (
            "Exception from src/inference/src/cpp/core.cpp:117:\nsomething else",
            xrt.EngineFailed,
            "OpenVINO: something else",
        ),
    ],
)
def test_errors_are_translated(text: str, kind: type[xrt.XpuRuntimeError], message: str) -> None:
    error = translate(RuntimeError(text), doing="running m.onnx", device="cpu")
    assert type(error) is kind
    assert message in str(error)
    assert "src/inference" not in str(error)
    assert (error.engine, error.device) == ("openvino", "cpu")
