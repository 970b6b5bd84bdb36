# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What execution.shapes makes of a model: ranges, sizes in the graph, refusals; and sessions that hold to them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import xpuruntime as xrt
from xpuruntime.engines.base import Request
from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.model import (
    ShapeRange,
    inspect_bytes,
    inspect_model,
    open_dimensions,
    shape_ranges,
    with_shapes,
)
from xpuruntime.engines.model.shapes import read_shapes
from xpuruntime.engines.model_source import prepare_source
from xpuruntime.engines.precision import probe_feeds
from xpuruntime.errors import InputError, PolicyError
from xpuruntime.policies import ExecutionPolicy, Policy
from xpuruntime.testing import models


def policy(shapes, **more) -> Policy:
    return Policy(execution=ExecutionPolicy(shapes=shapes, **more))


def pair(first=("N", 4), second=("N", 4), output=("N", 4)) -> onnx.ModelProto:
    """``total = a + b``."""
    nodes = [helper.make_node("Add", ["a", "b"], ["t"], name="add"), helper.make_node("Relu", ["t"], ["total"])]
    graph = helper.make_graph(
        nodes,
        "pair",
        [
            helper.make_tensor_value_info("a", TensorProto.FLOAT, first),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, second),
        ],
        [helper.make_tensor_value_info("total", TensorProto.FLOAT, output)],
        value_info=[helper.make_tensor_value_info("t", TensorProto.FLOAT, output)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def path(tmp_path):
    return str(models.save(models.mlp(8), tmp_path))


class TestRanges:
    @pytest.mark.parametrize(
        ("size", "expected", "text"),
        [
            (3, ShapeRange(3, 3, 3), "3"),
            ("1..512", ShapeRange(1, 512, 512), "1..512"),
            ("1..128..512", ShapeRange(1, 128, 512), "1..128..512"),
            ("0..0..2", ShapeRange(0, 0, 2), "0..0..2"),
        ],
    )
    def test_one_dimension(self, size, expected, text):
        ranges = shape_ranges(inspect_bytes(models.mlp(8)), policy({"x": [size, 8]}))
        assert ranges == {"x": (expected, ShapeRange(8, 8, 8))}
        assert str(ranges["x"][0]) == text
        assert ranges["x"][0].fixed is (size == 3)

    def test_an_input_with_an_open_dimension_is_left_out(self):
        info = inspect_bytes(pair(("N", 4), ("M", 4)))
        assert shape_ranges(info, Policy()) == {}
        assert list(shape_ranges(info, policy({"a": [2, 4]}))) == ["a"]
        assert shape_ranges(inspect_bytes(pair((2, 4), (2, 4), (2, 4))), Policy()) == {
            name: (ShapeRange(2, 2, 2), ShapeRange(4, 4, 4)) for name in "ab"
        }

    def test_one_name_has_one_size_in_all_inputs(self):
        ranges = shape_ranges(inspect_bytes(pair()), policy({"a": ["1..3..5", 4]}))
        assert ranges["b"] == ranges["a"] == (ShapeRange(1, 3, 5), ShapeRange(4, 4, 4))

    @pytest.mark.parametrize(
        ("model", "shapes", "message"),
        [
            (
                pair(),
                {"aa": [1, 4]},
                "execution.shapes: the model has no input 'aa'; did you mean 'a'? Its inputs: a, b",
            ),
            (pair(), {"total": [1, 4]}, "execution.shapes: the model has no input 'total'"),
            (pair(), {"a": [1]}, "execution.shapes.a: 1 dimensions are stated, and the model has 2: [N, 4]"),
            (pair(), {"a": []}, "execution.shapes.a: 0 dimensions are stated"),
            (pair(), {"a": [1, 5]}, "execution.shapes.a[1]: 5 contradicts the model, which fixes it to 4"),
            (pair(), {"a": [1, "1..4"]}, "execution.shapes.a[1]: 1..4 contradicts the model, which fixes it to 4"),
        ],
    )
    def test_what_does_not_fit_the_model_is_refused(self, model, shapes, message):
        info = inspect_bytes(model)
        for refuse in (shape_ranges, with_shapes):
            with pytest.raises(PolicyError) as error:
                refuse(info, policy(shapes))
            assert str(error.value).startswith(message), str(error.value)

    def test_one_name_may_have_several_sizes(self):
        """A name is no promise in ONNX: such a model broadcasts. What is not stated then stays open."""
        info = inspect_bytes(pair())
        stated = policy({"a": [2, 4], "b": [1, 4]})
        assert {name: ranges[0].min for name, ranges in shape_ranges(info, stated).items()} == {"a": 2, "b": 1}
        fixed = with_shapes(info, stated)
        assert [tensor.shape for tensor in (*fixed.inputs, *fixed.outputs)] == [(2, 4), (1, 4), ("N", 4)]
        proto = fixed.named_proto()
        assert [value.type.tensor_type.shape.dim[0].dim_value for value in proto.graph.input] == [2, 1]
        assert proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "N"
        square = inspect_bytes(pair(("N", "N"), ("N", "N")))
        assert shape_ranges(square, policy({"a": [1, 2]})) == {"a": (ShapeRange(1, 1, 1), ShapeRange(2, 2, 2))}

    def test_a_sequence_is_refused(self):
        sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, ["N"])
        graph = helper.make_graph(
            [helper.make_node("SequenceLength", ["s"], ["n"])],
            "sequence",
            [sequence],
            [helper.make_tensor_value_info("n", TensorProto.INT64, [])],
        )
        info = inspect_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
        with pytest.raises(
            PolicyError,
            match=r"^execution\.shapes\.s: this input is no tensor but of the kind sequence. Fix: leave it out$",
        ):
            shape_ranges(info, policy({"s": [1]}))


