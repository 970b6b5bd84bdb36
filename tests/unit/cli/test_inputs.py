# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inputs of commands: files of arrays, generated ones, and those that a probe is given."""

from __future__ import annotations

import re
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

import xpuruntime
import xpuruntime as xrt_package
from xpuruntime.engines.model import inspect_bytes
from xpuruntime.engines.precision import probe_feeds
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Result


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 MB that unpacks to 300 MiB."""
    path = tmp_path_factory.mktemp("bomb") / "bomb.npz"
    np.savez_compressed(path, image=np.zeros((300 << 18, 1), np.float32))
    assert path.stat().st_size < 1 << 20
    return path


def test_bombs(xrt: Callable[..., Result], bomb: Path, digits: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for value in (f"@{bomb}", f"image=@{bomb}"):
        result = xrt("run", digits, "--device", "cpu", "--input", value)
        assert result.code == 2
        assert "more than 32 times its size" in result.err
    with pytest.raises(InputError, match="more than 32 times its size"):
        xpuruntime.plan(digits, device="cpu", precision="int8", calibration=bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_compressed_arrays_are_read(xrt: Callable[..., Result], tmp_path: Path, digits: str) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, image=np.zeros((2, 1, 8, 8), np.float32))
    assert xrt("run", digits, "--device", "cpu", "--input", f"@{path}").code == 0


def test_headers_of_huge_arrays(xrt: Callable[..., Result], tmp_path: Path, digits: str) -> None:
    path = tmp_path / "x.npy"
    for shape in ((10**13,), (4,) * 99, (2**62, 2**62), (-1,)):
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            file.write(bytes(16))
        result = xrt("run", digits, "--input", f"@{path}")
        assert result.code == 2, result.err


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """Return a model that takes at least 65 samples: generated inputs have 8."""
    nodes = [h.make_node("Pad", ["audio", "p"], ["a"], mode="reflect"), h.make_node("Sigmoid", ["a"], ["y"])]
    border = (
        [h.make_tensor_value_info("audio", T.FLOAT, ["batch", "samples"])],
        [h.make_tensor_value_info("y", T.FLOAT, None)],
    )
    graph = h.make_graph(nodes, "g", *border, [nh.from_array(np.array([0, 0, 0, 64]), "p")])
    path = tmp_path / "padded.onnx"
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=9), path)
    np.save(tmp_path / "audio.npy", np.linspace(-1, 1, 100, dtype=np.float32)[None])
    return path


@pytest.fixture
def chosen(tmp_path: Path) -> dict[str, list[str]]:
    policy = tmp_path / "policy.yaml"
    policy.write_text("execution: {engine: onnxruntime, device: cpu, precision: fp16}\naccuracy: {rtol: 0.01}\n")
    return {"option": ["-e", "onnxruntime", "-d", "cpu", "--precision", "fp16"], "policy": ["--policy", str(policy)]}


@pytest.mark.parametrize("how", ["option", "policy"])
def test_an_input_that_is_given_is_the_probe(
    xrt: Any, padded: Path, tmp_path: Path, chosen: dict[str, list[str]], how: str
) -> None:
    result = xrt("run", padded, *chosen[how], "--input", f"audio=@{tmp_path / 'audio.npy'}", "--json")
    assert result.code == 0, result.err
    assert "inconclusive" not in result.err
    found = result.json()
    assert found["precision"] == "fp16"
    assert found["probe_inputs"] == []
    assert found["outputs"]["y"]["shape"] == [1, 164]


def test_explain_compares_the_input_that_is_given(
    xrt: Any, padded: Path, tmp_path: Path, chosen: dict[str, list[str]]
) -> None:
    result = xrt("explain", padded, *chosen["policy"], "--input", f"audio=@{tmp_path / 'audio.npy'}", "--json")
    (seen,) = [observation for observation in result.json()["observations"] if observation["key"] == "accuracy.rtol"]
    assert seen["status"] == "honoured"
    assert "inconclusive" not in result.err


def test_an_input_is_no_calibration(xrt: Any, digits: str, tmp_path: Path) -> None:
    """int8 still asks for inputs to quantize with."""
    np.save(tmp_path / "image.npy", np.ones((1, 1, 8, 8), np.float32))
    given = ["-e", "onnxruntime", "-d", "cpu", "--precision", "int8", "--input", f"image=@{tmp_path / 'image.npy'}"]
    result = xrt("run", digits, *given)
    assert result.code != 0
    assert "calibration" in result.err


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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(["--only", "evidnce"], "'evidnce' is not a section"), (["--lock", "missing.lock"], "cannot read the lock")],
)
def test_a_wrong_argument_is_not_blamed_on_generated_inputs(
    xrt: Any, two_inputs: str, wrong: list[str], said: str
) -> None:
    result = xrt("verify", two_inputs, "--device", "cpu", *wrong)
    assert (result.code, said in result.err, "generated input" in result.err) == (2, True, False)
