# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reports of real engines, compared with each other: nothing is said to differ that did not, and what did is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported_models import example, exported

import xpuruntime as xrt

DIGITS = xrt.demo_model_path()


def report(engine: str, model: Any = DIGITS, feeds: Any = None, **policy: Any) -> xrt.Report:
    module = {"openvino": "openvino", "qnn": "onnxruntime_qnn"}.get(engine)
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"the engine {engine} is not installed")
    execution = {"engine": engine, "device": "cpu", **policy.pop("execution", {})}
    with xrt.InferenceSession(model, policy={"mode": "auto", **policy, "execution": execution}) as session:
        return session.explain(feeds, runs=3)


@pytest.mark.parametrize("name", ["digits", "encoder", "convnet"])
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "null"])
def test_one_session_twice_is_the_same(engine: str, name: str) -> None:
    model, feeds = (DIGITS, None) if name == "digits" else (exported(name), example(name))
    comparison = xrt.compare_reports(report(engine, model, feeds), report(engine, model, feeds))
    assert comparison.same, comparison
    assert comparison.headline.startswith("nothing moved")
    assert comparison.keys == ()
    assert not any(group.what for group in comparison.groups)


def test_qnn_twice_is_the_same() -> None:
    execution = {
        "device": "npu",
        "precision": "fp16",
        "shapes": {"image": [1, 3, 32, 32]},
        "provider_options": {"qnn": {"soc": "sm8650"}},
    }
    one, other = (report("qnn", exported("convnet"), execution=execution) for _ in range(2))
    comparison = xrt.compare_reports(one, other)
    assert comparison.same, comparison
    assert {(total.unit, total.kind) for total in comparison.totals} == {("cycles", "simulated")}
    onnx = xrt.compare_reports(report("onnxruntime", exported("convnet")), one)
    assert onnx.totals == ()
    assert any("different kinds" in note for note in onnx.notes)
    assert len(onnx.nodes_that("placement")) > 0


def test_fusions_that_are_switched_off() -> None:
    options = {"provider_options": {"onnxruntime": {"graph_optimization_level": "disable"}}}
    whole, apart = report("onnxruntime"), report("onnxruntime", execution=options)
    comparison = xrt.compare_reports(whole, apart, noise=1e9, noise_us=1e9)
    assert comparison.nodes_that("placement") == ()
    group = next(group for group in comparison.groups if "conv1" in group.nodes)
    assert set(group.nodes) == {"conv1", "bn1", "relu1"}
    assert (len(group.before), len(group.after)) == (1, 3)
    assert set(group.what["grouping"]) == set(group.nodes)
    assert group.time is not None
    assert group.time.after == pytest.approx(sum(u.time.value for u in group.after if u.time))
    assert not comparison.same
    settings = {change.subject: (change.before, change.after) for change in comparison.surroundings}
    assert settings["settings.level"] == ("all", "disable")
    back = xrt.compare_reports(apart, whole)
    assert set(back.nodes_that("grouping")) == set(comparison.nodes_that("grouping"))


def test_another_engine() -> None:
    comparison = xrt.compare_reports(report("onnxruntime"), report("openvino"))
    assert len(comparison.nodes_that("placement")) == 15
    assert comparison.headline.startswith("15 nodes moved, ")
    assert "plan.engine_version" in {change.subject for change in comparison.surroundings}
    assert not any(change.subject.startswith("settings.") for change in comparison.surroundings), "each has its own"
    assert [key.key for key in comparison.keys] == ["execution.engine"]
    assert not comparison.keys[0].deviates


def test_a_precision_that_is_not_honoured() -> None:
    comparison = xrt.compare_reports(report("onnxruntime"), report("onnxruntime", execution={"precision": "fp16"}))
    (key,) = (key for key in comparison.keys if key.key == "execution.precision")
    assert (key.status_before, key.status_after, key.deviates) == ("honoured", "substituted", True)
    assert not comparison.same


def test_other_sizes_are_not_compared_by_their_times() -> None:
    one, other = (report("null", feeds={"image": np.zeros((n, 1, 8, 8), np.float32)}) for n in (1, 64))
    comparison = xrt.compare_reports(one, other)
    assert (comparison.latency, comparison.totals, comparison.same) == (None, (), True)
    assert "image float32 [1, 1, 8, 8]; image float32 [64, 1, 8, 8]" in comparison.notes[0]


@pytest.mark.torch
def test_another_kernel_of_attention(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x) + 1

    torch.export.save(torch.export.export(Net().eval(), (torch.zeros(1, 2, 8, 16),)), tmp_path / "net.pt2")
    kernels = ("cpu.reference", "null.null")
    one, other = (report("torch", tmp_path / "net.pt2", kernels={"attention": name}) for name in kernels)
    comparison = xrt.compare_reports(one, other)
    assert comparison.nodes_that("kernel") == ("scaled_dot_product_attention",)
    assert "nothing moved, 1 node changed kernel" in comparison.headline
    group = next(group for group in comparison.groups if group.what)
    assert tuple(unit.kernel for side in (group.before, group.after) for unit in side) == kernels
