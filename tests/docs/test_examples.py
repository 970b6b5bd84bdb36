# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Run the examples as a user would, and load the example policies."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from docs_blocks import NEEDS

import xpuruntime as xrt
from xpuruntime.demo import demo_images, demo_model_path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
POLICIES = sorted((ROOT / "examples" / "policies").glob("*.yaml"))
#: What an example must print.
EXPECTED = {
    "inference_basic.py": "99.7% of 360 images recognized",
    "kernel_policy.py": "kernels.matmul = cublasLt: unsupported",
    "plan_only.py": "onnxruntime on cpu",
    "capture_training_step.py": "cuda:0: captured" if NEEDS["cuda"][0]() else "the CPU has no CUDA graphs",
    "explain_training.py": "covered: ",
    "generate.py": "pass: 96 next tokens of 8 texts",
    "train_under_policy.py": "scaled_dot_product_attention, asked flash_v2, ran torch.flash: honoured",
    "all_reduce.py": "nothing to add up" if not NEEDS["cuda"][0]() else "ranks, sum",
    "bind_buffers.py": "359 of 360 images recognized",
    "explain.py": "policy honoured",
    "compare_engines.py": "first node that differs: conv1",
    "compile_once.py": "99.7% recognized by onnxruntime, compiled before",
    "int8_calibration.py": "recognized in int8",
    "openvino_async.py": "359 of 360 images recognized",
    "pinned_kernels.py": "fc1, relu4: cpu.blas",
    "torch_program.py": "same answer: True",
}
#: What an example needs that may not be here.
NEEDED = {
    "openvino_async.py": "openvino",
    "torch_program.py": "torch",
    "capture_training_step.py": "torch",
    "explain_training.py": "torch",
    "generate.py": "transformers",
    "train_under_policy.py": "torch",
}
#: Policies for operations of PyTorch in training, which no engine is chosen by.
TRAINING = {"pytorch_training.yaml"}
#: Which engine and device each policy leads to on a machine that has all of them; the two for NPUs need calibration.
CHOSEN = {
    "cpu_fp32_strict.yaml": "onnxruntime@cpu",
    "cpu_openvino.yaml": "openvino@cpu",
    "cpu_pinned_kernels.yaml": "onnxruntime@cpu",
    "cuda_fp16.yaml": "onnxruntime@cuda:0",
    "npu_openvino.yaml": "openvino@npu",
    "npu_qnn.yaml": "qnn@npu",
    "tensorrt_fp16.yaml": "tensorrt@cuda:0",
    "tensorrt_rtx_ahead_of_time.yaml": "tensorrt-rtx@cuda:0",
}


def machine_of_all_engines() -> Any:
    """Return the machine that the tables of engines are made for."""
    spec = importlib.util.spec_from_file_location("engine_tables", ROOT / "tools" / "engine_tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    return tables.MACHINE


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.name != "train_digits.py"], ids=lambda p: p.name)
def test_example_runs(path: Path, tmp_path: Path):
    need = NEEDED.get(path.name)
    if need is not None and not NEEDS[need][0]():
        pytest.skip(NEEDS[need][1])
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


def test_every_example_is_listed():
    listed = re.findall(r"^\| `([\w./]+)` \|", (ROOT / "examples" / "README.md").read_text(encoding="utf-8"), re.M)
    there = [path.name for path in EXAMPLES] + [f"policies/{path.name}" for path in POLICIES]
    assert sorted(listed) == sorted([*there, "engine_plugin/", "kernel_plugin/"])


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
    assert _members(tmp_path / "digits_test.npz") == _members(shipped / "digits_test.npz")
    # Weights differ in the last bits between processors; what the script promises is the accuracy, which it checks.
    assert (tmp_path / "digits.onnx").stat().st_size == (shipped / "digits.onnx").stat().st_size


def _members(path: Path) -> dict[str, bytes]:
    """Return what an archive holds; its headers differ between versions of Python, as between 3.11.2 and 3.11.7."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("path", POLICIES, ids=lambda p: p.name)
def test_policy_loads_and_keeps_its_meaning(path: Path, tmp_path: Path):
    policy = xrt.Policy.load(path)
    assert policy.stated(), f"{path.name} states nothing"
    policy.save(tmp_path / "again.yaml")
    assert xrt.Policy.load(tmp_path / "again.yaml") == policy


@pytest.mark.filterwarnings("ignore::xpuruntime.XpuRuntimeWarning")
@pytest.mark.parametrize("path", [p for p in POLICIES if p.name not in TRAINING], ids=lambda p: p.name)
def test_policy_is_planned_where_there_is_everything(path: Path, monkeypatch: pytest.MonkeyPatch):
    calibration = demo_images()[0][:2] if path.name.startswith("npu") else None
    plan = xrt.plan(demo_model_path(), policy=path, calibration=calibration, machine=machine_of_all_engines())
    assert plan.candidate == CHOSEN[path.name]
    assert not [control for control in plan.controls if control.enforceability == "unsupported"]


def test_cpu_policy_is_enforced_key_by_key():
    plan = xrt.plan(demo_model_path(), policy=ROOT / "examples/policies/cpu_fp32_strict.yaml")
    assert (plan.engine, plan.device) == ("onnxruntime", "cpu")
    assert {c.key: c.enforceability for c in plan.controls if c.enforceability != "enforced"} == {}


def test_npu_policy_is_refused_with_a_reason():
    with pytest.raises(xrt.XpuRuntimeError, match="openvino"):
        xrt.plan(demo_model_path(), policy=ROOT / "examples/policies/npu_openvino.yaml")
