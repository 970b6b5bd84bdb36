# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Engines that TensorRT-RTX really builds, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from onnx import helper
from trt_quantized import qdq
from trt_support import ask, judge, machine

import xpuruntime as xrt
from xpuruntime.engines.base import Request
from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.quantization import Calibration
from xpuruntime.engines.tensorrt import TensorRtRtxEngine, building
from xpuruntime.engines.tensorrt.options import RTX, TensorRtSettings
from xpuruntime.policies import Policy
from xpuruntime.testing import models

pytest.importorskip("tensorrt_rtx")

HERE = machine(engines=(TensorRtRtxEngine().probe(),))


def build(tmp_path: Any, model: Any = None, execution: dict[str, Any] | None = None, **more: Any) -> Any:
    """Judge and build; return what was built."""
    calibration = more.pop("calibration", None)
    request = ask(tmp_path, model, execution, purpose="compile", **more)
    if calibration is not None:
        request = msgspec.structs.replace(request, calibration=Calibration(calibration, request.model))
    judgement = judge(request, HERE)
    assert judgement.verdict.accepted, judgement.verdict.reason
    settings = msgspec.convert(judgement.settings, TensorRtSettings)
    target = TensorRtRtxEngine().target(request, judgement, HERE)
    return building.build(request, settings, RTX, target, ConversionLog())


def options(**given: Any) -> dict[str, Any]:
    """Return an execution section with options of TensorRT-RTX."""
    return {"provider_options": {"tensorrt-rtx": {"compute_capability": "8.6", **given}}}


def test_an_engine_and_its_layers(tmp_path: Any) -> None:
    built = build(tmp_path, models.conv(batch=2))
    assert len(built.plan) > 1000
    named = [name for nodes in built.layers.values() for name in nodes]
    assert sorted(named) == sorted(["conv1", "relu1", "conv2", "add", "pool", "flatten", "fc"])
    assert built.flags["compute_capability"] == "8.0 8.6 8.9 12.0 12.1"
    assert built.flags["tf32"] == "1"
    assert built.flags["profiling_verbosity"] == "detailed"


def test_the_same_model_gives_the_same_plan(tmp_path: Any) -> None:
    first, second = (build(tmp_path, models.conv(batch=2), options()).plan for _ in range(2))
    assert first == second


@pytest.mark.parametrize("target", ["8.0", "8.6, 12.0"])
def test_targets(tmp_path: Any, target: str) -> None:
    built = build(tmp_path, execution=options(compute_capability=target))
    assert built.flags["compute_capability"] == target.replace(",", "")


def test_a_target_that_lacks_kernels_says_so(tmp_path: Any) -> None:
    with pytest.raises(xrt.EngineError, match=r"Cannot compile operation .*SM75.* Leave 7\.5 out"):
        build(tmp_path, execution=options(compute_capability="7.5"))


def test_tf32_changes_the_plan(tmp_path: Any) -> None:
    on = build(tmp_path, execution=options())
    off = build(tmp_path, execution={**options(), "precision": "fp32"})
    assert (on.flags["tf32"], off.flags["tf32"]) == ("1", "0")
    assert on.plan != off.plan


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_precision_is_made_in_the_graph(tmp_path: Any, precision: str) -> None:
    built = build(tmp_path, models.conv(batch=2), {"precision": precision})
    assert sorted(n for nodes in built.layers.values() for n in nodes) == sorted(
        ["conv1", "relu1", "conv2", "add", "pool", "flatten", "fc"]
    )
    assert built.plan != build(tmp_path, models.conv(batch=2)).plan


