# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Policies on a CUDA device: what is asked is done or said, and what ran is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from session_work import SLEEP_CYCLES, close, reference

import xpuruntime as xrt
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cuda_onnxruntime

torch = pytest.importorskip("torch")
cupy = pytest.importorskip("cupy")


def test_island_is_refused_and_named(tmp_path: Path) -> None:
    path = models.save(models.island(), tmp_path)
    with pytest.raises(xrt.UnsupportedOperationError, match=r"unique \(Unique\).*allow_cpu_ops: \[Unique"):
        xrt.InferenceSession(path, device="cuda:0")
    allowed = {"execution": {"device": "cuda:0", "allow_cpu_ops": ["Unique"]}}
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    with xrt.InferenceSession(path, policy=allowed) as session:
        close(session.run({"x": x})["y"], reference(path, x), rtol=1e-3, atol=1e-3)
        report = session.explain({"x": x}, runs=1)
        assert any(b.kind == "cpu_island" for b in report.boundaries), report
    graph = {"execution": {**allowed["execution"], "cuda_graph": "require"}}
    with pytest.raises(xrt.XpuRuntimeError, match="graph"):
        xrt.InferenceSession(path, policy=graph)
    graph["execution"]["cuda_graph"] = "prefer"
    with pytest.warns(xrt.XpuRuntimeWarning, match="cuda_graph"):
        session = xrt.InferenceSession(path, policy=graph)
    assert any("CUDA graphs are off" in c.what for c in session.explain(runs=1).conversions)
    session.close()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("build", [models.mlp, models.conv], ids=["mlp", "conv"])
def test_converted_precision(tmp_path: Path, precision: str, build: Any) -> None:
    path = models.save(build(), tmp_path)
    shape = (4, 64) if build is models.mlp else (4, 3, 32, 32)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    with (
        xrt.InferenceSession(path, device="cpu") as plain,
        xrt.InferenceSession(path, device="cuda:0", precision=precision) as session,
    ):
        (want,), (got,) = plain.run({"x": x}).values(), session.run({"x": x}).values()
        assert got.dtype == np.float32
        error = np.abs(got - want).max() / np.abs(want).max()
        assert 1e-6 < error < (5e-3 if precision == "fp16" else 5e-2), error
        report = session.explain({"x": x}, runs=1)
        assert any(unit.precision_run == precision for unit in report.units), report


def test_attention_kernel_is_observed(tmp_path: Path) -> None:
    path = models.save(models.attention(), tmp_path)
    for family in ("flash_v2", "efficient", "cudnn", "math"):
        policy = {"execution": {"device": "cuda:0"}, "kernels": {"attention": family}}
        with pytest.warns(xrt.XpuRuntimeWarning) if family != "math" else _nothing():
            session = xrt.InferenceSession(path, policy=policy)
        report = session.explain(runs=2)
        session.close()
        seen = [unit.kernel for unit in report.units if unit.op == "MultiHeadAttention"]
        assert seen == [family], (family, seen)
        assert report.honoured, report


def test_attention_that_cannot_be_honoured_is_caught(tmp_path: Path) -> None:
    """Flash attention has no fp32 kernel: ONNX Runtime silently takes another one, and the report says so."""
    path = models.save(models.attention(half=False), tmp_path)
    policy = {"execution": {"device": "cuda:0"}, "kernels": {"attention": "flash_v2"}}
    with pytest.warns(xrt.XpuRuntimeWarning, match="attention"):
        session = xrt.InferenceSession(path, policy=policy)
    report = session.explain(runs=1)
    session.close()
    assert not report.honoured
    assert any(o.key == "kernels.attention" and o.status == "substituted" for o in report.observations), report


def test_tf32_is_off_for_fp32(wide: Path) -> None:
    x = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
    from onnx import numpy_helper

    a, b = (numpy_helper.to_array(w).astype(np.float64) for w in models.mlp(width=512).graph.initializer)
    exact = np.maximum(x.astype(np.float64) @ a, 0) @ b
    errors = {}
    for precision in ("fp32", "tf32"):
        with xrt.InferenceSession(wide, device="cuda:0", precision=precision) as session:
            errors[precision] = np.abs(session.run({"x": x})["y"] - exact).max() / np.abs(exact).max()
            report = session.explain({"x": x}, runs=1)
            assert report.honoured, report
    assert errors["fp32"] < 2e-6 < errors["tf32"], errors


def test_nhwc_is_seen(tmp_path: Path) -> None:
    path = models.save(models.conv(), tmp_path)
    policy = {
        "execution": {"device": "cuda:0", "layout": "nhwc", "precision": "fp32"},
        "kernels": {"conv": "cudnn_exhaustive"},
    }
    x = np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32)
    with xrt.InferenceSession(path, policy=policy) as session, xrt.InferenceSession(path, device="cpu") as plain:
        close(session.run({"x": x})["logits"], plain.run({"x": x})["logits"], rtol=1e-3, atol=1e-4)
        report = session.explain({"x": x}, runs=1)
    assert any(unit.layout == "nhwc" for unit in report.units if unit.op == "Conv"), report
    assert report.honoured, report


@pytest.mark.parametrize("pool", ["engine", "caching", "direct"])
def test_out_of_memory_leaves_the_session_working(wide: Path, pool: str) -> None:
    memory: dict[str, Any] = {"pool": pool, "limit": "64MiB"}
    with xrt.InferenceSession(wide, policy={"execution": {"device": "cuda:0", "memory": memory}}) as session:
        big = torch.zeros(200_000, 512, device="cuda")
        with pytest.raises(MemoryError) as caught:
            session.run({"x": big})
        assert isinstance(caught.value, xrt.OutOfMemoryError)
        assert session.run({"x": big[:4]})["y"].shape == (4, 512)
        if pool != "engine":
            assert session.memory()["engine"] > 0


def test_our_pool_serves_the_session(wide: Path) -> None:
    """Weights, scratch and outputs come from a pool that the memory report names; all of it goes back."""
    manager = xrt.MemoryManager.instance()
    policy = {"execution": {"device": "cuda:0", "memory": {"pool": "caching"}}}
    weights = 2 * 512 * 512 * 4
    side = torch.cuda.Stream()
    with xrt.InferenceSession(wide, policy=policy) as session:
        pool = [pool for pool in manager.pools("cuda:0") if pool.name == "session model.onnx"][-1]
        x = torch.zeros(64, 512, device="cuda")
        fresh = torch.randn_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            x.copy_(fresh)
            y = session.run({"x": x})["y"]
            close(y.cpu(), reference(wide, fresh.cpu().numpy()), rtol=1e-2, atol=1e-2)
        assert pool.stats().current >= weights + y.nbytes
        assert session.memory()["engine"] >= weights
    del y, session
    torch.cuda.synchronize()
    assert pool.stats().current == 0


@pytest.mark.parametrize("memory", [{"pool": "driver"}, {"pool": "caching", "graph": True}])
def test_pools_that_cannot_serve_are_said(wide: Path, memory: dict[str, Any]) -> None:
    execution: dict[str, Any] = {"device": "cuda:0", "memory": {"pool": memory["pool"]}}
    if memory.get("graph"):
        execution["cuda_graph"] = "require"
    with pytest.warns(xrt.XpuRuntimeWarning, match=r"execution\.memory\.pool"):
        session = xrt.InferenceSession(wide, policy={"execution": execution})
    assert session.plan.control("execution.memory.pool").enforceability == "unsupported"
    assert session.run({"x": np.ones((1, 512), np.float32)})["y"].shape == (1, 512)
    session.close()


class _nothing:  # noqa: N801 - reads as a function
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None
