# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt diff``: what it prints, its exit codes, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import xpuruntime as xpu

if TYPE_CHECKING:
    from pathlib import Path

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


def test_a_lock_is_a_side(xrt: Xrt, digits: str, tmp_path: Path) -> None:
    lock = tmp_path / "digits.lock"
    assert xrt("lock", digits, "--device", "cpu", "-o", lock).code == 0
    shown = xrt("diff", lock, "here", digits)
    assert shown.code == 0
    for part in ("L0 environment: same", "L4 numerics: same", "L5 time: not compared"):
        assert part in shown.out
    lock.write_bytes(lock.read_bytes()[:-100])
    cut = xrt("diff", lock, "here", digits)
    assert (cut.code, cut.out) == (1, "")
    assert "digits.lock" in cut.err


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