class TestFixing:
    def test_sizes_stand_in_inputs_outputs_and_graph(self):
        info = with_shapes(inspect_bytes(pair()), policy({"a": [3, 4]}))
        assert [t.shape for t in (*info.inputs, *info.outputs)] == [(3, 4)] * 3
        graph = info.named_proto().graph
        for value in (*graph.input, *graph.output, *graph.value_info):
            assert [(d.dim_value, d.dim_param) for d in value.type.tensor_type.shape.dim] == [(3, ""), (4, "")]

    def test_a_range_is_kept_open_and_limited(self):
        info = with_shapes(inspect_bytes(pair()), policy({"a": ["1..3", 4]}))
        assert [t.shape for t in info.inputs] == [("N", 4)] * 2
        assert [t.limits for t in info.inputs] == [((1, 3), None)] * 2
        assert info.fixed == {}

    def test_an_unnamed_dimension_and_an_unknown_rank(self):
        info = with_shapes(inspect_bytes(pair((None, 4), None)), policy({"a": [2, 4], "b": [2, "1..4"]}))
        assert [t.shape for t in info.inputs] == [(2, 4), (2, None)]
        sizes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in info.named_proto().graph.input]
        assert sizes == [[2, 4], [2, 0]]
        onnx.checker.check_model(info.named_proto(), full_check=True)

    def test_a_dimension_of_size_zero(self):
        info = with_shapes(inspect_bytes(pair()), policy({"a": [0, 4]}))
        assert info.inputs[1].shape == (0, 4)
        assert info.named_proto().graph.input[0].type.tensor_type.shape.dim[0].HasField("dim_value")

    def test_nothing_stated_changes_nothing(self, path):
        info = inspect_model(path)
        assert with_shapes(info, Policy()) is info

    @pytest.mark.parametrize("convert", [None, "fp16"])
    def test_the_engine_gets_the_fixed_graph(self, path, convert):
        request = Request(model=inspect_model(path), device="cpu", policy=policy({"x": [3, 8]}))
        source = prepare_source(request, ConversionLog(), convert=convert)
        raw = ort.InferenceSession(source.model, providers=["CPUExecutionProvider"])
        assert raw.get_inputs()[0].shape == [3, 8]
        assert raw.get_outputs()[0].shape == [3, 8]


class TestStatic:
    def test_open_dimensions(self):
        assert open_dimensions(inspect_bytes(pair(("N", 4), (None, 4)))) == {"a": "[<N>, 4]", "b": "[<size>, 4]"}
        assert open_dimensions(inspect_bytes(pair(None, (2, 4)))) == {"a": "[<all dimensions>]"}
        assert open_dimensions(inspect_bytes(pair((2, 4), (2, 4)))) == {}

    def test_it_is_refused_with_what_to_pass(self, path):
        message = r"leaves dimensions open. Fix: state their sizes: execution\.shapes: \{x: \[<N>, 8\]\}"
        with pytest.raises(PolicyError, match=message):
            xrt.InferenceSession(path, device="cpu", exec_policy=ExecutionPolicy(static_shape=True))
        with pytest.raises(PolicyError, match=message):
            xrt.plan(path, device="cpu", exec_policy=ExecutionPolicy(static_shape=True))


