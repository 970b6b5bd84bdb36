# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A report shows the grades of determinism that were tested on its session, and claims nothing without a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
import pytest

import xpuruntime as xrt
from xpuruntime.evidence import Report
from xpuruntime.locks.determinism import session_determinism

pytest.importorskip("torch")

import planted

if TYPE_CHECKING:
    from pathlib import Path


def opened(model: Any, grade: str) -> xrt.InferenceSession:
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu", "determinism": grade}}
    return xrt.InferenceSession(str(model), policy=policy)


def seen(report: Report) -> Any:
    return next(observation for observation in report.observations if observation.key == "execution.determinism")


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
def test_a_grade_is_unobservable_until_it_was_tested(tmp_path: Path) -> None:
    with opened(xrt.demo_model_path(), "concurrency") as session:
        before = session.explain(runs=1)
        assert (seen(before).status, before.determinism) == ("unobservable", None)
        session_determinism(session, "run_to_run", trials=3)
        assert seen(session.explain(runs=1)).status == "unobservable", "a lower grade says nothing of it"
        found = session_determinism(session, trials=3)
        report = session.explain(runs=1)
    assert report.determinism == found
    assert (seen(report).status, seen(report).observed) == ("honoured", "concurrency")
    path = tmp_path / "report.json"
    report.save(path)
    assert Report.load(path).determinism == found
    assert "determinism: concurrency" in str(report)
    assert '"determinism":{"headline":"determinism: concurrency' in report.to_html().replace(", ", ",").replace(
        ": {", ":{"
    )


@pytest.mark.filterwarnings("ignore::xpuruntime.errors.XpuRuntimeWarning")
def test_a_grade_that_failed_is_a_deviation_with_the_first_unit(tmp_path: Path) -> None:
    path = tmp_path / "noisy.onnx"
    onnx.save(planted.noisy(), path)
    with opened(path, "run_to_run") as session:
        session_determinism(session, trials=3)
        report = session.explain(runs=1)
    one = seen(report)
    assert (one.status, one.observed) == ("substituted", "none")
    assert "run_to_run failed" in one.reason
    assert "first at noise (RandomNormalLike)" in one.reason
    assert not report.honoured
