# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Something else is made to run on a CUDA device than was asked: the report says so, key by key."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

ORT = {"engine": "onnxruntime", "device": "cuda:0"}
TORCH = {"engine": "torch", "device": "cuda:0"}


def statuses(report: xrt.Report) -> dict[str, str]:
    return {observation.key: observation.status for observation in report.observations}


def with_options(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Have ONNX Runtime opened with other provider options than the plan's."""
    from xpuruntime.engines.onnxruntime import opening

    real = opening._construct

    def construct(settings: Any, source: Any, options: Any) -> Any:
        other = msgspec.structs.replace(settings, options={**settings.options, **changed})
        return real(other, source, options)

    monkeypatch.setattr(opening, "_construct", construct)


def explained(path: Path, execution: dict[str, Any]) -> xrt.Report:
    with xrt.InferenceSession(path, policy={"execution": execution}) as session:
        return session.explain(runs=1)


@pytest.mark.cuda_onnxruntime
def test_tf32_left_on_in_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.save(models.mlp(), tmp_path)
    asked = {**ORT, "precision": "fp32", "tf32": False}
    assert explained(path, asked).honoured
    with_options(monkeypatch, use_tf32="1")
    report = explained(path, asked)
    assert not report.honoured
    found = statuses(report)
    assert (found["execution.tf32"], found["execution.precision"]) == ("substituted", "substituted")


@pytest.mark.cuda_onnxruntime
def test_fp16_asked_and_fp32_run_in_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xpuruntime.engines.onnxruntime import loading

    path = models.save(models.mlp(), tmp_path)
    asked = {**ORT, "precision": "fp16"}
    assert explained(path, asked).honoured
    real = loading.prepare_source
    monkeypatch.setattr(loading, "prepare_source", lambda *args, **more: real(*args, **{**more, "convert": None}))
    report = explained(path, asked)
    assert statuses(report)["execution.precision"] == "substituted"
    assert {unit.precision_run for unit in report.units if unit.precision_requested == "fp16"} == {"fp32"}


@pytest.mark.cuda_onnxruntime
def test_a_node_on_the_cpu_in_a_plan_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xpuruntime.engines.onnxruntime import loading

    path = models.save(models.island(), tmp_path)
    real = loading.open_session

    def open_session(settings: Any, *more: Any) -> Any:
        return real(msgspec.structs.replace(settings, allow_cpu_ops=("Unique",)), *more)

    monkeypatch.setattr(loading, "open_session", open_session)
    report = explained(path, ORT)
    assert statuses(report)["execution.device"] == "substituted"
    (unit,) = (unit for unit in report.units if unit.op == "Unique")
    assert (unit.device, unit.status) == ("cpu", "substituted")


@pytest.fixture
def half(tmp_path: Path) -> tuple[Path, Any]:
    """Write a program with one attention and one product in it."""

    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x) @ x.transpose(-1, -2)

    x = torch.zeros(1, 4, 128, 64)
    torch.export.save(torch.export.export(Net().eval(), (x,)), tmp_path / "net.pt2")
    return tmp_path / "net.pt2", np.random.default_rng(0).standard_normal((1, 4, 128, 64)).astype(np.float32)


@pytest.mark.parametrize("switch", ["matmul", "cudnn"])
def test_tf32_left_on_in_pytorch(half: tuple[Path, Any], switch: str) -> None:
    path, x = half
    policy = {"execution": {**TORCH, "precision": "fp32", "tf32": False}}
    where = torch.backends.cuda.matmul if switch == "matmul" else torch.backends.cudnn
    with xrt.InferenceSession(path, policy=policy) as session:
        assert session.explain({"x": x}, runs=1).honoured
        where.allow_tf32 = True
        try:
            report = session.explain({"x": x}, runs=1)
        finally:
            where.allow_tf32 = False
    found = {observation.key: (observation.status, observation.observed) for observation in report.observations}
    assert found["execution.tf32"] == ("substituted", f"{switch}.allow_tf32=true")
    assert found["execution.precision"][0] == "substituted"


def test_fp16_asked_and_fp32_run_in_pytorch(half: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from xpuruntime.engines.torch.observing import instrumented_run as stepping

    monkeypatch.setattr(stepping, "_inside", lambda _, tensors: list(tensors))
    path, x = half
    with xrt.InferenceSession(path, policy={"execution": {**TORCH, "precision": "fp16"}}) as session:
        report = session.explain({"x": x}, runs=1)
    assert statuses(report)["execution.precision"] == "substituted"


def test_cudnn_where_flash_was_pinned(half: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from xpuruntime.pytorch.attention import sdpa_backends
    from xpuruntime.pytorch.dispatch.overrides import attention

    path, x = half
    policy = {"execution": {**TORCH, "precision": "fp16"}, "kernels": {"attention": "torch.flash"}}
    with xrt.InferenceSession(path, policy=policy) as session:
        report = session.explain({"x": x}, runs=2)
        assert statuses(report)["kernels.attention"] == "honoured"
        (decision,) = report.decisions
        assert (decision.chosen, decision.source, decision.count) == ("torch.flash", "pinned", 2)

    real = sdpa_backends.by_backend

    @contextmanager
    def changed_behind(kernel: str, **options: bool) -> Iterator[None]:
        with real(kernel, **options):
            torch.backends.cuda.enable_flash_sdp(False)
            torch.backends.cuda.enable_cudnn_sdp(True)
            yield
            torch.backends.cuda.enable_flash_sdp(True)
            torch.backends.cuda.enable_cudnn_sdp(False)

    monkeypatch.setattr(attention, "by_backend", changed_behind)
    with xrt.InferenceSession(path, policy=policy) as session:
        report = session.explain({"x": x}, runs=2)
    (seen,) = (observation for observation in report.observations if observation.key == "kernels.attention")
    assert (seen.status, seen.observed) == ("substituted", "torch.cudnn (1 operator)")
    (decision,) = report.decisions
    assert (decision.asked, decision.chosen, decision.source) == (("torch.flash",), "torch.cudnn", "fallback")


def test_kernels_of_ours_are_told_with_their_reasons(half: tuple[Path, Any]) -> None:
    path, x = half
    kernels = {"matmul": ["cpu.blas", "cublas.cublasLt"], "attention": "cuda_raw.flash_attention_v2"}
    policy = {"execution": {**TORCH, "precision": "fp16"}, "kernels": kernels}
    with xrt.InferenceSession(path, policy=policy) as session:
        for _ in range(3):
            report = session.explain({"x": x}, runs=3)
            told = {decision.op: decision for decision in report.decisions}
            assert told["matmul"].chosen == "cublas.cublasLt"
            assert told["attention"].chosen == "cuda_raw.flash_attention_v2"
            assert {one.count for one in told.values()} == {3}
            refused = {candidate.id: candidate for candidate in told["matmul"].candidates}["cpu.blas"]
            assert (refused.accepted, bool(refused.reason)) == (False, True)
    assert not any("#" in decision.node for decision in xrt.decisions())
