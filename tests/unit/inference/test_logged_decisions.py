# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Decisions as records of Python's logging below `xpuruntime`, and operations as spans of OpenTelemetry."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL = xrt.demo_model_path()
POLICY = {"execution": {"device": "cpu", "engine": "onnxruntime"}}
IMAGE = {"image": np.zeros((1, 1, 8, 8), np.float32)}
TOO_FEW = {"image": np.zeros((1, 1, 8), np.float32)}
UNENFORCEABLE = {"mode": "strict", "execution": {"device": "cpu", "engine": "onnxruntime", "layout": "nchw"}}


def logged(caplog: pytest.LogCaptureFixture, operation: str, event: str) -> list[dict[str, Any]]:
    """Return the fields of the records of an event, with the level and the text."""
    return [
        {
            name.removeprefix("xpuruntime."): value
            for name, value in vars(record).items()
            if name.startswith("xpuruntime.")
        }
        | {"level": record.levelname, "text": record.getMessage()}
        for record in caplog.records
        if record.name == f"xpuruntime.{operation}" and vars(record)["xpuruntime.event"] == event
    ]


def test_plan_fallback_and_evidence_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="xpuruntime")
    policy = {"execution": {"engine": "onnxruntime", "device": "cuda:99", "fallback": ["onnxruntime@cpu"]}}
    with pytest.warns(xrt.XpuRuntimeWarning), xrt.InferenceSession(MODEL, policy=policy) as session:
        report = session.explain(runs=1)
    (plan,) = logged(caplog, "plan", "plan")
    assert "onnxruntime@cpu is taken as a fallback for" in plan["text"]
    facts = {"level": "WARNING", "engine": "onnxruntime", "device": "cpu", "fallback": True, "mode": "prefer"}
    assert facts.items() <= plan.items()
    (rejected,) = logged(caplog, "plan", "candidate")
    assert (rejected["level"], rejected["candidate"]) == ("DEBUG", "onnxruntime@cuda:99")
    observed = {one["key"]: one for one in logged(caplog, "explain", "observation")}
    assert observed.keys() == {observation.key for observation in report.observations}
    levels = {one["status"]: one["level"] for one in observed.values()}
    assert levels == {"honoured": "DEBUG", "fallback": "INFO"}


def test_a_deviation_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="xpuruntime")
    policy = {"execution": {**POLICY["execution"], "layout": "nchw"}}
    with pytest.warns(xrt.XpuRuntimeWarning), xrt.InferenceSession(MODEL, policy=policy) as session:
        session.explain(runs=1)
    assert [(one["key"], one["level"]) for one in logged(caplog, "explain", "observation")] == [
        ("execution.layout", "WARNING")
    ]


def test_refusals_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="xpuruntime")
    with xrt.InferenceSession(MODEL, POLICY) as session, pytest.raises(xrt.InputError):
        session.run(TOO_FEW)
    with pytest.raises(xrt.UnsupportedOperationError):
        xrt.plan(MODEL, UNENFORCEABLE)
    (run,), (plan,) = logged(caplog, "run", "refusal"), logged(caplog, "plan", "refusal")
    assert (run["level"], run["error"], "has rank 3" in run["text"]) == ("WARNING", "InputError", True)
    assert (plan["error"], "execution.layout" in plan["text"]) == ("UnsupportedOperationError", True)
    assert len(caplog.records) == 2


def test_locks_and_claims_are_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = str(tmp_path / "model.lock")
    made = xrt.lock(MODEL, POLICY, path).lock
    caplog.set_level(logging.DEBUG, logger="xpuruntime")
    xrt.InferenceSession(MODEL, policy=POLICY, lock=path).close()
    (lock,) = logged(caplog, "lock", "lock")
    assert (lock["text"], lock["digest"]) == (f"lock {path} holds for what is loaded and computed", made.digest)
    caplog.clear()
    result = xrt.verify(MODEL, {"execution": {**POLICY["execution"], "layout": "nchw"}}, only=["evidence"])
    claims = {one["claim"]: (one["level"], one["verdict"]) for one in logged(caplog, "verify", "claim")}
    assert claims.keys() == {claim.id for claim in result.claims}
    assert claims["evidence.execution.layout"] == ("WARNING", "fail")
    assert claims["evidence.execution.device"] == ("DEBUG", "pass")
    (verdict,) = logged(caplog, "verify", "verdict")
    assert {"level": "WARNING", "verdict": "fail", "failed": ["evidence.execution.layout"]}.items() <= verdict.items()


