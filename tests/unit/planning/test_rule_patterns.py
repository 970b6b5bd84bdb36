# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernel rules that name nodes which the model does not have."""

from __future__ import annotations

from typing import Any

import pytest

import xpuruntime as xrt

pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("rule", [{"precision": "fp32"}, {"use": "cpu"}])
def test_a_rule_that_names_no_node_is_told(rule: dict[str, str]) -> None:
    rules = [{"match": {"node": "fcc1"}, **rule}, {"match": {"node": "fc*"}, "precision": "fp32"}]
    execution = {"precision": "fp16", "device": "cpu", "engine": "onnxruntime"}
    policy: dict[str, Any] = {"execution": execution, "kernels": {"rules": rules}}
    plan = xrt.plan(xrt.demo_model_path(), policy=policy)
    wrong, right = plan.control("kernels.rules[0]"), plan.control("kernels.rules[1]")
    assert wrong is not None
    assert right is not None
    assert wrong.enforceability == "unsupported"
    assert wrong.reason == "the pattern 'fcc1' names no node of the model; did you mean 'fc1'?"
    assert right.enforceability == "enforced"
    assert any("kernels.rules[0]" in line and "correct match.node" in line for line in plan.warnings)
    with pytest.raises(xrt.UnsupportedOperationError, match="names no node"):
        xrt.plan(xrt.demo_model_path(), policy={"mode": "strict", **policy})
