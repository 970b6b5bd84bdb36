# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt determinism``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import onnx
import pytest

from xpuruntime.testing import models

pytest.importorskip("torch")

import planted

if TYPE_CHECKING:
    from pathlib import Path


def test_a_grade_that_fails(xrt: Any, tmp_path: Path) -> None:
    onnx.save(planted.noisy(), tmp_path / "noisy.onnx")
    path = str(tmp_path / "noisy.onnx")
    failed = xrt("determinism", path, "--engine", "onnxruntime", "--device", "cpu", "--grade", "run_to_run", "--json")
    document = json.loads(failed.out)
    assert (failed.code, document["reached"], document["observed"]) == (1, False, "none")
    assert document["tests"][0]["first_difference"]["unit"] == "noise"
    shown = xrt("determinism", path, "--engine", "onnxruntime", "--device", "cpu")
    assert (shown.code, "run_to_run" in shown.out, "not tested" in shown.out) == (0, True, True)


def test_a_grade_that_passes(xrt: Any, tmp_path: Path) -> None:
    path = str(models.save(models.mlp(), tmp_path))
    done = xrt("determinism", path, "--grade", "concurrency", "--trials", "4", "--device", "cpu")
    assert done.code == 0, done.err
    assert "determinism: concurrency, asked for concurrency" in done.out


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (("--grade", "always"), "'always' is not a grade of determinism"),
        (("--batch-sizes", "2,x"), "write sizes of 1 or more with commas"),
        (("--batch-dim", "M"), "no open dimension 'M'"),
    ],
)
def test_bad_options(xrt: Any, tmp_path: Path, wrong: tuple[str, str], told: str) -> None:
    refused = xrt("determinism", str(models.save(models.mlp(), tmp_path)), *wrong, "--device", "cpu")
    assert (refused.code, told in refused.err) == (2, True), refused.err


def test_a_report_shows_what_was_tested(xrt, digits, tmp_path):
    saved = tmp_path / "report.json"
    shown = xrt("explain", digits, "--device", "cpu", "--determinism", "concurrency", "-o", saved)
    assert shown.code == 0
    assert "determinism: concurrency" in shown.out
    assert json.loads(saved.read_text())["determinism"]["observed"] == "concurrency"
    wrong = xrt("explain", digits, "--device", "cpu", "--determinism", "always")
    assert (wrong.code, wrong.out) == (2, "")
    assert "'always' is not a grade of determinism" in wrong.err
    again = xrt("explain", saved, "--determinism", "concurrency")
    assert again.code == 2
