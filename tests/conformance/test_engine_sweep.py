# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The sweep of an engine's operators: what it compares, and what makes it fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import engine_sweep

from xpuruntime.engines import known_errors

pytest.importorskip("openvino")

OPS = ("SpaceToDepth",)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return list(engine_sweep.sweep("openvino", 1, OPS))


def test_the_rows_explain_every_difference(found: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_sweep.report("openvino", found, OPS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("0 differences without a row, 0 rows without a difference")
    assert lines[1].endswith("cases compared, of 1 operators")
    assert {line.split()[0] for line in lines[3:]} == {"space-to-depth-crd"}
    assert any("open" in row["case"] for row in found)
    assert any("open" not in row["case"] for row in found)


def with_rows(monkeypatch: pytest.MonkeyPatch, rows: list[known_errors.KnownError]) -> None:
    monkeypatch.setattr(engine_sweep, "known_errors", lambda engine: tuple(rows))


def test_a_difference_without_a_row_fails(
    found: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_rows(monkeypatch, [row for row in known_errors.known_errors("openvino") if row.id != "space-to-depth-crd"])
    assert not engine_sweep.report("openvino", found, OPS)
    assert "new: SpaceToDepth (float32)" in capsys.readouterr().out


def test_a_row_that_no_case_shows_fails(
    found: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(known_errors.known_errors("openvino"))
    (right,) = [row for row in rows if row.id == "space-to-depth-crd"]
    with_rows(monkeypatch, [*rows, msgspec.structs.replace(right, id="planted", attributes={"mode": ["DCR"]})])
    assert not engine_sweep.report("openvino", found, OPS)
    assert "planted" in capsys.readouterr().out


@pytest.mark.parametrize(("planted", "said"), [(1.0, True), (1.0005, False), (0.9, True)])
def test_an_engine_that_computes_wrong_is_found(planted: float, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.float32([[-1, 2, 3]])
    text = '<ir_version: 10, opset_import: ["" : 18]> g (float[1, 3] x) => (float[1, 3] y) { y = Relu (x) }'
    model = onnx.parser.parse_model(text)
    case = engine_sweep.Case("Relu", model, {"x": x})
    (right,) = engine_sweep.directly("onnxruntime", case.model)(list(case.feeds.values()))
    truthful = engine_sweep.directly

    def engine(name: str, model: Any) -> Any:
        made = right * np.float32(planted) if planted != 1.0 else right + np.float32(1.0)
        return (lambda values: [made]) if name == "planted" else truthful(name, model)

    monkeypatch.setattr(engine_sweep, "directly", engine)
    assert bool(engine_sweep.wrong("planted", case)) == said


def test_types_vary_in_a_version_that_onnx_runtime_takes() -> None:
    """The package onnx may know newer opsets, in which no case would be compared."""
    typed = [case for case in engine_sweep.variants(["Cast"], static=True) if case.name.endswith(" | uint8 | to=1")]
    engine_sweep.directly("onnxruntime", typed[0].model)


def test_a_case_without_inputs_is_compared() -> None:
    cases = [case for case in engine_sweep.variants(["OptionalHasElement"], static=True) if not case.feeds]
    assert cases
    for case in cases:
        assert engine_sweep.wrong("onnxruntime", case) in ("", None)


def test_nan_and_inputs_without_elements_are_cases_with_rows_of_their_own() -> None:
    found = list(engine_sweep.sweep("openvino", 1, ("Celu", "ReduceMin")))
    for words, row in ((" | NaN", "nan"), (" | no elements", "no-elements")):
        shown = [each for each in found if words in each.get("case", "") and each["wrong"]]
        assert shown
        assert all(row in each["rows"] for each in shown)
