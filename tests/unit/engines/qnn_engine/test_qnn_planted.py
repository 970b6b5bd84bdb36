# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Something else is made to run on QNN than was asked, and the report tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from qnn_models import chip, open_on, unary

from xpuruntime.cli.entry import run

pytest.importorskip("onnxruntime_qnn")


def test_a_node_on_the_cpu_that_the_policy_forbids(tmp_path: Path) -> None:
    """The session was loaded with a permission that the policy, when the report is made, does not give."""
    with open_on(unary("Celu", tmp_path), precision="fp16", allow_cpu_ops=["Celu"]) as session:
        allowed = session.explain(runs=1)
        assert "execution.device" not in {o.key for o in allowed.deviations}
        session.policy = session.policy.replace(execution=session.policy.execution.replace(allow_cpu_ops=[]))
        report = session.explain(runs=1)
    found = {o.key: o for o in report.deviations}
    assert {"execution.device", "execution.allow_cpu_ops"} <= set(found)
    assert found["execution.device"].reason == "not on npu: 'celu' (Celu, cpu, fp32)"
    assert not report.honoured


def test_fp32_asked_and_fp16_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.json"
    execution = {"engine": "qnn", "device": "npu", "precision": "fp32", **chip()["execution"]}
    policy.write_text(json.dumps({"execution": execution}))
    assert run(["explain", str(unary("Relu", tmp_path)), "--policy", str(policy)]) == 1
    first, *rest = capfd.readouterr().out.splitlines()
    assert first.startswith("1 deviation")
    assert any("fp16 (3 of" in line for line in rest)
