# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overhead of a session on QNN over ONNX Runtime's own best call on the same provider, here on the HTP simulator.

python benchmarks/bench_qnn_overhead.py

The model is the smallest that the provider takes, as the simulator's own time would hide everything else. The worker
of a second chip is timed beside, to say what it costs: a pair of pipes, where a device has one chip and needs none.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import onnxruntime_qnn
from onnx import TensorProto, helper

import xpuruntime as xrt
from harness import interleaved, table, write

SHAPE = (1, 8)
#: In microseconds, over the engine's own best call.
TARGETS = {"run": 5.0, "bound": 1.0}
CHIP = {"backend_type": "htp", "soc_model": "57", "htp_arch": "75", "offload_graph_io_quantization": "0"}


def relu(folder: Path) -> Path:
    """Write ``y = relu(x)``."""
    value = helper.make_tensor_value_info
    ends = [value(name, TensorProto.FLOAT, SHAPE) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], name="relu")], "relu", ends[:1], ends[1:])
    path = folder / "relu.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )
    return path


def raw_session(path: Path) -> Any:
    """Open ONNX Runtime on the plugin by hand."""
    ort.register_execution_provider_library("QNNExecutionProvider", onnxruntime_qnn.get_library_path())
    device = next(one for one in ort.get_ep_devices() if one.ep_name == "QNNExecutionProvider")
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_provider_for_devices([device], CHIP)
    return ort.InferenceSession(str(path), options, enable_fallback=0)


def ours(path: Path, soc: str) -> xrt.InferenceSession:
    policy = {"execution": {"provider_options": {"qnn": {"soc": soc}}}}
    return xrt.InferenceSession(path, device="npu", engine="qnn", policy=policy)


def cases(path: Path, keep: list[Any]) -> dict[str, Any]:
    raw, here, apart = raw_session(path), ours(path, "sm8650"), ours(path, "sm8550")
    feed = {"x": np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)}
    out = np.zeros(SHAPE, np.float32)
    io = raw.io_binding()
    io.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(feed["x"], "cpu", 0))
    io.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(out, "cpu", 0))
    binding = here.bind({"x": feed["x"]})
    np.testing.assert_array_equal(here.run(feed)["y"], raw.run(None, feed)[0])
    keep += [raw, here, apart, out, binding]
    return {
        "onnxruntime run": lambda: raw.run(None, feed),
        "xpuruntime run": lambda: here.run(feed),
        "onnxruntime run_with_iobinding": lambda: raw.run_with_iobinding(io),
        "xpuruntime bound": binding.run,
        "xpuruntime run, second chip in a worker": lambda: apart.run(feed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--out")
    options = parser.parse_args()
    keep: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        samples = interleaved(cases(relu(Path(folder)), keep), calls=options.calls, rounds=options.rounds, warm=20)
    print(f"one Relu {SHAPE} on QNN's HTP simulator, microseconds a call")
    medians = table(samples)
    overhead = {
        "xpuruntime run": medians["xpuruntime run"] - medians["onnxruntime run"],
        "xpuruntime bound": medians["xpuruntime bound"] - medians["onnxruntime run_with_iobinding"],
        "xpuruntime run, second chip in a worker": medians["xpuruntime run, second chip in a worker"]
        - medians["onnxruntime run"],
    }
    for name, extra in overhead.items():
        target = TARGETS.get(name.removeprefix("xpuruntime "))
        told = f" (target: at most +{target:g})" if target is not None else ""
        print(f"  {name}: {extra:+.3f} us over the engine's own call{told}")
    versions = {"onnxruntime-qnn": onnxruntime_qnn.__version__}
    body = {"calls": options.calls, "samples_us": samples, "median_us": medians, "versions": versions}
    write("qnn_overhead", {**body, "overhead_us": overhead, "targets_us": TARGETS}, options.out)


if __name__ == "__main__":
    main()
