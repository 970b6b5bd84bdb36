# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Determinism grades in plans, and in reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import xpuruntime as xrt
from xpuruntime.policies.execution_policy import DETERMINISM_GRADES
from xpuruntime.testing import models

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = ("onnxruntime", "openvino", "qnn", "torch")


def planned(engine: str, grade: str, folder: Path) -> xrt.Plan:
    options = {"provider_options": {"qnn": {"soc": "sm8650"}}, "precision": "fp16"} if engine == "qnn" else {}
    policy = {"execution": {"determinism": grade, **options}}
    if engine == "torch":
        module = torch.nn.Linear(16, 16).eval()
        return xrt.plan(module, device="cpu", engine=engine, policy=policy, example_inputs=(torch.zeros(4, 16),))
    path = models.save(models.mlp(16, batch=4), folder)
    return xrt.plan(path, device="npu" if engine == "qnn" else "cpu", engine=engine, policy=policy)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("grade", DETERMINISM_GRADES[1:])
def test_no_engine_is_said_to_enforce_more_than_it_promises(engine: str, grade: str, tmp_path: Path) -> None:
    """PyTorch documents its deterministic algorithms for repeated runs; no engine documents anything beyond."""
    control = planned(engine, grade, tmp_path).control("execution.determinism")
    assert control is not None
    promised = engine == "torch" and grade == "run_to_run"
    assert control.enforceability == ("enforced" if promised else "advisory")
    assert ("xrt determinism" in control.reason) is (grade != "run_to_run")
    assert control.requested == grade


def test_a_setting_that_is_read_back_proves_no_grade_above_run_to_run() -> None:
    module = torch.nn.Linear(16, 16).eval()
    for grade, status in (("run_to_run", "honoured"), ("concurrency", "unobservable")):
        policy = xrt.ExecutionPolicy(determinism=grade)  # type: ignore[arg-type]
        if grade != "run_to_run":
            with pytest.warns(xrt.XpuRuntimeWarning, match="concurrency is not promised"):
                session = xrt.InferenceSession(
                    module, device="cpu", engine="torch", exec_policy=policy, example_inputs=(torch.zeros(4, 16),)
                )
        else:
            session = xrt.InferenceSession(
                module, device="cpu", engine="torch", exec_policy=policy, example_inputs=(torch.zeros(4, 16),)
            )
        with session:
            report = session.explain(runs=1)
        seen = next(observation for observation in report.observations if observation.key == "execution.determinism")
        assert seen.status == status, seen