def test_nothing_is_printed_unless_logging_is_configured() -> None:
    code = (
        f"import sys, xpuruntime as xrt\nxrt.plan({str(MODEL)!r}, policy={POLICY!r})\n"
        f"try: xrt.plan({str(MODEL)!r}, policy={UNENFORCEABLE!r})\nexcept xrt.UnsupportedOperationError: pass\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """Set a tracer provider, and return a function that takes the spans that have ended."""
    trace = pytest.importorskip("opentelemetry.trace", reason="pip install opentelemetry-sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)

    def taken() -> list[Any]:
        finished_spans = list(exporter.get_finished_spans())
        exporter.clear()
        return finished_spans

    return taken


def test_operations_are_spans(spans: Callable[[], list[Any]]) -> None:
    with xrt.InferenceSession(MODEL, POLICY) as session:
        session.run(IMAGE)
        with pytest.raises(xrt.InputError):
            session.run(TOO_FEW)
        session.explain(runs=1)
    found = spans()
    assert [one.name.removeprefix("xpuruntime.") for one in found] == ["plan", "load", "run", "run", "explain"]
    assert {one.attributes["xpuruntime.engine"] for one in found} == {"onnxruntime"}
    assert found[0].attributes["xpuruntime.policy_source"] == "stated"
    assert found[4].attributes["xpuruntime.honoured"] is True
    assert [one.status.is_ok for one in found] == [True, True, True, False, True]
    assert found[3].events[0].attributes["exception.type"].endswith("InputError")


def test_the_operations_of_a_verification_are_inside_its_span(spans: Callable[[], list[Any]]) -> None:
    xrt.verify(MODEL, POLICY, only=["evidence", "accuracy"])
    *inside, outer = spans()
    assert outer.name == "xpuruntime.verify"
    assert (outer.attributes["xpuruntime.verdict"], outer.attributes["xpuruntime.failed"]) == ("pass", ())
    assert {one.name for one in inside} == {"xpuruntime.plan", "xpuruntime.load", "xpuruntime.explain"}
    assert {one.context.trace_id for one in inside} == {outer.context.trace_id}


def test_a_lock_is_one_trace(spans: Callable[[], list[Any]], tmp_path: Path) -> None:
    lock = xrt.lock(MODEL, POLICY, tmp_path / "model.lock")
    *inside, outer = spans()
    assert (outer.name, outer.attributes["xpuruntime.digest"]) == ("xpuruntime.lock", lock.lock.digest)
    assert {one.context.trace_id for one in inside} == {outer.context.trace_id}


def test_run_is_untouched_without_a_provider() -> None:
    with xrt.InferenceSession(MODEL, POLICY) as session:
        assert session.run.__module__.startswith("xpuruntime.engines.")


def test_steps_of_long_operations_are_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, logger="xpuruntime.steps")
    xrt.verify(MODEL, POLICY, only=["evidence", "start"])
    xrt.compare_engines(MODEL, ["null", "onnxruntime@cpu"], device="cpu", runs=1, search=False)
    xrt.determinism(MODEL, "run_to_run", trials=2, **POLICY["execution"])
    xrt.lock(MODEL, POLICY, tmp_path / "model.lock")
    with xrt.InferenceSession(MODEL, POLICY) as session:
        session.explain(runs=1)
    *steps, observing, running, measuring, timing, watching, comparing = logged(caplog, "steps", "step")
    assert [one["of"] for one in (observing, running, measuring)] == [3, 3, 3], "and none of what a lock explains"
    explained = [one["step"] for one in (timing, watching, comparing)]
    assert explained == ["timing", "observing", "comparing with the policy"]
    assert [(step["step"], step["number"], step["of"]) for step in steps] == [
        ("evidence", 1, 2), ("start", 2, 2), ("null", 1, 2), ("onnxruntime@cpu", 2, 2), ("run_to_run", 1, 1),
    ]  # fmt: skip
    assert ["seconds" in step for step in steps] == [False, False, False, True, False]
