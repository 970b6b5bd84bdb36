# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""xrt compare and xrt diff."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xpu

if TYPE_CHECKING:
    from pathlib import Path


def test_engines_that_agree(xrt: Any, digits: str) -> None:
    result = xrt("compare", digits, "--engines", "onnxruntime,ort@cpu", "--device", "cpu", "--runs", 2)
    assert result.code == 0, result.err
    assert result.out.count("agrees") == 2
    assert "onnxruntime.cpu.fp32, input generated" in " ".join(result.out.split())


def test_a_mismatch_names_the_first_node_and_exits_with_1(xrt: Any, digits: str) -> None:
    result = xrt("compare", digits, "--engines", "onnxruntime,null", "-d", "cpu", "-n", 1)
    assert result.code == 1
    assert "differs" in result.out
    assert "first divergence at node 'conv1' (Conv)" in " ".join(result.out.split())
    result = xrt("compare", digits, "--engines", "null", "-d", "cpu", "-n", 1, "--no-search")
    assert result.code == 1
    assert "first divergence" not in result.out


def test_json(xrt: Any, digits: str) -> None:
    found = xrt("compare", digits, "--engines", "null,ort@npu", "-d", "cpu", "-n", 1, "--json")
    assert found.code == 1
    plain = found.json()
    assert plain["schema"] == "xpuruntime.comparison/1"
    assert [row["status"] for row in plain["rows"]] == ["differs", "rejected"]
    assert plain["rows"][0]["divergence"]["nodes"] == ["conv1"]


def test_inputs_and_sizes(xrt: Any, digits: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 1, 8, 8), np.float32))
    given = xrt("compare", digits, "--engines", "onnxruntime", "-i", f"image=@{tmp_path}/x.npy", "-d", "cpu", "--json")
    assert given.json()["inputs"] == "given"
    assert xrt("compare", digits, "--engines", "onnxruntime", "--dim", "N=3", "-d", "cpu", "-n", 1).code == 0
    assert xrt("compare", digits, "--engines", "onnxruntime", "-i", "picture=[1]", "-d", "cpu").code == 2


@pytest.mark.parametrize("engines", ["", ",", "@cpu", "onnxruntime@"])
def test_what_is_no_engine(xrt: Any, digits: str, engines: str) -> None:
    assert xrt("compare", digits, "--engines", engines).code == 2


def test_an_engine_that_was_named_and_rejected_fails(xrt: Any, digits: str) -> None:
    found = xrt("compare", digits, "--engines", "onnxruntime,ort@npu", "-d", "cpu", "-n", 1)
    assert found.code == 1
    assert "npu: rejected:" in found.out


def test_a_page(xrt: Any, digits: str, tmp_path: Path) -> None:
    page = tmp_path / "drift.html"
    result = xrt("compare", digits, "--engines", "onnxruntime,null", "-d", "cpu", "-n", 1, "--html", page)
    assert result.code == 1
    assert "15 layers measured, the first out of tolerance is 'conv1' (Conv)" in " ".join(result.out.split())
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert '"name":["conv1"' in text
    result = xrt("compare", digits, "--engines", "null", "-d", "cpu", "-n", 1, "--html", page, "--no-layers", "--json")
    assert result.json()["rows"][0]["drift"] is None
    assert "it was not asked for" in page.read_text(encoding="utf-8")


def test_layers_without_a_page(xrt: Any, digits: str) -> None:
    result = xrt("compare", digits, "--engines", "onnxruntime", "-d", "cpu", "-n", 1, "--layers", "--json")
    assert result.code == 0
    assert len(result.json()["rows"][0]["drift"]["layers"]) == 15


Xrt = Any


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write two reports of one model; in the second, a unit ran in fp16 and a package is another one."""
    folder = tmp_path_factory.mktemp("reports")
    with xpu.InferenceSession(xpu.demo_model_path(), device="cpu") as session:
        report = json.loads(session.explain(runs=2).to_json())
    (folder / "a.json").write_text(json.dumps(report))
    report["units"][0]["precision_run"] = "fp16"
    report["environment"]["packages"]["onnx"] = "1.0"
    (folder / "b.json").write_text(json.dumps(report))
    return folder / "a.json", folder / "b.json"


def test_levels_are_printed_and_saved(xrt: Xrt, reports: tuple[Path, Path], tmp_path: Path) -> None:
    shown = xrt("diff", *reports, "-o", tmp_path / "diff.json")
    assert shown.code == 1
    for part in ("L0 environment: differs", "L2 placement: same", "L3 kernels: differs", "fp16", "may be caused by"):
        assert part in shown.out
    saved = json.loads((tmp_path / "diff.json").read_text())
    assert (saved["schema"], saved["exit_code"]) == ("xpuruntime.diff/2", 1)
    same = xrt("diff", reports[0], reports[0], "--json")
    assert same.code == 0
    assert same.json()["headline"].startswith("nothing differs")


def test_interpreters_run_the_model(xrt: Xrt, digits: str) -> None:
    found = xrt("diff", "here", "here", digits, "--device", "cpu", "--budget", "1s", "--margin", "0.5", "--json")
    assert found.code in {0, 4}
    result = found.json()
    assert [level["name"] for level in result["levels"] if level["verdict"] == "differs"] in ([], ["time"])
    assert result["speed"]["rounds"] > 0
    assert result["conditions"]["seconds"] > 0


def test_what_is_no_side_is_refused(xrt: Xrt, digits: str, reports: tuple[Path, Path]) -> None:
    for arguments, text in (
        (("there", "here", digits), "neither a file nor an interpreter"),
        (("here", "here"), "give the model as MODEL"),
        (("here", "py:/no/such/python", digits), "not an executable file"),
        ((*reports, digits), "leave"),
        (("here", digits, digits), "not a report"),
    ):
        found = xrt("diff", *arguments)
        assert (found.code, found.out) == (2, "")
        assert text in found.err
    dead = xrt("diff", "here", "py:/bin/false", digits)
    assert dead.code == 3
    assert "ended in starting" in dead.err
