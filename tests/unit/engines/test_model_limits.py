# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models that state more than can be meant are refused before anything is computed from it."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

import xpuruntime as xrt
from xpuruntime.engines.model import inspect_bytes
from xpuruntime.engines.model.external import MAX_DIMS, MAX_NODES
from xpuruntime.engines.precision import convert, probe_feeds
from xpuruntime.errors import ModelError, OutOfMemoryError

#: fp16 is advisory on a CPU, which is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:onnxruntime@cpu:xpuruntime.errors.XpuRuntimeWarning")


def product(weight: onnx.TensorProto, rows: int | str = "N") -> onnx.ModelProto:
    """Return a model that multiplies its input with a weight."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [info("x", 1, [rows, 8])], [info("y", 1, None)], [weight]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def external(dims: list[int], **entries: str) -> onnx.TensorProto:
    weight = onnx.TensorProto(name="w", data_type=1, dims=dims, data_location=1)
    for key, value in {"location": "w.bin", **entries}.items():
        weight.external_data.add(key=key, value=value)
    return weight


def refused(model: onnx.ModelProto, folder: object = None) -> str:
    with pytest.raises(ModelError, match=r"Fix: ") as caught:
        inspect_bytes(model, folder)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        ([2**62] * 200_000, "200,000 dimensions"),
        ([1] * (MAX_DIMS + 1), "1,025 dimensions"),
        ([2**62] * 300, "more than 2\\*\\*55 elements"),
        ([2**28, 2**28], "more than 2\\*\\*55 elements"),
        ([-8, 4], "the size -8"),
        ([8, 5], "needs 160|ends at byte 160"),
    ],
)
def test_shapes_of_weights(outside, dims, reason, tmp_path):
    (tmp_path / "w.bin").write_bytes(b"\0" * 128)
    weight = external(dims) if outside else onnx.TensorProto(name="w", data_type=1, dims=dims, raw_data=b"\0" * 128)
    text = refused(product(weight), tmp_path)
    assert re.search(reason, text), text


@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize("value", ["9" * 5000, "9" * 20, "-1", "1e3", "0x10", "\u0663", "", " 1"])
def test_numbers_of_external_data(key, value, tmp_path):
    (tmp_path / "w.bin").write_bytes(b"\0" * 16384)
    assert "not a number of at most 19 digits" in refused(product(external([8, 4], **{key: value})), tmp_path)


def functions(*bodies: tuple[str, list[str]]) -> onnx.ModelProto:
    """Return a model with local functions of one input, given by name and what each calls in a row."""
    made = []
    for name, calls in bodies:
        names = ["a", *(f"t{i}" for i in range(len(calls) - 1)), "b"]
        nodes = [
            helper.make_node(call, [names[i]], [names[i + 1]], domain="" if call == "Relu" else "my")
            for i, call in enumerate(calls)
        ]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
        made.append(helper.make_function("my", name, ["a"], ["b"], nodes, opsets))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(bodies[0][0], ["x"], ["y"], domain="my")], "g", [info("x", 1, [3])], [info("y", 1, [3])]
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=made, ir_version=8)


def test_functions_that_stand_for_too_many_nodes():
    chain = [(f"F{i}", [f"F{i + 1}"] * 10) for i in range(6)]
    assert len(convert(inspect_bytes(functions(*chain[:2], ("F2", ["Relu"] * 10))), "fp16").proto.graph.node) >= 1000
    text = refused(functions(*chain, ("F6", ["Relu"] * 10)))
    assert f"at most {MAX_NODES:,} are read" in text


def test_functions_that_call_each_other():
    assert "calls itself" in refused(functions(("F", ["G"]), ("G", ["Relu", "F"])))
    assert inspect_bytes(functions(("F", ["G", "H"]), ("G", ["H"]), ("H", ["Relu"]))).functions  # no cycle


def test_a_call_with_more_inputs_than_its_function(tmp_path):
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "my" : 1]>
        g (float[N, 3] x) => (float[N, 3] y) { y = my.F (x, x) }
        <domain: "my", opset_import: ["" : 17]>
        F (a) => (b) { b = Relu (a) }""")
    path = tmp_path / "m.onnx"
    onnx.save(model, str(path))
    for precision in ("fp16", "bf16", "int8"):
        with pytest.raises(xrt.XpuRuntimeError, match=r"m\.onnx"):
            xrt.InferenceSession(
                path,
                device="cpu",
                engine="onnxruntime",
                precision=precision,
                calibration={"x": np.ones((4, 3), np.float32)} if precision == "int8" else None,
            )
    with pytest.raises(ModelError, match="model-local functions cannot be written out"):
        convert(inspect_bytes(model), "fp16")


@pytest.mark.parametrize("rows", [2**27, 2**40, 2**62])
def test_inputs_that_are_too_large_to_make_up(rows, tmp_path):
    model = product(numpy_helper.from_array(np.ones((8, 4), np.float32), "w"), rows)
    with pytest.raises(OutOfMemoryError, match=r"input 'x' of shape .* Fix: give an array"):
        probe_feeds(inspect_bytes(model))
    path = tmp_path / "m.onnx"
    onnx.save(model, str(path))
    with pytest.raises(OutOfMemoryError, match="input 'x'"):
        xrt.InferenceSession(path, device="cpu", engine="onnxruntime", precision="fp16")


def test_sizes_that_are_long_expressions():
    weight = numpy_helper.from_array(np.ones((8, 4), np.float32), "w")
    for text in ("N" + " + 1" * 20_000, "N*" + "9" * 4000, "(" * 5000 + "N" + ")" * 5000):
        shape = probe_feeds(inspect_bytes(product(weight, text)))["x"].shape
        assert shape == (1, 8)
