# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Exports of models that take and give bfloat16, which NumPy lacks: scripts take and give its bits."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path

ml_dtypes = pytest.importorskip("ml_dtypes")

TARGETS = {"onnxruntime": "ort-python", "openvino": "openvino-json", "torch": "torch"}
#: Whether input and output are bfloat16.
BORDERS = {"both": (True, True), "input": (True, False), "output": (False, True)}
#: A script of PyTorch takes seconds to start: its program has an input and an output in float32 and in bfloat16.
CASES = [(engine, borders) for engine in TARGETS for borders in BORDERS if engine != "torch" or borders == "both"]


def save(engine: str, borders: str, folder: Path) -> Path:
    """Write a model that takes or gives bfloat16, a Relu inside."""
    taken, given = BORDERS[borders]
    if engine == "torch":
        import torch

        class Net(torch.nn.Module):
            def forward(self, x: Any, wide: Any) -> Any:
                return {"output": torch.relu(x.to(torch.float32)).to(torch.bfloat16), "as_given": wide.neg()}

        path = folder / "net.pt2"
        example = (torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(2, 4))
        torch.export.save(torch.export.export(Net(), example), path)
        return path
    kinds = [TensorProto.BFLOAT16 if narrow else TensorProto.FLOAT for narrow in (taken, given)]
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT, name="widen"),
        helper.make_node("Relu", ["wide"], ["relu"], name="relu"),
        helper.make_node("Cast", ["relu"], ["output"], to=kinds[1], name="narrow"),
    ]
    graph = helper.make_graph(
        nodes,
        "bits",
        [helper.make_tensor_value_info("x", kinds[0], [2, 4])],
        [helper.make_tensor_value_info("output", kinds[1], [2, 4])],
    )
    path = folder / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def lock(engine: str, model: Path, folder: Path) -> Path:
    xrt.lock(model, {"execution": {"engine": engine, "device": "cpu"}}, folder / "net.lock", trust=engine == "torch")
    return folder / "net.lock"


@pytest.mark.parametrize(("engine", "borders"), CASES)
def test_scripts_are_proved_and_take_bits(engine: str, borders: str, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    model = save(engine, borders, tmp_path)
    locked = lock(engine, model, tmp_path)
    made = xrt.export_lock(locked, TARGETS[engine], tmp_path / "out", prove=True, trust=engine == "torch")
    assert made.proof is not None
    assert not made.proof.of("fail", "inconclusive"), made.proof.of("fail")
    assert any("bits" in note for note in made.notes)

    taken, given = BORDERS[borders]
    x = (np.arange(8).reshape(2, 4) - 3.5).astype(ml_dtypes.bfloat16 if taken else np.float32)
    wide = {"wide": np.full((2, 4), 1.1, np.float32)} if engine == "torch" else {}
    np.savez(tmp_path / "in.npz", x=x.view(np.uint16) if taken else x, **wide)
    subprocess.run([sys.executable, "out/session.py", "in.npz", "out.npz"], cwd=tmp_path, check=True)
    with np.load(tmp_path / "out.npz") as outputs:
        output = outputs["output"]
        if wide:
            np.testing.assert_array_equal(outputs["as_given"], -wide["wide"])
    expected = np.maximum(x.astype(np.float32), 0)
    assert output.dtype == (np.uint16 if given else np.float32)
    np.testing.assert_array_equal(output.view(ml_dtypes.bfloat16) if given else output, expected)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_other_types_are_no_bits(engine: str, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    model = save(engine, "both", tmp_path)
    xrt.export_lock(lock(engine, model, tmp_path), TARGETS[engine], tmp_path / "out", trust=engine == "torch")
    np.savez(tmp_path / "in.npz", x=np.zeros((2, 4), np.float32))
    command = [sys.executable, "out/session.py", "in.npz", "out.npz"]
    ended = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert ended.returncode
    assert "x is bfloat16, and taken as its bits in an array of uint16, not as float32" in ended.stderr


@pytest.mark.parametrize(
    ("engine", "target", "borders"),
    [("onnxruntime", "triton", "input"), ("openvino", "triton", "both"), ("onnxruntime", "triton-python", "output")],
)
def test_triton_backends_without_the_type(engine: str, target: str, borders: str, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    locked = lock(engine, save(engine, borders, tmp_path), tmp_path)
    with pytest.raises(xrt.UnsupportedOperationError, match=r"has the type bfloat16, .* backend does not take. Fix: "):
        xrt.export_lock(locked, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_torch_sessions_take_and_give_narrow_arrays(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = (np.arange(8).reshape(2, 4) - 3.5).astype(ml_dtypes.bfloat16)
    x.flags.writeable = False
    with xrt.InferenceSession(save("torch", "both", tmp_path), device="cpu", trust=True) as session:
        feeds = {"x": x, "wide": np.zeros((2, 4), np.float32)}
        output = session.run(feeds)["output"]
        assert output.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(output, np.maximum(x, 0))
        assert session.explain(runs=1).units
        binding = session.bind(feeds)
        binding.run()
        np.testing.assert_array_equal(binding.outputs["output"], np.maximum(x, 0))
    module = torch.nn.Identity().eval()
    for name in ("float8_e4m3fn", "float8_e5m2"):
        narrow = np.ones((2, 4), getattr(ml_dtypes, name))
        example = torch.ones(2, 4).to(getattr(torch, name))
        with xrt.InferenceSession(module, device="cpu", example_inputs=(example,)) as session:
            (output,) = session.run({session.inputs[0].name: narrow}).values()
            assert output.dtype == narrow.dtype
            assert (output.view(np.uint8) == narrow.view(np.uint8)).all()