class TestSessions:
    @pytest.mark.parametrize("engine", ["onnxruntime", "null"])
    def test_a_fixed_size(self, path, engine):
        stated = Policy(mode="strict", execution=ExecutionPolicy(shapes={"x": [2, 8]}))
        with xrt.InferenceSession(path, device="cpu", engine=engine, policy=stated) as session:
            assert session.inputs[0].shape == session.outputs[0].shape == (2, 8)
            assert session.plan.model.inputs[0].shape == (2, 8)
            control = session.plan.control("execution.shapes.x")
            assert control.enforceability == "enforced"
            assert session.run({"x": np.ones((2, 8), np.float32)})["y"].shape == (2, 8)
            with pytest.raises(InputError, match=r"execution\.shapes states that axis 0 is 2, got 3"):
                session.run({"x": np.ones((3, 8), np.float32)})
            assert session.bind().inputs["x"].shape == (2, 8)

    @pytest.mark.parametrize("engine", ["onnxruntime", "null"])
    def test_a_range(self, path, engine):
        with xrt.InferenceSession(path, device="cpu", engine=engine, policy=policy({"x": ["2..4", 8]})) as session:
            for rows in (2, 3, 4, 2):
                assert session.run({"x": np.ones((rows, 8), np.float32)})["y"].shape == (rows, 8)
            for rows in (1, 5, 0, 5):
                with pytest.raises(InputError, match=f"states that axis 0 is from 2 to 4, got {rows}"):
                    session.run({"x": np.ones((rows, 8), np.float32)})
                with pytest.raises(InputError, match="axis 0 is from 2 to 4"):
                    session.bind({"x": (rows, 8)})

    def test_probe_inputs_keep_the_limits(self, path):
        for size, rows in (("2..4", 2), ("0..9", 1), (5, 5)):
            info = with_shapes(inspect_model(path), policy({"x": [size, 8]}))
            assert probe_feeds(info)["x"].shape == (rows, 8)
        with xrt.InferenceSession(path, device="cpu", policy=policy({"x": ["3..4", 8]})) as session:
            assert session.explain().honoured

    @pytest.mark.parametrize("shape", [[2, 8], ["2..4", 8]])
    def test_evidence_has_the_shapes_that_the_engine_tells(self, path, shape):
        stated = policy({"x": shape}, static_shape="2..4" not in shape)
        with xrt.InferenceSession(path, device="cpu", policy=stated) as session:
            report = session.explain(runs=2)
        assert report.honoured, str(report)
        seen = {observation.key: (observation.observed, observation.status) for observation in report.observations}
        assert seen["execution.shapes.x"] == (f"[{shape[0]}, 8]", "honoured")
        assert seen.get("execution.static_shape", ("", "honoured"))[1] == "honoured"

    def test_what_an_engine_tells_is_told_as_it_is(self):
        stated = policy({"x": [2, "1..4"], "y": [3]}).execution.shapes
        assert read_shapes(stated, {"x": ["N", "M"]}) == {"execution.shapes.x": "[N, 1..4]"}
        assert read_shapes(stated, {"x": [2, None], "y": [5]}) == {
            "execution.shapes.x": "[2, 1..4]",
            "execution.shapes.y": "[5]",
        }
        assert read_shapes(stated, {"x": [2, 3]})["execution.shapes.x"] == "[2, 3]"
        assert read_shapes({}, {"x": [2, 3]}) == {"execution.static_shape": "all sizes are fixed"}
        assert read_shapes({}, {"x": [None]}) == {}

    def test_what_does_not_fit_is_refused_before_anything_is_probed(self, path, monkeypatch):
        monkeypatch.setattr("xpuruntime.inference.plan_request._machine_of", lambda *_: pytest.fail("probed"))
        with pytest.raises(PolicyError, match=r"the model has no input 'y'; did you mean 'x'\?|no input 'y'"):
            xrt.InferenceSession(path, policy=policy({"y": [2, 8]}))
