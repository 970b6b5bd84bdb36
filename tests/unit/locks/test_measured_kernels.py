# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Locks of policies that let kernels be measured: nothing is measured under the lock."""

from __future__ import annotations

from pathlib import Path

import pytest

import xpuruntime as xrt
from xpuruntime.lockfile.records import CallEntry
from xpuruntime.lockfile.rules import locked_policy
from xpuruntime.testing import models


def test_a_locked_policy_leaves_no_choice() -> None:
    policy = xrt.Policy.coerce(
        {
            "auto_strategy": "best_performance",
            "kernels": {
                "matmul": ["cpu.blas", "auto"],
                "layer_norm": "auto",
                "rules": [
                    {"match": {"node": "a"}, "use": "auto"},
                    {"match": {"node": "b"}, "use": "auto", "precision": "fp32"},
                    {"match": {"node": "c"}, "use": ["cpu.reference", "auto"]},
                ],
            },
        }
    )
    call = CallEntry(op="matmul", dtype="fp32", node="a", kernel="cpu.blas")
    kernels = locked_policy(policy, "onnxruntime", "cpu", (call,)).kernels
    assert kernels.auto_strategy == "first_supported"
    assert (kernels.matmul, kernels.layer_norm) == (("cpu.blas",), None)
    assert [(rule.match.node, rule.use, rule.precision) for rule in kernels.rules] == [
        ("a", "cpu.blas", None),
        ("b", None, "fp32"),
        ("c", ("cpu.reference",), None),
    ]


def test_the_first_that_works_is_no_measurement() -> None:
    policy = xrt.Policy.coerce({"kernels": {"matmul": "auto"}})
    assert locked_policy(policy, "onnxruntime", "cpu", ()).kernels.matmul == policy.kernels.matmul


def test_a_session_under_the_lock_runs_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XPURUNTIME_TUNING_CACHE", str(tmp_path / "tuning.json"))
    model, path = models.save(models.mlp(), tmp_path), tmp_path / "m.lock"
    policy = {
        "auto_strategy": "best_performance",
        "execution": {"engine": "onnxruntime", "device": "cpu"},
        "kernels": {"matmul": "auto"},
    }
    lock = xrt.lock(model, policy, path, shapes={"x": (2, 64)}).lock
    monkeypatch.setenv("XPURUNTIME_TUNING_CACHE", str(tmp_path / "empty.json"))
    with xrt.InferenceSession(model, lock=path) as session:
        report = session.explain()
    ran = {node: decision.kernel for decision in report.decisions for node in decision.nodes if decision.chosen}
    assert ran == {call.node: call.kernel for call in lock.identity.calls}
    assert not (tmp_path / "empty.json").exists()
