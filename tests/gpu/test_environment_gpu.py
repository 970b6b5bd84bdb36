# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The snapshot, the doctor, the library loader and the command line on a machine with a CUDA device."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from xpuruntime.demo import demo_model_path
from xpuruntime.engines.registry import default_registry
from xpuruntime.runtime.doctor import diagnose
from xpuruntime.runtime.snapshot import machine_from_json, machine_snapshot, machine_to_json

CALL = [sys.executable, "-c", "from xpuruntime.cli import main; main()"]


def xrt(*arguments: str) -> tuple[int, Any, str]:
    done = subprocess.run([*CALL, *arguments, "--json"], capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_the_snapshot_has_the_device_and_survives_json() -> None:
    machine = machine_snapshot(default_registry().engines())
    assert machine.core_cuda
    assert machine.cuda_reason is None
    device = machine.cuda[0]
    assert device.index == 0
    assert device.compute_capability >= (7, 0)
    assert device.total_memory > 1 << 30
    assert device.sm_count > 0
    assert "fp32" in device.dtypes
    assert machine_from_json(machine_to_json(machine)) == machine


def test_the_doctor_sees_driver_and_libraries() -> None:
    diagnosis = diagnose(default_registry().engines())
    facts = diagnosis.facts
    assert facts.driver.library is not None
    assert facts.driver.cuda is not None
    assert facts.driver.cuda >= facts.machine.cuda[0].runtime_version or facts.driver.cuda[0] >= 13
    found = {finding.code for finding in diagnosis.findings if finding.severity == "error"}
    assert not {code for code in found if code.startswith(("driver_", "library_", "cuda_", "core_", "provider_"))}, (
        found
    )
    assert any(library.name.startswith("libcuda.so") for library in facts.loaded)


@pytest.mark.cuda_onnxruntime
def test_the_libraries_a_session_loaded_are_listed_once() -> None:
    code = (
        "import msgspec, numpy as np, xpuruntime as xrt;"
        "from xpuruntime.demo import demo_model_path;"
        "from xpuruntime.runtime.libraries.loading import loaded_libraries;"
        "s = xrt.InferenceSession(demo_model_path(), device='cuda:0');"
        "s.run({'image': np.zeros((1, 1, 8, 8), np.float32)});"
        "print(msgspec.json.encode(loaded_libraries()).decode())"
    )
    loaded = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    for stem in ("libcublasLt", "libcudnn", "libonnxruntime_providers_cuda"):
        copies = [library for library in loaded if library["name"].split(".so")[0] == stem]
        assert len(copies) == 1, (stem, copies)


@pytest.mark.cuda_onnxruntime
def test_plan_takes_the_device_by_itself() -> None:
    code, plan, err = xrt("plan", str(demo_model_path()))
    assert code == 0, err
    assert plan["device"] == "cuda:0"
    code, error, _ = xrt("plan", str(demo_model_path()), "--device", "cuda:99")
    assert code == 3
    assert "this machine has cuda:0" in error["error"]["message"]


@pytest.mark.cuda_onnxruntime
def test_bench_times_host_arrays_device_arrays_and_buffers() -> None:
    model = str(demo_model_path())
    code, found, err = xrt("bench", model, "--device", "cuda:0", "--dim", "N=8", "-n", "20", "--warmup", "5")
    assert code == 0, err
    assert list(found["latency"]) == ["run", "run_device", "bind"]
    assert all(row["min_us"] > 0 for row in found["latency"].values())


@pytest.mark.cuda_onnxruntime
def test_run_explain_and_demo() -> None:
    model = str(demo_model_path())
    code, found, err = xrt("run", model, "--device", "cuda:0")
    assert code == 0, err
    assert found["device"] == "cuda:0"
    code, report, err = xrt("explain", model, "--device", "cuda:0")
    assert code == 0, err
    assert report["honoured"] is True
    code, demo, err = xrt("demo", "--device", "cuda:0")
    assert code == 0, err
    assert demo["accuracy"] >= 0.98