def test_quantized_with_calibration(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    inputs = [{"x": rng.standard_normal((2, 3, 32, 32)).astype(np.float32)} for _ in range(4)]
    built = build(tmp_path, models.conv(batch=2), {"precision": "int8"}, calibration=inputs)
    named = {name for nodes in built.layers.values() for name in nodes}
    assert {"conv1", "conv2", "fc", "add", "pool"} <= named


def test_zero_points_are_refused_by_node(tmp_path: Any) -> None:
    with pytest.raises(xrt.UnsupportedOperationError, match=r"node 'quantize_x' \(QuantizeLinear\): .*zero point"):
        build(tmp_path, qdq(zero=3), {"precision": "int8"})


def test_operators_that_are_not_there(tmp_path: Any) -> None:
    with pytest.raises(xrt.UnsupportedOperationError, match=r"node 'unique' \(Unique\)") as caught:
        build(tmp_path, models.island(), {"shapes": {"x": [4, 16]}})
    assert caught.value.engine == "tensorrt-rtx"
    assert caught.value.status == "UNSUPPORTED_NODE"
    assert "cudaError" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int64", "bool"])
def test_types_at_the_border(tmp_path: Any, dtype: str) -> None:
    assert len(build(tmp_path, models.identity(dtype), {"shapes": {"x": ["1..4", 3]}}).plan) > 1000


def test_the_parser_would_change_float64(tmp_path: Any) -> None:
    """What the plan refuses is refused once more by what the parser made, for types that no table has."""
    request = ask(tmp_path, models.identity("float64"), {"shapes": {"x": [2, 3]}}, purpose="compile")
    with pytest.raises(xrt.UnsupportedOperationError, match=r"'x' .* is float64, and TensorRT-RTX makes it float32"):
        building.build(request, TensorRtSettings(targets=("8.6",)), RTX, {}, ConversionLog())


def test_inputs_that_decide_sizes(tmp_path: Any) -> None:
    from onnx import TensorProto

    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "shape"], ["y"], name="reshape")],
        "reshape",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 6]),
            helper.make_tensor_value_info("shape", TensorProto.INT64, [2]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    with pytest.raises(xrt.UnsupportedOperationError, match=r"input 'shape' .* holds sizes that other tensors get"):
        build(tmp_path, model)


def test_a_limit_that_is_too_small_says_which_key(tmp_path: Any) -> None:
    with pytest.raises(xrt.EngineError, match=r"workspace.*larger execution\.memory\.limit"):
        build(tmp_path, execution={**options(), "memory": {"limit": "1MiB"}})
    built = build(tmp_path, execution={**options(), "memory": {"limit": "1GiB"}})
    assert built.flags["workspace"] == str(1 << 30)


def test_options_are_set_and_read_back(tmp_path: Any) -> None:
    given = {
        "builder_optimization_level": 2,
        "max_aux_streams": 0,
        "max_threads": 1,
        "tiling_optimization_level": "fast",
        "l2_limit_for_tiling": 4096,
        "tactic_shared_memory": 32768,
        "sparse_weights": True,
        "strict_nans": 1,
        "distributive_independence": 1,
        "weight_streaming": 1,
        "runtime_platform": "same_as_build",
        "profiling_verbosity": "layer_names_only",
    }
    built = build(tmp_path, execution=options(**given))
    for name, value in given.items():
        assert built.flags[name] == str(int(value) if isinstance(value, bool) else value), name


@pytest.mark.parametrize("option", [{"refit": "on"}, {"strip_plan": 1}])
def test_options_that_need_a_gpu_to_build(tmp_path: Any, option: dict[str, Any], capfd: Any) -> None:
    with pytest.raises(xrt.EngineError, match="compiles kernels on a GPU"):
        build(tmp_path, execution=options(**option))
    capfd.readouterr()  # the library writes to standard error by itself


def test_weights_beside_the_model(tmp_path: Any) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    first = build(inside, models.mlp(batch=2), options())
    model = models.mlp(batch=2)
    policy = Policy.coerce({"execution": options()})
    for name in ("", "named"):
        model.graph.node[0].name = name  # without a name the model is handed over as bytes
        models.save(model, outside, external=True)
        request = Request(
            model=inspect_model(outside / "model.onnx"), device="cuda:0", policy=policy, purpose="compile"
        )
        settings = msgspec.convert(judge(request, HERE).settings, TensorRtSettings)
        plan = building.build(request, settings, RTX, {}, ConversionLog()).plan
        assert abs(len(plan) - len(first.plan)) < 256  # names of nodes and paths; the weights have 32 KiB


SLOW = """
import sys, pathlib
import xpuruntime as xrt
from xpuruntime.testing import models
folder = pathlib.Path(sys.argv[1])
model = models.save(models.mlp(width=4096, batch=8), folder)
print("go", flush=True)
xrt.compile_model(model, folder / "out" / "m.xrt", engine="tensorrt-rtx", device="cuda:0")
print("done", flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL there")
def test_a_builder_that_is_killed_leaves_no_artifact(tmp_path: Any) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out").glob(".xpuruntime-*.new")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    out, _ = process.communicate(timeout=60)
    assert "done" not in out
    assert not (tmp_path / "out" / "m.xrt").exists()
    # The next builder is not kept out, and clears up.
    model = models.save(models.mlp(batch=2), tmp_path, "small.onnx")
    made = xrt.compile_model(model, tmp_path / "out" / "m.xrt", engine="tensorrt-rtx", device="cuda:0")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) in ([".m.xrt.lock", "m.xrt"], ["m.xrt"])
    assert made.manifest.engine == "tensorrt-rtx"
