# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Evidence of rewritten models: checks at load, kernels by the dispatcher, verdicts by key."""

from __future__ import annotations

import gc
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from exported_models import exported
from rewriting_models import accounted, close, graph, normal, present, save, session, stock

import xpuruntime as xrt
from xpuruntime.engines.onnxruntime.observing.kernels import DecidedKernels
from xpuruntime.engines.onnxruntime.rewriting import graph_edit

W1, W2 = normal(6, 8), normal(8, 5, seed=1)


def mlp() -> Any:
    body = "a = MatMul(x, w1)\nr = Relu(a)\ny = MatMul(r, w2)"
    return graph("float[n, 6] x", "float[n, 5] y", body, {"w1": W1, "w2": W2})


def verdicts(report: Any) -> dict[str, str]:
    return {one.key: one.status for one in report.observations if one.key.startswith("kernels.")}


def observation(report: Any, key: str) -> Any:
    return next(one for one in report.observations if one.key == key)


def test_a_planted_wrong_pin_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher gets other rules than the policy's; its decisions then say that all is as asked."""
    real = graph_edit.session_rules

    def other(policy: Any, nodes: Any, *, strict: bool, log: Any = None) -> Any:
        return real(xrt.KernelPolicy(matmul="cpu.reference"), nodes, strict=strict, log=log)

    monkeypatch.setattr(graph_edit, "session_rules", other)
    with session(mlp(), tmp_path, kernels={"matmul": "cpu.blas"}) as opened:
        report = opened.explain({"x": normal(3, 6)}, runs=1)
    seen = observation(report, "kernels.matmul")
    assert seen.status == "substituted"
    assert seen.observed == "cpu.reference (2 nodes)"
    assert not report.honoured
    assert {unit.kernel for unit in report.units if unit.kernel} == {"cpu.reference"}


