# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`EngineUnavailable` and `EngineFailed`: the error of an engine that is missing, and of one that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from machines import machine
from onnx import TensorProto, helper

import xpuruntime as xrt
from xpuruntime.cli.exit_codes import ExitCode, exit_code_of
from xpuruntime.engines.registry import default_registry
from xpuruntime.errors import AccuracyError, EngineError, EngineFailed, EngineUnavailable
from xpuruntime.runtime.machine import EngineFacts

MODEL = xrt.demo_model_path()
BARE = machine()


def reshaping(folder: Path) -> Path:
    """A model whose second input says the shape: one that does not fit fails as it runs."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "s"], ["y"])],
        "g",
        [value("x", TensorProto.FLOAT, ["n"]), value("s", TensorProto.INT64, [1])],
        [value("y", TensorProto.FLOAT, ["m"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "reshape.onnx")
    return folder / "reshape.onnx"


@pytest.mark.parametrize(
    "name", [name for name in default_registry().engines() if name not in ("torch", "null") and "genai" not in name]
)
def test_an_engine_that_is_not_installed_is_unavailable(name: str) -> None:
    with pytest.raises(EngineUnavailable):
        xrt.plan(MODEL, engine=name, machine=BARE)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "qnn"])  # those that need no CUDA device
def test_an_engine_that_is_broken_is_unavailable(name: str) -> None:
    facts = EngineFacts(name=name, version="1.0", reason="it does not import", fix="reinstall it")
    with pytest.raises(EngineUnavailable, match="it does not import"):
        xrt.plan(MODEL, engine=name, machine=BARE.with_engines({name: facts}))


def test_a_name_that_no_engine_has() -> None:
    near = r"unknown engine 'onnxrunttime'; did you mean 'onnxruntime'\? Registered: .*\. Fix: write onnxruntime, or"
    with pytest.raises(EngineUnavailable, match=near):
        default_registry().get("onnxrunttime")
    with pytest.raises(EngineUnavailable, match=r"Fix: write one of these, or install the package that registers xyz"):
        default_registry().get("xyz")


def test_a_library_that_is_not_found() -> None:
    from xpuruntime.runtime.libraries.loading import preload

    with pytest.raises(EngineUnavailable, match="it was not found"):
        preload(["libcublasLt.so.99"])


def test_a_run_that_fails(tmp_path: Path) -> None:
    with xrt.InferenceSession(reshaping(tmp_path), engine="onnxruntime", device="cpu") as session:
        feeds: dict[str, Any] = {"x": np.ones(6, np.float32), "s": np.array([6])}
        np.testing.assert_array_equal(session.run(feeds)["y"], np.ones(6, np.float32))
        with pytest.raises(EngineFailed):
            session.run({**feeds, "s": np.array([5])})


def test_an_artifact_of_another_engine_is_neither(tmp_path: Path) -> None:
    artifact = xrt.compile_model(MODEL, tmp_path / "model.xrt", device="cpu", engine="onnxruntime")
    manifest = msgspec.json.decode((artifact.folder / "manifest.json").read_bytes())
    manifest["target"]["onnxruntime"] = "0.1"
    (artifact.folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(EngineError) as error:
        xrt.plan(tmp_path / "model.xrt")
    assert type(error.value) is EngineError


def test_exit_codes_stay() -> None:
    codes = {kind: exit_code_of(kind("x")) for kind in (EngineError, EngineUnavailable, EngineFailed, AccuracyError)}
    assert codes.pop(AccuracyError) == ExitCode.NOT_HONOURED
    assert set(codes.values()) == {ExitCode.ENVIRONMENT}
