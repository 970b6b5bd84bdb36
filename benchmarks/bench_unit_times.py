# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sum of the times of units beside a whole run: the engines' own counters by their plain API, then `session.explain()`.

python benchmarks/bench_unit_times.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import openvino as ov
from onnx import TensorProto, helper, numpy_helper
from openvino import opset8 as opset

import xpuruntime as xrt
from harness import write

#: The units, or these and what was measured beside them, are the run to this share of it.
TARGET = 0.1
RUNS, TRIES = 200, 9


def convnet(width: int, size: int) -> onnx.ModelProto:
    """Four convolutions with ReLU and pooling, then a classifier."""
    rng = np.random.default_rng(0)
    nodes, weights, name, channels = [], [], "x", 3
    for k in range(4):
        weights.append(numpy_helper.from_array(rng.standard_normal((width, channels, 3, 3)).astype("f4") / 9, f"w{k}"))
        nodes.append(helper.make_node("Conv", [name, f"w{k}"], [f"c{k}"], f"conv{k}", pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"c{k}"], [f"r{k}"], f"relu{k}"))
        name, channels = f"r{k}", width
        if k % 2:
            node = helper.make_node("MaxPool", [name], [f"p{k}"], f"pool{k}", kernel_shape=[2, 2], strides=[2, 2])
            nodes.append(node)
            name = f"p{k}"
    weights.append(numpy_helper.from_array(rng.standard_normal((width, 10)).astype("f4"), "fw"))
    nodes += [
        helper.make_node("GlobalAveragePool", [name], ["g"], "mean"),
        helper.make_node("Flatten", ["g"], ["f"], "flat"),
        helper.make_node("MatMul", ["f", "fw"], ["m"], "classes"),
        helper.make_node("Softmax", ["m"], ["y"], "softmax"),
    ]
    return _model(nodes, weights, [1, 3, size, size], [1, 10])


def products(count: int, size: int) -> onnx.ModelProto:
    """Products of square matrices, beside which what goes by between operators is small."""
    rng = np.random.default_rng(0)
    names = ["x", *(f"h{k}" for k in range(count - 1)), "y"]
    weights = [numpy_helper.from_array(rng.standard_normal((size, size)).astype("f4"), f"w{k}") for k in range(count)]
    nodes = [helper.make_node("MatMul", [names[k], f"w{k}"], [names[k + 1]], f"product{k}") for k in range(count)]
    return _model(nodes, weights, [size, size], [size, size])


def _model(nodes: list[Any], weights: list[Any], read: list[int], made: list[int]) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    sides = [value("x", TensorProto.FLOAT, read)], [value("y", TensorProto.FLOAT, made)]
    graph = helper.make_graph(nodes, "g", *sides, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def openvino_runs(model: Any, *, counters: bool, runs: int = RUNS) -> dict[str, float]:
    """Return medians of OpenVINO's own clock and of ours around the call, and with counters their sum and its mean."""
    properties = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": "1", "INFERENCE_PRECISION_HINT": "f32"}
    compiled = ov.Core().compile_model(model, "CPU", {**properties, "PERF_COUNT": counters})
    request = compiled.create_infer_request()
    request.set_input_tensor(0, ov.Tensor(np.ones(list(compiled.inputs[0].shape), np.float32)))
    own, called = [], []
    for _ in range(runs):
        start = time.perf_counter()
        request.infer()
        called.append((time.perf_counter() - start) * 1e6)
        own.append(request.latency * 1e3)
    found = {"own": statistics.median(own), "called": statistics.median(called)}
    if counters:
        nodes = request.get_profiling_info()
        found["mean"] = statistics.fmean(own)  # the counters are means since the model was compiled, too
        found["counted"] = sum(node.real_time.total_seconds() * 1e6 for node in nodes)
        found["nodes"] = sum(bool(node.real_time) for node in nodes)
    return found


def softmaxes(count: int) -> ov.Model:
    """Return a row of operators that take less than a microsecond each."""
    first = last = opset.parameter(ov.Shape([1, 16]), ov.Type.f32)
    for _ in range(count):
        last = opset.softmax(last, 1)
    return ov.Model([opset.result(last)], [first], "softmaxes")


def onnxruntime_runs(path: Path, folder: Path) -> dict[str, float]:
    """Return medians of runs without a profile and with one, and of what the profile says of its runs."""
    found = {}
    for profiled in (False, True):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.enable_profiling, options.profile_file_prefix = profiled, str(folder / "profile")
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        feed = {input_.name: np.ones(input_.shape, np.float32) for input_ in session.get_inputs()}
        called = []
        for _ in range(RUNS):
            start = time.perf_counter()
            session.run(None, feed)
            called.append((time.perf_counter() - start) * 1e6)
        found["watched" if profiled else "called"] = statistics.median(called)
    written = session.end_profiling()
    events = json.loads(Path(written).read_text())
    Path(written).unlink()
    runs = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "model_run"][1:]
    nodes = [e for e in events if e["name"].endswith("_kernel_time") and e["ts"] >= runs[0][0]]
    found["model_run"] = statistics.median(end - start for start, end in runs)
    inside = [[e["dur"] for e in nodes if start <= e["ts"] <= end] for start, end in runs]
    found["nodes"] = statistics.median(map(len, inside))
    found["kernel_time"] = statistics.median(map(sum, inside))
    return found


def reported(path: Path, engine: str) -> dict[str, Any]:
    """Return what a report says of its instrumented runs: of several, that whose coverage is in the middle."""
    policy = {"execution": {"engine": engine, "device": "cpu", "threads": 1}}
    with xrt.InferenceSession(path, policy=policy) as session:
        every = [session.explain(runs=20).latency for _ in range(TRIES)]
    found = [one.detail["instrumented"] for one in every if one is not None]
    return dict(sorted(found, key=lambda one: one["coverage"])[TRIES // 2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    options = parser.parse_args()
    made = {
        "convnet of 16 channels on 8 x 8": convnet(16, 8),
        "convnet of 16 channels on 32 x 32": convnet(16, 32),
        "convnet of 64 channels on 112 x 112": convnet(64, 112),
        "4 products of 768 x 768": products(4, 768),
    }
    bodies: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, proto in made.items():
            path = folder / "model.onnx"
            onnx.save(proto, path)
            body: dict[str, Any] = {
                "openvino": {
                    "without counters": openvino_runs(str(path), counters=False),
                    "with counters": openvino_runs(str(path), counters=True),
                },
                "onnxruntime": onnxruntime_runs(path, folder),
                "reports": {engine: reported(path, engine) for engine in ("openvino", "onnxruntime")},
            }
            bodies[title] = body
            print(title, json.dumps(body, indent=1))
    chains = {str(n): openvino_runs(softmaxes(n), counters=True, runs=2000) for n in (0, 1, 50, 100)}
    print("softmaxes", json.dumps(chains, indent=1))
    facts = {"openvino": ov.get_version(), "runs": RUNS, "tries": TRIES, "target": TARGET}
    write("unit_times", {**facts, "models": bodies, "softmaxes": chains}, options.out)


if __name__ == "__main__":
    main()