def test_a_record_that_was_dropped_is_not_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log holds the decision on one of two nodes, and counts one that it had no room for."""
    real = DecidedKernels._decisions

    def full(self: DecidedKernels) -> Any:
        made = real(self)
        self._log = SimpleNamespace(dropped=1)  # type: ignore[assignment]
        return {node: ones for node, ones in made.items() if node != "MatMul_y"}

    monkeypatch.setattr(DecidedKernels, "_decisions", full)
    with session(mlp(), tmp_path, kernels={"matmul": "cpu.blas"}) as opened:
        report = opened.explain({"x": normal(3, 6)}, runs=1)
    seen = observation(report, "kernels.matmul")
    assert (seen.observed, seen.status) == ("cpu.blas (1 node)", "unobservable")
    assert "'MatMul_y', was dropped" in seen.reason


def test_wrong_results_are_refused_at_load_and_the_node_is_named(tmp_path: Path) -> None:
    kernels = {"matmul": "cpu.blas", "rules": [{"match": {"op": "matmul", "node": "MatMul_y"}, "use": "null.null"}]}
    with pytest.raises(xrt.EngineError, match="The first node that differs is 'MatMul_y'") as refused:
        session(mlp(), tmp_path, kernels=kernels)
    assert "'y' is out of tolerance" in str(refused.value)
    first = {"matmul": "cpu.blas", "rules": [{"match": {"op": "matmul", "node": "MatMul_a"}, "use": "null.null"}]}
    with pytest.raises(xrt.EngineError, match="The first node that differs is 'MatMul_a'"):
        session(mlp(), tmp_path, kernels=first)


def test_what_was_compared_is_told(tmp_path: Path) -> None:
    with session(mlp(), tmp_path) as opened:
        report = opened.explain({"x": normal(3, 6)}, runs=1)
    lines = {conversion.what: conversion.reason for conversion in report.conversions}
    assert "outputs agree" in lines["the rewritten graph was compared with the original on a probe input"]


def test_a_model_that_draws_numbers_is_not_compared(tmp_path: Path) -> None:
    body = "z = RandomNormalLike(x)\ns = Add(x, z)\ny = MatMul(s, w)"
    model = graph("float[n, 6] x", "float[n, 8] y", body, {"w": W1})
    with session(model, tmp_path) as opened:
        report = opened.explain({"x": normal(3, 6)}, runs=1)
    assert any("RandomNormalLike" in conversion.reason for conversion in report.conversions)


def test_a_node_that_stays_is_told(tmp_path: Path) -> None:
    model = graph("float[n, 6] x", "float[n, 6] y", "h = MatMul(x, w)\ny = Gemm<alpha=2.0>(h, w)", {"w": normal(6, 6)})
    with pytest.warns(xrt.XpuRuntimeWarning, match="alpha is 2"):
        opened = session(model, tmp_path, kernels={"matmul": "cpu.blas"}, mode="prefer")
    with opened:
        report = opened.explain({"x": normal(3, 6)}, runs=1)
    seen = observation(report, "kernels.matmul")
    assert seen.status == "substituted"
    assert seen.observed == "cpu.blas (1 node), ONNX Runtime's own (1 node)"
    assert "alpha is 2" in seen.reason


class Small:
    """A kernel of somebody else, for products of at most four rows."""

    name, device_type = "rwtest", "cpu"
    id, op, description, limits = "rwtest.small", "matmul", "products of few rows", "at most 4 rows"

    def available(self) -> tuple[bool, str]:
        return True, ""

    def version(self) -> str:
        return "1"

    def supports(self, desc: Any) -> tuple[bool, str]:
        rows = desc["operands"]["a"]["shape"][-2]
        return rows <= 4, "" if rows <= 4 else f"it has {rows} rows, and this takes 4"

    def prepare(self, desc: Any, config: str) -> Any:
        def run(tensors: Any, stream: int) -> None:
            result = tensors["a"].numpy() @ tensors["b"].numpy()
            np.copyto(tensors["out"].numpy(), np.maximum(result, 0) if relu else result)

        relu = desc["attributes"]["activation"] == "relu"
        return run


@pytest.fixture
def small() -> Any:
    from xpuruntime import _core

    _core.register_python_kernel(Small(), Small())
    yield
    _core.KernelRegistry.instance().remove("rwtest")


@pytest.mark.usefixtures("small")
def test_sizes_that_the_kernel_cannot_serve(tmp_path: Path) -> None:
    """Refused under strict; under prefer another kernel serves, and the report says so."""
    path = save(mlp(), tmp_path)
    few, many = normal(3, 6), normal(9, 6)
    for mode in ("strict", "prefer"):
        policy = {"kernels": {"matmul": "rwtest.small"}, "mode": mode}
        with xrt.InferenceSession(path, engine="onnxruntime", device="cpu", policy=policy) as opened:
            report = opened.explain({"x": few}, runs=1)
            assert observation(report, "kernels.matmul").observed == "rwtest.small (2 nodes)"
            if mode == "strict":
                with pytest.raises(xrt.XpuRuntimeError, match="it has 9 rows, and this takes 4"):
                    opened.run({"x": many})
                close(opened.run({"x": few})["y"], stock(mlp(), {"x": few})["y"])
                continue
            close(opened.run({"x": many})["y"], stock(mlp(), {"x": many})["y"])
            report = opened.explain({"x": many}, runs=1)
        seen = observation(report, "kernels.matmul")
        assert (seen.status, seen.observed) == ("substituted", "cpu.blas (2 nodes)")
        assert "it has 9 rows" in seen.reason


@pytest.mark.parametrize(
    ("name", "level"),
    [("encoder", "disable"), ("encoder", "all"), ("convnet", "basic"), ("convnet", "all"), ("digits", "extended")],
)
def test_real_models_run_fully_by_our_kernels(name: str, level: str) -> None:
    path = Path(xrt.demo_model_path()) if name == "digits" else Path(exported(name))
    policy = {
        "kernels": present(path),
        "mode": "strict",
        "execution": {"provider_options": {"onnxruntime": {"graph_optimization_level": level}}},
    }
    feeds = {
        "encoder": {"ids": np.random.default_rng(0).integers(0, 256, (2, 17))},
        "convnet": {"image": normal(2, 3, 32, 32)},
        "digits": {"image": normal(4, 1, 8, 8)},
    }[name]
    import onnx

    with xrt.InferenceSession(path, engine="onnxruntime", device="cpu", policy=policy) as opened:
        got, wanted = opened.run(feeds), stock(onnx.load(path), feeds)
        for output in wanted:
            close(got[output], wanted[output], rtol=1e-4)
        report = opened.explain(feeds, runs=2)
    assert set(verdicts(report).values()) == {"honoured"}
    accounted(opened, report)
    heavy = {"MatMul", "Gemm", "Conv", "Attention", "LayerNormalization", "Softmax", "FusedConv", "FusedMatMul"}
    assert all(unit.kernel for unit in report.units if unit.op in heavy and unit.relation != "folded")


def test_threads_share_a_rewritten_session(tmp_path: Path) -> None:
    model = mlp()
    inputs = [normal(rows, 6, seed=rows) for rows in range(1, 9)]
    wanted = [stock(model, {"x": x})["y"] for x in inputs]
    failures: list[BaseException] = []
    with session(model, tmp_path) as opened:

        def work() -> None:
            try:
                for _ in range(20):
                    for x, y in zip(inputs, wanted, strict=True):
                        close(opened.run({"x": x})["y"], y)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_bound_buffers(tmp_path: Path) -> None:
    x = normal(3, 6)
    with session(mlp(), tmp_path) as opened, warnings.catch_warnings():
        binding = opened.bind({"x": x})
        for seed in range(3):
            binding.inputs["x"][...] = normal(3, 6, seed=seed)
            binding.run()
            close(binding.outputs["y"], np.maximum(binding.inputs["x"] @ W1, 0) @ W2)
        binding.close()


def test_sessions_come_and_go(tmp_path: Path) -> None:
    path = save(mlp(), tmp_path)
    policy = {"kernels": {"matmul": "cpu.blas"}}
    x = normal(3, 6)
    first = xrt.InferenceSession(path, engine="onnxruntime", device="cpu", policy=policy)
    other = {"kernels": {"matmul": "cpu.reference"}}
    second = xrt.InferenceSession(path, engine="onnxruntime", device="cpu", policy=other)
    wanted = first.run({"x": x})["y"]
    first.close()
    del first
    gc.collect()
    close(second.run({"x": x})["y"], wanted)
    assert {unit.kernel for unit in second.explain({"x": x}, runs=1).units} == {"cpu.reference"}


def test_a_stored_rewritten_graph_is_no_model(tmp_path: Path) -> None:
    """Its rules belong to the process that made it."""
    from xpuruntime.engines.onnxruntime.rewriting.graph import Terms, rewrite
    from xpuruntime.engines.onnxruntime.rewriting.graph_edit import find_rewrites
    from xpuruntime.engines.onnxruntime.rewriting.rules import RuleQuery

    model = mlp()
    rewrites = find_rewrites(model, RuleQuery(xrt.KernelPolicy(matmul="cpu.blas"), "cpu", None), Terms("cpu"))
    edited = rewrite(model, rewrites.rewrites, "rules-of-another-process-1", deterministic=False)
    path = tmp_path / "edited.onnx"
    path.write_bytes(edited.SerializeToString())
    with pytest.raises(xrt.UnsupportedOperationError, match="custom operators xpuruntime: MatMul"):
        xrt.InferenceSession(path, engine="onnxruntime", device="cpu")
