# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt compare``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

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


def test_nothing_ran(xrt: Any, digits: str) -> None:
    assert xrt("compare", digits, "--engines", "ort@npu").code == 1


def test_a_mistyped_engine_beside_a_good_one(xrt: Any, digits: str) -> None:
    result = xrt("compare", digits, "--engines", "onnxruntime,openvno", "-d", "cpu", "-n", 1)
    assert result.code == 2
    assert "openvno" in result.err


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


def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(xrt: Any, tmp_path: Path) -> None:
    result = xrt("compare", "nothing.onnx", "--html", tmp_path / "nowhere" / "drift.html")
    assert result.code == 2
    assert "--html" in result.err


def test_inputs_are_given_only_where_somebody_gave_them(xrt: Any, two_inputs: str) -> None:
    made = xrt("compare", two_inputs, "--engines", "onnxruntime", "--dim", "N=3", "--device", "cpu", "--json")
    assert made.json()["inputs"] == "generated"
    given = xrt(
        "compare", two_inputs, "--engines", "onnxruntime", "--device", "cpu", "--json",
        "--input", "a=[[1.0, 2.0, 3.0]]", "--input", "b=[[3.0, 4.0, 5.0]]",
    )  # fmt: skip
    assert given.json()["inputs"] == "given"
