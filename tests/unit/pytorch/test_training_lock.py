# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Locks of training steps: their kernels are replayed, and what drifts is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import xpuruntime as xrt
from xpuruntime.lockfile.canonical import load_lock, save_lock
from xpuruntime.lockfile.records import Identity, Lock
from xpuruntime.runtime.machine import CudaFacts

torch = pytest.importorskip("torch")

import xpuruntime.pytorch as xt  # noqa: E402 - it needs PyTorch
from xpuruntime.pytorch import training_lock  # noqa: E402
from xpuruntime.pytorch.explanation.explanation import Explanation, ExplanationData  # noqa: E402


def step(seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    net(torch.randn(3, 8)).square().sum().backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def locked(path: Path, matmul: str = "cpu.blas") -> Lock:
    with xt.kernel_policy(matmul=matmul), xt.explain() as report:
        step()
    return xt.lock(report, path)


def test_a_step_is_replayed(tmp_path: Path) -> None:
    made = locked(tmp_path / "step.lock")
    phases = {(call.module, call.phase) for call in made.identity.calls}
    assert {("0", "train"), ("2", "train"), ("0", "backward"), ("2", "backward")} <= phases
    assert {call.kernel for call in made.identity.calls} == {"cpu.blas"}
    with xt.kernel_policy(matmul="cpu.blas"):
        expected = step()
    with xt.kernel_policy(lock=tmp_path / "step.lock"), xt.explain() as report:
        grads = step()
    assert all(torch.equal(grad, other) for grad, other in zip(grads, expected, strict=True))
    rows = [row for row in report.rows if row.op == "matmul"]
    assert rows
    assert all(row.source.startswith("kernels.rules[") and row.resolved == "cpu.blas" for row in rows)


def test_a_step_under_the_lock_holds(tmp_path: Path) -> None:
    path = tmp_path / "step.lock"
    first = locked(path)
    before = path.read_bytes()
    with xt.kernel_policy(lock=path), xt.explain() as report:
        step()
    assert xt.lock(report, path).digest == first.digest
    assert path.read_bytes() == before
    with xt.kernel_policy(lock=path), xt.explain() as report:
        torch.mm(torch.ones(2, 3), torch.ones(3, 2))
    with pytest.raises(xrt.LockError, match=r"gone matmul"):
        xt.lock(report, path)


def net(*names: str, width: int = 8, kind: type[torch.nn.Module] = torch.nn.Sequential) -> torch.nn.Module:
    made = kind()
    for name in names:
        made.add_module(name, torch.nn.Linear(width, width))
    return made


class Other(torch.nn.Sequential):
    """Modules with the paths of another class."""


@pytest.mark.parametrize(
    ("other", "holds"),
    [
        (lambda: net("up", "down"), True),
        (lambda: net("up", "down", width=16), False),
        (lambda: net("up", "down", "extra"), False),
        (lambda: net("up", "down", kind=Other), False),
    ],
    ids=["the same", "wider", "deeper", "another class"],
)
def test_a_lock_of_another_model_is_refused_with_both_named(tmp_path: Path, other: Any, holds: bool) -> None:
    path = tmp_path / "step.lock"

    def explained(model: torch.nn.Module, **policy: Any) -> Explanation:
        width = next(model.parameters()).shape[1]
        with xt.kernel_policy(root=model, **policy), xt.explain(root=model) as found:
            model(torch.ones(4, width)).sum().backward()
        return found

    first = explained(net("up", "down"), matmul="cpu.blas")
    xt.lock(first, path)
    found = explained(other(), lock=path)
    if holds:
        assert found.require() is found
        assert xt.lock(found, path).digest
        return
    assert found.model != first.model
    for call in (found.require, lambda: xt.lock(found, path)):
        with pytest.raises(xrt.XpuRuntimeError) as error:
            call()
        assert f"the lock {path} does not hold: it is of {first.model}, and {found.model} ran" in str(error.value)


def test_explain_takes_the_root_first_and_tells_where_rows_are() -> None:
    model = net("up")
    with xt.kernel_policy(matmul="cpu.blas", root=None), xt.explain(model) as found:
        model(torch.ones(2, 8))
    assert found.model.startswith("Sequential with 72 parameters")
    with pytest.raises(AttributeError, match=r"Fix: with explain\(\) as found: ...; found.rows"):
        _ = xt.explain().rows


def test_locking_twice_gives_the_same_identity(tmp_path: Path) -> None:
    first = locked(tmp_path / "step.lock")
    before = (tmp_path / "step.lock").read_bytes()
    assert locked(tmp_path / "step.lock").digest == first.digest
    assert (tmp_path / "step.lock").read_bytes() == before


def test_other_kernels_are_named_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "step.lock"
    locked(path)
    before = path.read_bytes()
    with pytest.raises(xrt.LockError, match=r"kernel matmul fp32 .*expected cpu\.blas, found cpu\.reference") as caught:
        locked(path, "cpu.reference")
    assert "upgrade=True" in str(caught.value)
    assert "xrt lock" not in str(caught.value)
    assert path.read_bytes() == before
    with xt.kernel_policy(matmul="cpu.reference"), xt.explain() as report:
        step()
    xt.lock(report, path, upgrade=True)
    assert {call.kernel for call in load_lock(path).identity.calls} == {"cpu.reference"}


@pytest.mark.parametrize("kind", ["engine", "library", "device", "kernel_source", "cpu_isa", "package", "environment"])
def test_validators(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "step.lock"
    identity = locked(path).identity
    one = next(validator for validator in identity.validators if validator.kind == kind)
    other_values: dict[type, Any] = {list: ["other"], str: "other"}
    name = "OMP_SCHEDULE" if kind == "environment" else "version"
    expect = {**one.expect, name: "0.9"} if isinstance(one.expect, dict) else other_values[type(one.expect)]
    other = msgspec.structs.replace(one, expect=expect)
    edited = tuple(other if validator is one else validator for validator in identity.validators)
    save_lock(Lock.of(msgspec.structs.replace(identity, validators=edited)), path)
    with pytest.raises(xrt.LockError) as refused:
        xt.kernel_policy(lock=path)
    (drift,) = refused.value.drifts
    assert (drift.code, drift.validator) == (kind, one.id)
    assert list(drift.entries) == [call.name for call in identity.calls]


def kinds(lock: Lock, kind: str) -> dict[str, Any]:
    return {validator.key: validator.expect for validator in lock.identity.validators if validator.kind == kind}


def test_a_compiled_step_depends_on_what_compiled_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, compiler = tmp_path / "step.lock", tmp_path / "c++"
    with xt.kernel_policy(matmul="cpu.blas"), xt.explain() as report:
        torch.compile(lambda x: torch.mm(x, x).relu() + 1)(torch.ones(3, 3))
    assert list(kinds(xt.lock(report, path), "compiler")) == ["CXX"]
    xt.kernel_policy(lock=path)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    xt.kernel_policy(lock=path)
    compiler.write_text("#!/bin/sh\necho my compiler 1.0\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG", "1")
    with pytest.raises(xrt.LockError) as refused:
        xt.kernel_policy(lock=path)
    assert {(drift.code, drift.after) for drift in refused.value.drifts} == {
        ("compiler", "my compiler 1.0"), ("environment", "TORCHINDUCTOR_CPP_ENABLE_UNSAFE_MATH_OPT_FLAG 1"),
    }  # fmt: skip


def test_an_eager_step_depends_on_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.lock"
    assert not kinds(locked(path), "compiler")
    for name in ("CXX", "CC", "TORCHINDUCTOR_MAX_AUTOTUNE", "TRITON_PTXAS_PATH"):
        monkeypatch.setenv(name, "1")
    xt.kernel_policy(lock=path)


def test_kernels_of_triton_are_compiled() -> None:
    """What `explain` finds on a device, in the place of one."""
    with xt.kernel_policy(matmul="cpu.blas"), xt.explain() as report:
        step()
    row = msgspec.structs.replace(report.rows[0], op="", operator="triton_poi_fused_relu_0", resolved="")
    explanation = Explanation()
    explanation.finish(
        ExplanationData(
            rows=(*report.rows, row), time_kind="cpu", overhead_us=0.0, policy=report.policy, notes=(), partial=False
        )
    )
    assert list(kinds(xt.lock(explanation), "compiler")) == ["CXX"]


def test_what_cannot_be_locked(tmp_path: Path) -> None:
    with xt.explain() as report:
        step()
    with pytest.raises(xrt.InputError, match="no policy held"):
        xt.lock(report)
    with pytest.raises(TypeError, match="found is a dict: give what `with explain"):
        xt.lock({"rows": []})
    save_lock(Lock.of(Identity(subject="export")), tmp_path / "other.lock")
    with pytest.raises(xrt.LockError, match="lock of export"):
        xt.kernel_policy(lock=tmp_path / "other.lock")
    with pytest.raises(xrt.PolicyError, match="a lock contains a policy"):
        xt.kernel_policy(matmul="cpu.blas", lock=tmp_path / "other.lock")


PLUGIN = """
import numpy as np
from xpuruntime.ops import plugins

class Halved(plugins.PythonKernel):
    id, op, description, limits = "halving.rms_norm", "rms_norm", "half of the norm", "fp32"

    def supports(self, op):
        return not {"sum", "residual"} & set(op["operands"]), "only plain norms"

    def prepare(self, op, config):
        def run(operands, stream):
            x = operands["x"].numpy()
            squares = (x * x).mean(axis=1, keepdims=True)
            operands["y"].numpy()[...] = 0.5 * x / np.sqrt(squares + op["attributes"]["epsilon"])
        return run

def register():
    plugins.register(plugins.KernelBackend("halving", "cpu", version="1.0"), Halved())
"""
PROGRAM = """
import sys, torch, xpuruntime as xrt, xpuruntime.pytorch as xt
policy = {"lock": sys.argv[1]} if sys.argv[2] == "use" else {"rms_norm": "halving.rms_norm"}
with torch.no_grad(), xt.kernel_policy(**policy), xt.explain() as found:
    torch.nn.functional.rms_norm(torch.ones(2, 8), (8,))
if sys.argv[2] == "make":
    xt.lock(found, sys.argv[1])
"""


def test_a_plugin_whose_code_changed(tmp_path: Path) -> None:
    """Its version, its package and its code are a validator."""

    def program(what: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "XPURUNTIME_TUNING_CACHE": "off"}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "step.lock"), what]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False).stderr

    facts = tmp_path / "halving-1.5.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: halving\nVersion: 1.5\n")
    (facts / "entry_points.txt").write_text("[xpuruntime.kernels]\nhalving = halving:register\n")
    code = tmp_path / "halving.py"
    code.write_text(PLUGIN)
    assert "Error" not in program("make")
    (source,) = (
        validator
        for validator in load_lock(tmp_path / "step.lock").identity.validators
        if validator.kind == "kernel_source"
    )
    assert (source.key, source.expect["version"], source.expect["package"]) == ("halving", "1.0", "halving==1.5")
    code.write_text(PLUGIN.replace("0.5", "0.7"))
    refused = program("use")
    assert "LockError" in refused
    assert "kernel_source halving: expected code sha256" in refused
    assert "pip install halving==1.5" in refused
    code.write_text(PLUGIN)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: halving\nVersion: 1.6\n")
    assert "expected package halving==1.5, found package halving==1.6" in program("use")


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100"])
def test_a_lock_of_a_rank_holds_on_the_device_of_another(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {
        "compute_capability": (9, 0), "total_memory": 1 << 37, "sm_count": 132, "driver_version": (13, 0),
        "runtime_version": (13, 0), "pci_id": "0",
    }  # fmt: skip
    devices = (CudaFacts(index=0, name="NVIDIA H200", **facts), CudaFacts(index=1, name=name, **facts))
    machine = msgspec.structs.replace(training_lock.machine_snapshot(), cuda=devices)
    monkeypatch.setattr(training_lock, "machine_snapshot", lambda: machine)
    with xt.kernel_policy(matmul="cpu.blas"), xt.explain() as report:
        step()

    def on(device: str) -> Explanation:
        moved = Explanation()
        rows = tuple(msgspec.structs.replace(row, device=device) for row in report.rows)
        moved.finish(msgspec.structs.replace(report._get(), rows=rows))
        return moved

    path = tmp_path / "step.lock"
    first = xt.lock(on("cuda:0"), path)
    if name == "NVIDIA H200":
        assert xt.lock(on("cuda:1"), path).digest == first.digest
    else:
        with pytest.raises(xrt.LockError, match="NVIDIA H100"):
            xt.lock(on("cuda:1"), path)
