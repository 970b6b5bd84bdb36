# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Run the examples as a user would, and load the example policies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import xpuruntime as xrt
from xpuruntime.demo import demo_model_path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
POLICIES = sorted((ROOT / "examples" / "policies").glob("*.yaml"))
#: What an example must print.
EXPECTED = {
    "inference_basic.py": "99.7% of 360 images recognised",
    "kernel_policy.py": "kernels.matmul = cublasLt: unsupported",
    "plan_only.py": "onnxruntime on cpu",
    "bind_buffers.py": "359 of 360 images recognised",
    "explain.py": "policy honoured",
}


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.name != "train_digits.py"], ids=lambda p: p.name)
def test_example_runs(path: Path, tmp_path: Path):
    warnings = "default" if path.name == "kernel_policy.py" else "error"
    done = subprocess.run(
        [sys.executable, "-W", warnings, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[path.name] in done.stdout


@pytest.mark.torch
@pytest.mark.slow
def test_training_reproduces_the_shipped_model(tmp_path: Path):
    pytest.importorskip("torch", reason="training the digits model needs PyTorch")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_digits.py"), "--out", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shipped = demo_model_path().parent
    assert (tmp_path / "digits_test.npz").read_bytes() == (shipped / "digits_test.npz").read_bytes()
    # Weights differ in the last bits between processors; what the script promises is the accuracy, which it checks.
    assert (tmp_path / "digits.onnx").stat().st_size == (shipped / "digits.onnx").stat().st_size


@pytest.mark.parametrize("path", POLICIES, ids=lambda p: p.name)
def test_policy_loads_and_keeps_its_meaning(path: Path, tmp_path: Path):
    policy = xrt.Policy.load(path)
    assert policy.stated(), f"{path.name} states nothing"
    policy.save(tmp_path / "again.yaml")
    assert xrt.Policy.load(tmp_path / "again.yaml") == policy


def test_cpu_policy_is_enforced_key_by_key():
    plan = xrt.plan(demo_model_path(), policy=ROOT / "examples/policies/cpu_fp32_strict.yaml")
    assert (plan.engine, plan.device) == ("onnxruntime", "cpu")
    assert {c.key: c.enforceability for c in plan.controls if c.enforceability != "enforced"} == {}


def test_npu_policy_is_refused_with_a_reason():
    with pytest.raises(xrt.XpuRuntimeError, match="openvino"):
        xrt.plan(demo_model_path(), policy=ROOT / "examples/policies/npu_openvino.yaml")
