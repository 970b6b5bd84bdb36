# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tables of a report and of a verification: rows, CSV and dataframes."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import pytest

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path

POLICY = {"execution": {"engine": "onnxruntime", "device": "cpu"}, "kernels": {"matmul": "cpu.blas"}}


@pytest.fixture(scope="module")
def report() -> xrt.Report:
    with xrt.InferenceSession(xrt.demo_model_path(), POLICY) as session:
        return session.explain(runs=1)


def test_rows_are_flat_and_complete(report: xrt.Report) -> None:
    rows = report.records()
    assert [row["id"] for row in rows] == [unit.id for unit in report.units]
    assert [row["source_nodes"] for row in rows] == ["; ".join(unit.source_nodes) for unit in report.units]
    assert [row.get("time.value") for row in rows] == [unit.time and unit.time.value for unit in report.units]
    assert {type(value) for row in rows for value in row.values()} <= {str, int, float, bool, type(None)}
    assert not any("time" in row for row in rows)
    assert [row["status"] for row in report.records("observations")] == [
        observation.status for observation in report.observations
    ]


def test_csv_holds_the_rows(report: xrt.Report, tmp_path: Path) -> None:
    path = report.save_csv(tmp_path / "units.csv")
    with path.open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    rows = report.records()
    assert [{name: row[name] for name in ("id", "op", "device")} for row in read] == [
        {name: row[name] for name in ("id", "op", "device")} for row in rows
    ]
    assert [float(row["time.value"]) for row in read if row["time.value"]] == [
        row["time.value"] for row in rows if row.get("time.value") is not None
    ]


def test_a_table_without_rows_has_its_columns(tmp_path: Path) -> None:
    path = xrt.Report().save_csv(tmp_path / "units.csv")
    assert path.read_text().startswith("id,op,relation,source_nodes,")


def test_a_table_that_there_is_not_is_refused(report: xrt.Report) -> None:
    with pytest.raises(xrt.InputError, match=r"the report has no table 'nodes'. Fix: give one of observations, units"):
        report.records("nodes")


def test_claims_of_a_verification(tmp_path: Path) -> None:
    result = xrt.verify(xrt.demo_model_path(), POLICY, only=["evidence", "accuracy"])
    rows = result.records()
    assert [row["id"] for row in rows] == [claim.id for claim in result.claims]
    (row,) = (row for row in rows if row["id"] == "accuracy.logits")
    (claim,) = (claim for claim in result.claims if claim.id == "accuracy.logits")
    assert row["figures.max_abs"] == claim.figures["max_abs"]


def test_a_dataframe_has_the_rows(report: xrt.Report) -> None:
    pytest.importorskip("pandas", reason="pip install pandas")
    frame = report.to_pandas()
    assert list(frame["id"]) == [unit.id for unit in report.units]
    assert frame["time.value"].dtype == "float64"
    assert list(xrt.Report().to_pandas().columns)[:2] == ["id", "op"]
