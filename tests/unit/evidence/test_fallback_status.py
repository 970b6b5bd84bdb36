# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A fallback that ran: a status of its own in the headline, JSON, text, page and CLI, and no deviation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evidence_records import control, unit

import xpuruntime as xrt
from xpuruntime.evidence.key_observations import observations

MODEL = xrt.demo_model_path()


@pytest.fixture
def report() -> Any:
    pytest.importorskip("openvino")
    policy = {"execution": {"engine": "qnn", "device": "npu", "fallback": ["openvino@cpu"], "precision": "fp32"}}
    with pytest.warns(xrt.XpuRuntimeWarning, match=r"execution\.fallback was used"):
        session = xrt.InferenceSession(MODEL, policy=policy)
    with session:
        return session.explain(runs=1)


def test_a_fallback_is_in_the_headline_and_has_its_status(report: Any, tmp_path: Path) -> None:
    found = {observation.key: observation.status for observation in report.observations}
    assert {key for key, status in found.items() if status == "fallback"} == {
        "execution.engine",
        "execution.device",
        "execution.fallback",
    }
    assert (report.headline, report.fallback) == ("policy honoured by fallback openvino@cpu", "openvino@cpu")
    assert report.honoured
    assert not report.deviations
    plain = json.loads(report.to_json())
    assert (plain["headline"], plain["fallback"]) == (report.headline, "openvino@cpu")
    again = xrt.Report.load(report.save(tmp_path / "report.json"))
    assert again.headline == report.headline
    assert str(report).startswith("policy honoured by fallback openvino@cpu")
    assert "by fallback openvino@cpu" in report.to_html()


@pytest.mark.parametrize(
    ("engine", "device", "expected"),
    [
        ("qnn", "npu", ("fallback", "fallback")),
        ("[qnn, onnxruntime]", "npu", ("honoured", "fallback")),
        ("onnxruntime", "cuda:0", ("honoured", "fallback")),
        ("qnn", "cpu", ("fallback", "honoured")),
        ("qnn", "auto", ("fallback", "honoured")),
        ("auto", "npu", ("honoured", "fallback")),
    ],
)
def test_which_keys_a_fallback_changes(engine: str, device: str, expected: tuple[str, str]) -> None:
    controls = [
        control("execution.engine", engine, "onnxruntime"),
        control("execution.device", device, "cpu"),
        control("execution.fallback", "onnxruntime@cpu", "used: onnxruntime@cpu"),
    ]
    found = observations(controls, {}, [unit("a")], engine="onnxruntime", device="cpu")
    assert tuple(one.status for one in found[:2]) == expected
    assert found[-1].status == "fallback"


def test_a_fallback_that_was_not_needed() -> None:
    controls = [control("execution.fallback", "onnxruntime@cpu", "not needed")]
    found = observations(controls, {}, [unit("a")], engine="onnxruntime", device="cpu")
    assert [one.status for one in found] == ["honoured"] * 3
