# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The tables of docs/engines/index.md say what engines answer and reports hold."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from docs_blocks import NEEDS, ROOT

import xpuruntime as xrt

PAGE = (ROOT / "docs" / "engines" / "index.md").read_text(encoding="utf-8")
QNN = {"execution": {"shapes": {"image": [1, 1, 8, 8]}, "provider_options": {"qnn": {"soc": "sm8650"}}}}
#: The words for a kind of time on the page.
TIMES = {("us", "wall"): "host us", ("us", "device"): "device us", ("cycles", "simulated"): "simulated cycles"}


def evidence() -> dict[str, list[str]]:
    """Return the rows of the table below `Evidence by engine`, by engine."""
    section = PAGE.split("## Evidence by engine")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in section.splitlines() if "|" in line]
    return {name.strip(): row[1:] for row in rows[2:] for name in row[0].split(",")}


def units(engine: str, **more: Any) -> tuple[xrt.Report, set[str]]:
    if engine == "torch":
        import torch

        module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).eval()
        session = xrt.InferenceSession(module, example_inputs=(torch.zeros(1, 64),), device="cpu", **more)
    else:
        device = "npu" if engine == "qnn" else "cpu"
        session = xrt.InferenceSession(xrt.demo_model_path(), engine=engine, device=device, **more)
    with session:
        report = session.explain(runs=3)
    return report, {TIMES[unit.time.unit, unit.time.kind] for unit in report.units if unit.time}


@pytest.mark.needs_build("cuda", "cublas", "cudnn")
def test_the_tables_of_the_code_are_up_to_date():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "engine_tables.py"), "--check"],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "qnn", "torch"])
def test_the_report_shows_what_the_page_says(engine: str):
    if engine in NEEDS and not NEEDS[engine][0]():
        pytest.skip(NEEDS[engine][1])
    kernel, time, _, layout = evidence()[engine]
    report, times = units(engine, policy=QNN if engine == "qnn" else None)
    computing = [
        unit for unit in report.units if unit.relation in ("exact", "fused") and unit.time and unit.op != "Reshape"
    ]
    named = [unit.kernel for unit in computing if unit.kernel]
    assert times == {time.split(";")[0]}
    assert bool(named) == kernel.startswith("every unit")
    assert not kernel.startswith("every unit") or len(named) == len(computing)
    assert any(unit.layout for unit in report.units) == (layout == "yes")
    assert all(unit.precision_run for unit in computing if unit.op in ("Conv", "Gemm", "MatMul", "aten::addmm"))
    assert report.honoured


def test_kernels_of_ours_are_named_inside_of_onnxruntime():
    report, _ = units("onnxruntime", policy={"mode": "strict", "kernels": {"matmul": "cpu.blas"}})
    assert {unit.kernel for unit in report.units if unit.kernel} == {"cpu.blas"}
