# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Decisions as records of Python's logging, under the logger `xpuruntime`."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path

MODEL = xrt.demo_model_path()
POLICY = {"execution": {"device": "cpu", "engine": "onnxruntime"}}


def told(caplog: pytest.LogCaptureFixture, level: int) -> str:
    records = [record for record in caplog.records if record.name.startswith("xpuruntime.")]
    return "\n".join(record.getMessage() for record in records if record.levelno == level)


def test_plan_fallback_and_evidence_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="xpuruntime")
    policy = {"execution": {"engine": "onnxruntime", "device": "cuda:99", "fallback": ["onnxruntime@cpu"]}}
    with pytest.warns(xrt.XpuRuntimeWarning), xrt.InferenceSession(MODEL, policy=policy) as session:
        session.explain(runs=1)
    assert "onnxruntime@cpu is taken as a fallback for" in told(caplog, logging.INFO)
    assert "execution.device: asked cuda:99, observed cpu" in told(caplog, logging.INFO)
    assert "onnxruntime@cuda:99 was rejected" in told(caplog, logging.DEBUG)
    assert "honoured" in told(caplog, logging.DEBUG)


def test_a_lock_that_holds_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = str(tmp_path / "model.lock")
    xrt.lock(MODEL, POLICY, path)
    caplog.set_level(logging.INFO, logger="xpuruntime")
    xrt.InferenceSession(MODEL, policy=POLICY, lock=path).close()
    assert f"lock {path} holds" in told(caplog, logging.INFO)


def test_nothing_is_printed_unless_logging_is_configured() -> None:
    code = f"import xpuruntime as xrt; xrt.plan({str(MODEL)!r}, policy={POLICY!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
