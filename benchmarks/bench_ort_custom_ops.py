# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels of xpuruntime inside ONNX Runtime: overhead of an operator over a stock one, gain of a decoder's step.

python benchmarks/bench_ort_custom_ops.py --device cpu
python benchmarks/bench_ort_custom_ops.py --device cuda:0

On CUDA everything is bound to device memory, without and inside ONNX Runtime's CUDA graph. "the same kernel" is read
from the profiler of CUDA, and printed where it is not so.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import helper, numpy_helper

import xpuruntime as xrt
from decoder_model import Sizes, decoder_step, step_inputs
from harness import interleaved, table, write
from xpuruntime import _core
from xpuruntime.ops.call_context import compile_rules, prepare

#: Over the stock operator with the same kernel, in per cent.
TARGET = 2.0
#: What an xpuruntime node costs the host over the cheapest stock node, in nanoseconds.
HOST_TARGET = 500.0
ELEMENTS: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
CHAIN = 4
#: Nodes in a row, to measure what one of them costs the host.
NODES = 200


def rules_of(**policy: Any) -> _core.OnnxRuntimeRules:
    return _core.OnnxRuntimeRules(compile_rules(xrt.KernelPolicy(**policy), "strict"))


def model(nodes: list[Any], inputs: dict[str, Any], output: str, weights: dict[str, Any], dtype: str) -> bytes:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(ELEMENTS[dtype]))
    graph = helper.make_graph(
        nodes,
        "cost",
        [helper.make_tensor_value_info(name, element, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(output, element, None)],
        [numpy_helper.from_array(value.astype(ELEMENTS[dtype]), name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("xpuruntime", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def open_session(source: bytes, providers: Any, *, optimise: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.register_custom_ops_library(_core.__file__)
    return ort.InferenceSession(source, options, providers=providers, enable_fallback=0)


# ---- the cost of an operator ----------------------------------------------------------------------------------------


def chain(op: str, dtype: str, rules: Any, count: int, x: Any, weights: dict[str, Any], **more: Any) -> bytes:
    """Return `count` nodes in a row that share their weights; stock ones without rules.

    A weight that is a shape instead of an array becomes an input.
    """
    nodes, name = [], "x"
    ours = {"domain": "xpuruntime", "rules": rules.key} if rules else {}
    for i in range(count):
        place = {"node": f"n{i}"} if rules else {}
        nodes.append(helper.make_node(op, [name, *weights], [f"y{i}"], name=f"n{i}", **ours, **place, **more))
        name = f"y{i}"
    inputs = {"x": list(x), **{name: list(shape) for name, shape in weights.items() if isinstance(shape, tuple)}}
    fixed = {name: value for name, value in weights.items() if name not in inputs}
    return model(nodes, inputs, name, fixed, dtype)


def host_cost() -> dict[str, float]:
    """Return nanoseconds a node on the CPU: of xpuruntime, with a kernel that does nothing, and of cheap stock ones."""
    prepare()
    x = np.ones((4, 4), np.float32)
    weights = {"w": np.eye(4)}
    rules = rules_of(matmul="null.null")
    cpu = ["CPUExecutionProvider"]
    sources = {
        "xpuruntime, an empty kernel": chain("MatMul", "fp32", rules, NODES, x.shape, weights),
        "xpuruntime, an empty kernel, no initializer": chain("MatMul", "fp32", rules, NODES, x.shape, {"w": x.shape}),
        "stock Relu, 4x4": chain("Relu", "fp32", None, NODES, x.shape, {}),
        "stock MatMul, 4x4": chain("MatMul", "fp32", None, NODES, x.shape, weights),
    }
    sessions = {label: open_session(source, cpu, optimise=False) for label, source in sources.items()}
    feeds = {k: dict.fromkeys([i.name for i in s.get_inputs()], x) for k, s in sessions.items()}
    samples = interleaved({k: lambda k=k, s=s: s.run(None, feeds[k]) for k, s in sessions.items()}, calls=20, rounds=41)
    print(f"host, {NODES} nodes in a row, nanoseconds a node")
    return table({k: [v / NODES for v in values] for k, values in samples.items()}, unit="ns", scale=1e3)


CASES: dict[str, dict[str, Any]] = {
    "matmul 16x4096x4096": {
        "op": "MatMul",
        "x": (16, 4096),
        "weights": {"w": (4096, 4096)},
        "policies": {
            "cublas": {"matmul": "cublas.cublas"},
            "cublasLt": {"matmul": "cublas.cublasLt"},
            "skinny": {"matmul": "cuda_raw.skinny"},
        },
    },
    "conv 8x128x28x28, 128 3x3": {
        "op": "Conv",
        "x": (8, 128, 28, 28),
        "weights": {"w": (128, 128, 3, 3)},
        "attributes": {"pads": [1, 1, 1, 1]},
        "policies": {"cudnn_heuristic": {"conv": "cudnn_heuristic"}, "cudnn_exhaustive": {"conv": "cudnn_exhaustive"}},
    },
    "layer norm 4096x1024": {
        "op": "LayerNormalization",
        "x": (4096, 1024),
        "weights": {"s": (1024,), "b": (1024,)},
        "policies": {"cuda_raw": {"layer_norm": "cuda_raw"}},
    },
}


def on_device(value: Any) -> Any:
    """Return a torch tensor on the device; PyTorch knows no bfloat16 of NumPy."""
    import torch

    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(value).cuda()


class Bound:
    """A session of plain ONNX Runtime with all of its memory bound on a CUDA device."""

    def __init__(self, source: bytes, inputs: dict[str, Any], *, graph: bool) -> None:
        import torch

        options = {"cudnn_conv_algo_search": "EXHAUSTIVE", "enable_cuda_graph": str(int(graph))}
        self.session = open_session(source, [("CUDAExecutionProvider", options)])
        self.binding = self.session.io_binding()
        self.kept = {name: on_device(value) for name, value in inputs.items()}
        types = {"tensor(float16)": torch.float16, "tensor(float)": torch.float32, "tensor(bfloat16)": torch.bfloat16}
        for output in self.session.get_outputs():
            self.kept[output.name] = torch.empty(output.shape, dtype=types[output.type], device="cuda")
        codes = {torch.float16: 10, torch.float32: 1, torch.bfloat16: 16, torch.int64: 7}
        for name, tensor in self.kept.items():
            bind = self.binding.bind_input if name in inputs else self.binding.bind_output
            bind(name, "cuda", 0, codes[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
        self.run()

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding)

    def result(self, name: str) -> Any:
        return self.kept[name].double().cpu().numpy()


def kernels_of(run: Any) -> list[str]:
    """Return the names of the kernels that one call launches, as CUDA's profiler reports them."""
    import torch

    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return sorted(
        {event.name for event in profiler.events() if not event.name.startswith(("cuda", "Memcpy", "Memset"))}
    )


def device_cost(dtype: str) -> dict[str, Any]:
    """Time chains of one operator, stock and xpuruntime's, and compare their results and kernels."""
    body: dict[str, Any] = {}
    draw = np.random.default_rng(3)
    for title, case in CASES.items():
        if dtype == "bf16" and case["op"] == "Conv":
            continue  # no stock kernel everywhere
        x = draw.standard_normal(case["x"], np.float32).astype(ELEMENTS[dtype])
        weights = {
            name: draw.standard_normal(shape, np.float32) / max(1.0, float(np.prod(shape[1:])) ** 0.5)
            for name, shape in case["weights"].items()
        }
        policies = {"stock": None, **{label: rules_of(**policy) for label, policy in case["policies"].items()}}
        sources = {
            label: chain(case["op"], dtype, rules, CHAIN, x.shape, weights, **case.get("attributes", {}))
            for label, rules in policies.items()
            if not (dtype == "fp32" and label == "skinny")
        }
        last = f"y{CHAIN - 1}"
        body[title] = {}
        for graph in (False, True):
            sessions = {label: Bound(source, {"x": x}, graph=graph) for label, source in sources.items()}
            kernels = {label: kernels_of(one.run) for label, one in sessions.items()}
            wanted = sessions["stock"].result(last)
            errors = {
                label: float(np.abs(one.result(last) - wanted).max() / np.abs(wanted).max())
                for label, one in sessions.items()
            }
            samples = interleaved({k: one.run for k, one in sessions.items()}, calls=100, rounds=31)
            print(f"{title}, {dtype}, {CHAIN} in a row{', CUDA graph' if graph else ''}, microseconds a run")
            medians = table(samples)
            for label in sessions:
                if label == "stock":
                    continue
                same = kernels[label] == kernels["stock"]
                over = 100 * (medians[label] / medians["stock"] - 1)
                verdict = ("met" if over <= TARGET else "missed") if same else "another kernel"
                print(f"  {label}: {over:+.1f} % over stock ({verdict}), off by {errors[label]:.1e}")
            body[title]["graph" if graph else "plain"] = {
                "samples_us": samples,
                "median_us": medians,
                "kernels": kernels,
                "difference": errors,
            }
    return body


# ---- one step of a decoder ------------------------------------------------------------------------------------------

PLAIN = "onnxruntime"
POLICIES: dict[str, dict[str, Any]] = {
    "nothing asked": {},
    "skinny products": {"kernels": {"matmul": ["cuda_raw.skinny", "cublasLt"]}},
    "skinny products, flash attention, norms": {
        "kernels": {
            "matmul": ["cuda_raw.skinny", "cublasLt"],
            "attention": "cuda_raw.flash_attention_v2",
            "layer_norm": "cuda_raw",
        }
    },
    "measured": {"auto_strategy": "best_performance"},
}
CPU_POLICIES: dict[str, dict[str, Any]] = {"nothing asked": {}, "cpu.blas": {"kernels": {"matmul": "cpu.blas"}}}


class Step:
    """The cases of one model: plain ONNX Runtime first, then our sessions, each with its logits."""

    def __init__(self, device: str, source: bytes, inputs: dict[str, Any], *, graph: bool) -> None:
        self.device, self.inputs = device, inputs
        self.cases: dict[str, Any] = {}
        self.logits: dict[str, Any] = {}
        self.xpuruntime_nodes: dict[str, int] = {}
        self._kept: list[Any] = []
        if device == "cpu":
            session = open_session(source, ["CPUExecutionProvider"])
            self.cases[PLAIN] = lambda: session.run(None, inputs)
            self.logits[PLAIN] = session.run(["logits"], inputs)[0].astype(np.float64)
        else:
            raw = Bound(source, inputs, graph=graph)
            self.cases[PLAIN], self.logits[PLAIN] = raw.run, raw.result("logits")

    def add(self, label: str, path: Path, policy: dict[str, Any], execution: dict[str, Any]) -> None:
        try:
            session = xrt.InferenceSession(path, policy={**policy, "execution": execution})
        except xrt.XpuRuntimeError as error:
            print(f"  {label}: refused: {str(error)[:300]}")
            return
        _core.Dispatcher.instance().clear_decisions()
        cuda = self.device != "cpu"
        given = {k: on_device(v) for k, v in self.inputs.items()} if cuda else self.inputs
        binding = session.bind(given)
        binding.run()
        out = binding.outputs["logits"]
        self.logits[label] = out.double().cpu().numpy() if cuda else np.asarray(out, np.float64)
        decisions = _core.Dispatcher.instance().decisions()
        self.xpuruntime_nodes[label] = len({d["node"] for d in decisions if d["node"]})
        self.cases[label] = binding.run
        self._kept += [session, binding, given]


def decoder_case(device: str, batch: int, past: int, sizes: Sizes, *, fused: bool, graph: bool) -> dict[str, Any]:
    cuda = device != "cpu"
    dtype = ELEMENTS["fp16" if cuda else "fp32"]
    source = decoder_step(batch, past, sizes, fused_attention=fused, dtype=dtype)
    step = Step(device, source, step_inputs(batch, past, sizes, dtype), graph=graph)
    execution = (
        {"device": device, "cuda_graph": "require" if graph else "off"} if cuda else {"device": "cpu", "threads": 1}
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decoder.onnx"
        path.write_bytes(source)
        for label, policy in (POLICIES if cuda else CPU_POLICIES).items():
            step.add(label, path, policy, execution)
    wanted = step.logits[PLAIN]
    difference = {k: float(np.abs(v - wanted).max() / np.abs(wanted).max()) for k, v in step.logits.items()}
    if cuda:
        import torch

        samples = interleaved(step.cases, calls=20, rounds=21, warm=5, finish=torch.cuda.synchronize)
    else:
        samples = interleaved(step.cases, calls=3, rounds=11, warm=1)
    form = "MultiHeadAttention" if fused else "products around Softmax"
    print(f"decoder, batch {batch}, {past} tokens before, {form}{', CUDA graph' if graph else ''}, ms a step")
    medians = table(samples, unit="ms", scale=1e-3)
    for label, count in step.xpuruntime_nodes.items():
        gain = statistics.median(samples[PLAIN]) / statistics.median(samples[label])
        print(f"  {label}: {gain:.2f} x, {count} xpuruntime nodes, logits off by {difference[label]:.1e}")
    return {
        "samples_us": samples,
        "median_ms": medians,
        "difference": difference,
        "xpuruntime_nodes": step.xpuruntime_nodes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--part", choices=["cost", "decoder", "all"], default="all")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--past", type=int, nargs="+", default=[127, 511, 1023])
    parser.add_argument("--layers", type=int, default=Sizes().layers)
    parser.add_argument("--vocabulary", type=int, default=Sizes().vocabulary)
    parser.add_argument("--out")
    options = parser.parse_args()
    prepare()
    cuda = options.device != "cpu"
    body: dict[str, Any] = {"device": options.device, "target_percent": TARGET, "target_ns": HOST_TARGET}
    if options.part != "decoder":
        body["host_ns"] = host_cost()
        if cuda:
            body["cost"] = {dtype: device_cost(dtype) for dtype in ("fp16", "bf16", "fp32")}
    if options.part != "cost":
        sizes = Sizes()._replace(layers=options.layers, vocabulary=options.vocabulary)
        body["decoder"] = [
            {
                "batch": batch,
                "past": past,
                "fused_attention": fused,
                "cuda_graph": graph,
                **decoder_case(options.device, batch, past, sizes, fused=fused, graph=graph),
            }
            for batch in options.batches
            for past in options.past
            for fused in ((False, True) if cuda else (False,))
            for graph in ((False, True) if cuda else (False,))
        ]
    write(f"ort_custom_ops_{'cuda' if cuda else 'cpu'}", body, options.out)


if __name__ == "__main__":
    main()
