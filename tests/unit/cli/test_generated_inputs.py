# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Generated inputs that a model does not take: the error says so, and how to give others."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

import xpuruntime as xrt_package
from xpuruntime.engines.model import inspect_bytes
from xpuruntime.engines.precision import probe_feeds

if TYPE_CHECKING:
    from pathlib import Path

CPU = {"execution": {"engine": "onnxruntime", "device": "cpu"}}
SAID = r"refuses the generated input images \[1, 3, 64, 64\], which is the likely cause: .*k argument \[300\]"
FIX = "Fix: state sizes that it takes, --dim batch=N --dim height=N --dim width=N"


def detector(imgsz: str = "", shape: tuple[Any, ...] = ("batch", 3, "height", "width")) -> Any:
    """Return a model that keeps the best 300 of its cells of 8 by 8 pixels."""
    nodes = [
        h.make_node("Conv", ["images", "w"], ["c"], strides=[8, 8], kernel_shape=[8, 8], name="cells"),
        h.make_node("Reshape", ["c", "flat"], ["f"], name="flat"),
        h.make_node("TopK", ["f", "k"], ["best", "index"], axis=1, name="topk"),
    ]
    constants = {"w": np.ones((1, 3, 8, 8), np.float32), "flat": np.int64([0, -1]), "k": np.int64([300])}
    inputs = [h.make_tensor_value_info("images", T.FLOAT, shape)]
    outputs = [h.make_tensor_value_info("best", T.FLOAT, [None, 300])]
    graph = h.make_graph(nodes, "g", inputs, outputs, [nh.from_array(one, name) for name, one in constants.items()])
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9)
    if imgsz:
        h.set_model_props(model, {"imgsz": imgsz})
    return model


@pytest.fixture
def path(tmp_path: Path) -> str:
    onnx.save(detector(), tmp_path / "detector.onnx")
    return str(tmp_path / "detector.onnx")


@pytest.mark.parametrize(
    ("shape", "imgsz", "made"),
    [
        (("batch", 3, "height", "width"), "[640, 320]", [1, 3, 640, 320]),
        (("batch", 3, "height", "width"), "640", [1, 3, 640, 640]),
        (("batch", 3, None, None), "[640, 320]", [1, 3, 640, 320]),
        ((1, "height", "width", 3), "[640, 320]", [1, 640, 320, 3]),
        ((1, 3, 32, "width"), "[640, 320]", [1, 3, 32, 320]),
        (("batch", 3, "height", "width"), "", [1, 3, 64, 64]),
        (("batch", 3, "height", "width"), "[999999, 640]", [1, 3, 64, 64]),
        (("batch", 3, "height", "width"), "auto", [1, 3, 64, 64]),
    ],
)
def test_images_have_the_size_that_the_metadata_states(shape: tuple[Any, ...], imgsz: str, made: list[int]) -> None:
    info = inspect_bytes(detector(imgsz, shape))
    assert list(probe_feeds(info)["images"].shape) == made
    assert probe_feeds(info, dims={"width": 96, "images.3": 96})["images"].shape[:2] == tuple(made[:2])


def test_sizes_that_are_stated_hold_over_the_metadata() -> None:
    info = inspect_bytes(detector("[640, 640]"))
    assert probe_feeds(info, dims={"height": 96})["images"].shape == (1, 3, 96, 640)


@pytest.mark.parametrize(
    "command",
    [
        ["run"], ["explain"], ["bench", "--runs", "1"], ["profile"], ["verify"], ["determinism"],
        ["lock", "-o", "LOCK"], ["tune", "--input", "random", "--budget", "1s"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_an_error_on_generated_inputs_says_so(xrt: Any, path: str, command: list[str]) -> None:
    name, *more = command
    found = xrt(
        name, path, "-e", "onnxruntime", "-d", "cpu", *(path + ".lock" if one == "LOCK" else one for one in more)
    )
    assert found.code == 2, found.err
    assert re.search(SAID, found.err.replace("\n", " ")), found.err
    assert FIX in found.err


@pytest.mark.parametrize("dims", [[], ["--dim", "height=32", "--dim", "width=32"]])
def test_compare_and_diff_say_so_too(xrt: Any, path: str, dims: list[str]) -> None:
    for arguments in (["compare", path, "--engines", "onnxruntime"], ["diff", "here", "here", path]):
        found = xrt(*arguments, "-d", "cpu", *dims)
        assert found.code == 2, found.err
        assert "refuses the generated input images" in found.err
    assert xrt("run", path, "-d", "cpu", "--dim", "height=160", "--dim", "width=160").code == 0


def test_the_interface_of_python_says_so(path: str) -> None:
    with xrt_package.InferenceSession(path, policy=CPU) as session:
        with pytest.raises(xrt_package.InputError, match=SAID):
            session.explain()
        with pytest.raises(xrt_package.EngineError, match="k argument"):  # of inputs that the caller gives
            session.explain({"images": np.zeros((1, 3, 64, 64), np.float32)})
    for call in (xrt_package.lock, xrt_package.verify):
        with pytest.raises(xrt_package.InputError, match=SAID):
            call(path, CPU)


def test_a_model_of_fixed_sizes_and_floats_is_not_said_to_refuse_its_inputs(tmp_path: Path) -> None:
    nodes = [
        h.make_node("Mul", ["x", "k"], ["m"]),
        h.make_node("Cast", ["m"], ["at"], to=T.INT64),
        h.make_node("Gather", ["k", "at"], ["y"], name="gather"),
    ]
    border = [h.make_tensor_value_info("x", T.FLOAT, [4])], [h.make_tensor_value_info("y", T.FLOAT, [4])]
    graph = h.make_graph(nodes, "g", *border, [nh.from_array(np.float32([1e6]), "k")])
    path = str(tmp_path / "fixed.onnx")
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9), path)
    with (
        xrt_package.InferenceSession(path, policy=CPU) as session,
        pytest.raises(xrt_package.XpuRuntimeError, match="out of data bounds") as caught,
    ):
        session.explain()
    assert "generated" not in str(caught.value)


def test_a_lock_of_a_model_that_refuses_generated_values_has_no_outputs(tmp_path: Path) -> None:
    nodes = [h.make_node("Tile", ["x", "n"], ["t"]), h.make_node("Reshape", ["t", "shape"], ["y"])]
    inputs = [h.make_tensor_value_info("x", T.FLOAT, [1]), h.make_tensor_value_info("n", T.INT64, [1])]
    outputs = [h.make_tensor_value_info("y", T.FLOAT, [2, 3])]
    graph = h.make_graph(nodes, "g", inputs, outputs, [nh.from_array(np.int64([2, 3]), "shape")])
    path = str(tmp_path / "values.onnx")
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9), path)
    with pytest.raises(xrt_package.InputError, match="refuses the generated input"):
        xrt_package.lock(path, CPU, path + ".lock")
    given = {"x": np.ones(1, np.float32), "n": np.int64([6])}
    assert xrt_package.lock(path, CPU, path + ".lock", inputs=given).lock.identity.outputs == ()
    with xrt_package.InferenceSession(path, lock=path + ".lock") as session:
        row = next(
            observation for observation in session.explain(given).observations if observation.key == "execution.lock"
        )
    assert (row.status, "the lock has none" in row.reason) == ("honoured", True)
