# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inputs of the command line as the probe of a converted model, where one that is generated does not suit it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

if TYPE_CHECKING:
    from pathlib import Path


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
