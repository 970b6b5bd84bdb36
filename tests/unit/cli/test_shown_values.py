# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Values, durations, helps and completions of the command line, at 80 and at 120 columns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from xpuruntime.cli.options import devices, engines, operations, precisions
from xpuruntime.evidence.render_text.changes import duration_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

WIDTHS = (80, 120)
MACHINE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "machine.json"


@pytest.fixture(params=WIDTHS)
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


@pytest.mark.parametrize(
    ("us", "text"),
    [(0.0, "0.0 us"), (410.0, "410.0 us"), (177_720.8, "177.7 ms"), (1_000.0, "1.0 ms"), (2.5e6, "2.5 s")],
)
def test_one_duration_has_one_unit(us: float, text: str) -> None:
    assert duration_text(us) == text


@pytest.mark.parametrize("rows", [1, 102, 103, 500])
def test_first_values_are_those_of_the_model(xrt: Callable[..., Any], digits: str, tmp_path: Path, rows: int) -> None:
    """Of outputs below and above the 1,024 elements that JSON holds whole."""
    saved = tmp_path / "out.npz"
    done = xrt("run", digits, "--dim", f"N={rows}", "--json", "--output", str(saved))
    logits = json.loads(done.out)["outputs"]["logits"]
    values = np.load(saved)["logits"].ravel()
    np.testing.assert_allclose(logits["first"], values[:5], rtol=1e-6)
    assert (logits["values"] is None) == (values.size > 1024)
    text = xrt("run", digits, "--dim", f"N={rows}").out
    assert f"{values[0]:.5g}" in text
    assert "..." in text


def test_without_a_terminal_a_row_is_one_line(xrt: Callable[..., Any], digits: str, wide: int) -> None:
    """Whatever the environment says of the width: ids, numbers and verdicts are not split."""
    shown = xrt("compare", digits, "--engines", "onnxruntime,null", "--device", "cpu", "--no-search").out
    rows = [line.split() for line in shown.splitlines()]
    (head,) = [row for row in rows if row[:1] == ["engine"]]
    assert head[-1] == "verdict"
    assert "median" in head
    engines = {row[0] for row in rows if row[-1:] in (["agrees"], ["differs"]) and "@" in row[0]}
    assert engines == {"onnxruntime@cpu", "null@cpu"}
    plan = xrt("plan", digits).out
    assert "not_tried" not in plan
    (line,) = re.findall(r"^not tried, because onnxruntime@cpu comes before: (.*)", plan, re.MULTILINE)
    assert "openvino@" in line or "tensorrt@" in line
    assert re.search(r"^ *onnxruntime@cpu +accepted +\w.*\w", plan, re.MULTILINE)


def test_the_summary_is_the_beginning_of_the_report(xrt: Callable[..., Any], digits: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "report.json")
    short = xrt("explain", digits, "--summary", "--output", saved)
    assert short.out.startswith("policy honoured")
    assert "execution.device" in short.out
    assert "where the time goes" not in short.out
    again, whole = xrt("explain", saved, "--summary"), xrt("explain", saved)
    assert whole.out.startswith(again.out.rstrip())
    assert len(again.out) < len(whole.out) / 2
    assert xrt("explain", saved, saved, "--summary").code == 2


def test_errors_of_the_policy_come_alone(xrt: Callable[..., Any], digits: str, tmp_path: Path) -> None:
    wrong = tmp_path / "policy.yaml"
    wrong.write_text("execution: {devise: cpu}\n")
    for command in ("run", "bench", "explain", "profile"):
        done = xrt(command, digits, "--policy", str(wrong))
        assert done.code == 2
        assert done.err.startswith("error: "), done.err
        assert "generated" in xrt(command, digits, "--policy", "auto").err


@pytest.mark.parametrize("command", ["compare", "compile"])
def test_formats_that_are_not_taken_are_not_offered(xrt: Callable[..., Any], command: str) -> None:
    assert ".pt2" not in xrt(command, "--help").out


@pytest.mark.parametrize("command", ["run", "plan", "explain", "bench", "devices", "doctor", "kernels", "demo"])
def test_switches_take_no_value(xrt: Callable[..., Any], command: str, wide: int) -> None:
    line = next(line for line in xrt(command, "--help").out.splitlines() if " --json " in line)
    assert "bool" not in line


def test_values_are_completed() -> None:
    assert set(engines("o")) == {"onnxruntime", "onnxruntime-genai", "openvino", "openvino-genai"}
    assert set(engines("openvino,o")) == {
        f"openvino,{name}" for name in ("onnxruntime", "onnxruntime-genai", "openvino-genai")
    }
    assert devices("cu") == ["cuda:0"]
    assert set(devices("")) >= {"cpu", "npu", "gpu", "auto"}
    assert precisions("f") == ["fp32", "fp16"]
    assert operations("mat") == ["matmul"]


def test_the_sample_machine_is_planned_for(xrt: Callable[..., Any], digits: str) -> None:
    document = json.loads(xrt("plan", digits, "--machine", str(MACHINE), "--json").out)
    assert (document["engine"], document["device"]) == ("onnxruntime", "cuda:0")
    assert xrt("plan", digits, "--machine", str(MACHINE), "--device", "cuda:1").code == 3
