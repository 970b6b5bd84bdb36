# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Overhead of a session over ONNX Runtime's own best call, on a model that computes almost nothing.

python benchmarks/bench_session.py --device cpu
python benchmarks/bench_session.py --device cuda:0
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import xpuruntime as xrt
from harness import interleaved, table, write
from xpuruntime.testing import models

SHAPE = (4, 64)
#: In microseconds, over the engine's own best call.
TARGETS = {"run": 5.0, "bound": 1.0}


def cpu_cases(path: Path, keep: list[Any]) -> dict[str, Any]:
    """One thread each, so that neither pays for waking workers."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    raw = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    ours = xrt.InferenceSession(path, policy={"execution": {"device": "cpu", "threads": 1}})
    feed = {"x": np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)}
    io = raw.io_binding()
    out = np.zeros(SHAPE, np.float32)
    io.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(feed["x"], "cpu", 0))
    io.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(out, "cpu", 0))
    binding = ours.bind({"x": feed["x"]})
    np.testing.assert_array_equal(ours.run(feed)["y"], raw.run(None, feed)[0])
    keep += [raw, ours, out, binding]
    return {
        "onnxruntime run": lambda: raw.run(None, feed),
        "xpuruntime run": lambda: ours.run(feed),
        "onnxruntime run_with_iobinding": lambda: raw.run_with_iobinding(io),
        "xpuruntime bound": binding.run,
    }


def no_wait_options(graph: str) -> Any:
    """Return run options without host synchronization.

    The graph id is stated also where there is none: ONNX Runtime's Python looks it up in each call, and where it is
    missing the look-up fails with an exception that costs more than the run.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    options.add_run_config_entry("gpu_graph_id", graph)
    return options


def cuda_cases(path: Path, keep: list[Any]) -> dict[str, Any]:
    """Torch tensors on the device, on one stream of torch; no case waits on the host within a round.

    ONNX Runtime's best: opened on torch's own stream, set not to synchronize. Our session computes on a stream of its
    own and orders it with torch's by two events, except in the case named so.
    """
    import torch

    side = torch.cuda.Stream()
    torch.cuda.set_stream(side)
    x, y = torch.randn(*SHAPE, device="cuda"), torch.empty(*SHAPE, device="cuda")
    on_torch = {"has_user_compute_stream": "1", "user_compute_stream": str(side.cuda_stream)}
    ours = xrt.InferenceSession(path, device="cuda:0")
    graphed = xrt.InferenceSession(path, policy={"execution": {"device": "cuda:0", "cuda_graph": "require"}})
    raw = ort.InferenceSession(str(path), providers=[("CUDAExecutionProvider", on_torch)])
    captured = {**on_torch, "enable_cuda_graph": "1"}
    raw_graph = ort.InferenceSession(str(path), providers=[("CUDAExecutionProvider", captured)])
    no_wait, replayed = no_wait_options("-1"), no_wait_options("1")

    def bound(session: Any) -> Any:
        io = session.io_binding()
        io.bind_input("x", "cuda", 0, np.float32, SHAPE, x.data_ptr())
        io.bind_output("y", "cuda", 0, np.float32, SHAPE, y.data_ptr())
        return io

    fixed, fixed_graph = bound(raw), bound(raw_graph)
    fresh = raw.io_binding()

    def rebind() -> Any:
        fresh.bind_input("x", "cuda", 0, np.float32, tuple(x.shape), x.data_ptr())
        fresh.bind_output("y", "cuda", 0)
        raw.run_with_iobinding(fresh, no_wait)
        return torch.utils.dlpack.from_dlpack(fresh.get_outputs()[0].__dlpack__())

    binding, replay = ours.bind({"x": x}), graphed.bind({"x": x})
    inside = {
        name: session.bind({"x": x}, stream=session.bind({"x": x}).stream)
        for name, session in (("plain", ours), ("graph", graphed))
    }
    torch.testing.assert_close(ours.run({"x": x})["y"], rebind())
    for other in (replay, *inside.values()):
        other.run()
        torch.cuda.synchronize()
        torch.testing.assert_close(other.outputs["y"], rebind())
    keep += [raw, raw_graph, ours, graphed, y, binding, replay, fixed, fixed_graph, inside, side]
    return {
        "onnxruntime rebind and run, torch in and out": rebind,
        "xpuruntime run, torch in and out": lambda: ours.run({"x": x}),
        "onnxruntime run_with_iobinding": lambda: raw.run_with_iobinding(fixed, no_wait),
        "xpuruntime bound, on the binding's stream": inside["plain"].run,
        "xpuruntime bound, ordered with torch's stream": binding.run,
        "onnxruntime run_with_iobinding, CUDA graph": lambda: raw_graph.run_with_iobinding(fixed_graph, replayed),
        "xpuruntime bound, on the binding's stream, CUDA graph": inside["graph"].run,
        "xpuruntime bound, ordered with torch's stream, CUDA graph": replay.run,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--out")
    options = parser.parse_args()
    keep: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        path = models.save(models.mlp(), Path(folder))
        finish = None
        if options.device == "cpu":
            cases = cpu_cases(path, keep)
        else:
            import torch

            finish = torch.cuda.synchronize
            cases = cuda_cases(path, keep)
        samples = interleaved(cases, calls=options.calls, rounds=options.rounds, finish=finish)
    print(f"toy MLP {SHAPE}, {options.device}, microseconds a call")
    medians = table(samples)
    overhead: dict[str, float] = {}
    own = 0.0
    for name, value in medians.items():
        if name.startswith("onnxruntime"):
            own = value
        else:
            overhead[name] = value - own
    for name, extra in overhead.items():
        target = TARGETS["bound" if "bound" in name else "run"]
        print(f"  {name}: {extra:+.3f} us over the engine's own call (target: at most +{target:g})")
    kind = options.device.partition(":")[0]
    body = {"device": options.device, "calls": options.calls, "samples_us": samples, "median_us": medians}
    write(f"session_{kind}", {**body, "overhead_us": overhead, "targets_us": TARGETS}, options.out)


if __name__ == "__main__":
    main()
