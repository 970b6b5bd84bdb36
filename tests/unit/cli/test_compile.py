# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt compile``, and the other commands on what it wrote."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(xrt: Any, digits: str, tmp_path: Path) -> Path:
    out = tmp_path / "digits.xrt"
    result = xrt("compile", digits, "-o", out, "--device", "cpu", "--engine", "onnxruntime")
    assert result.code == 0, result.err
    return out


def test_it_says_what_was_made(xrt: Any, digits: str, tmp_path: Path) -> None:
    out = tmp_path / "digits.xrt"
    result = xrt("compile", digits, "-o", out, "--device", "cpu", "--engine", "onnxruntime")
    assert result.code == 0
    assert result.out.startswith(f"{out}: onnxruntime@cpu, 3 files, ")
    assert "tied to: onnxruntime " in result.out
    assert sorted(path.name for path in out.iterdir()) == [
        "manifest.json", "model.onnx", "model.onnx.data", "source.onnx",
    ]  # fmt: skip


def test_json(xrt: Any, digits: str, tmp_path: Path) -> None:
    out = tmp_path / "d.xrt"
    result = xrt("compile", digits, "-o", out, "-d", "cpu", "-e", "onnxruntime", "--precision", "fp16", "--json")
    assert result.code == 0
    found = result.json()
    assert found["schema"] == "xpuruntime.compile/1"
    assert found["folder"] == str(out)
    assert found["engine"] == "onnxruntime"
    assert found["accuracy"]["passed"] is True
    assert found["entry"] in found["files"]
    assert found["target"]["provider"] == "CPUExecutionProvider"
    assert found["seconds"] > 0
    assert "warning: " in result.err
    assert "fp16 is advisory" in result.err


def test_every_command_takes_the_folder(xrt: Any, digits: str, folder: Path, tmp_path: Path) -> None:
    for model, out in ((digits, "a.npy"), (folder, "b.npy")):
        assert xrt("run", model, "-d", "cpu", "-e", "onnxruntime", "--output", tmp_path / out).code == 0
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))
    plan = xrt("plan", folder, "--json").json()
    assert any("loaded from artifact" in note for note in plan["notes"])
    assert xrt("bench", folder, "-n", "3", "--warmup", "1").code == 0
    assert xrt("explain", folder).code == 0


def test_a_folder_that_is_there(xrt: Any, digits: str, folder: Path) -> None:
    result = xrt("compile", digits, "-o", folder, "-d", "cpu")
    assert result.code == 2
    assert "is there already" in result.err
    assert xrt("compile", digits, "-o", folder, "-d", "cpu", "--force").code == 0


def test_codes_of_what_is_refused(xrt: Any, digits: str, folder: Path, tmp_path: Path) -> None:
    assert xrt("compile", digits, "-o", tmp_path / "n.xrt", "-e", "null").code == 1
    assert xrt("compile", tmp_path / "none.onnx", "-o", tmp_path / "n.xrt").code == 2
    assert xrt("compile", digits).code == 2
    assert xrt("run", tmp_path / "none.xrt").code == 2
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["target"]["onnxruntime"] = "1.0"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    result = xrt("run", folder)
    assert result.code == 3
    assert "it was compiled for onnxruntime 1.0 and here is" in result.err
    (folder / "model.onnx").write_bytes(b"")
    result = xrt("run", folder, "--json")
    assert result.code == 2
    assert "is cut off" in result.json()["error"]["message"]


def test_the_chip_of_qnn(xrt: Any, digits: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn")
    policy = tmp_path / "policy.yaml"
    policy.write_text("execution: {engine: qnn, device: npu, shapes: {image: [1, 1, 8, 8]}}\n")
    result = xrt("compile", digits, "-o", tmp_path / "q.xrt", "--policy", policy, "--soc", "sm8650", "--json")
    assert result.code == 0, result.err
    document = json.loads((tmp_path / "q.xrt" / "manifest.json").read_text())
    assert document["policy"]["execution"]["provider_options"] == {"qnn": {"soc": "sm8650"}}
    result = xrt("compile", digits, "-o", tmp_path / "r.xrt", "--policy", policy, "--soc", "sm0")
    assert result.code != 0
    assert "sm0" in result.err


@pytest.mark.parametrize("engine", [(), ("--engine", "onnxruntime"), ("--engine", "onnxruntime,null")])
def test_a_chip_is_of_qnn_alone(xrt: Any, digits: str, tmp_path: Path, engine: tuple[str, ...]) -> None:
    result = xrt("compile", digits, "-o", tmp_path / "s.xrt", *engine, "--soc", "sm8650")
    assert result.code == 2
    assert "--soc sm8650 names a chip for the engine qnn" in result.err
    assert "--engine qnn" in result.err
    assert not (tmp_path / "s.xrt").exists()
