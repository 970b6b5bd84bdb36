# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""ResNet-50 at batch 1 and 32 on CUDA: plain ONNX Runtime, xpuruntime by default, and the best policy found by hand.

    python benchmarks/bench_resnet.py

Random weights (seed 0): speed does not depend on them. Every case starts and ends with a torch tensor on the device,
except those marked NumPy.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import xpuruntime as xrt
from harness import interleaved, table, write

POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "fp32": {"execution": {"precision": "fp32"}},
    "tf32 nhwc graph": {
        "execution": {"precision": "tf32", "layout": "nhwc", "cuda_graph": "require"},
        "kernels": {"conv": "cudnn_exhaustive"},
    },
    "fp16 nhwc graph": {
        "execution": {"precision": "fp16", "layout": "nhwc", "cuda_graph": "require"},
        "kernels": {"conv": "cudnn_exhaustive"},
    },
    "fp16 nchw graph": {
        "execution": {"precision": "fp16", "cuda_graph": "require"},
        "kernels": {"conv": "cudnn_exhaustive"},
    },
}


def export(folder: Path) -> Path:
    """Export torchvision's ResNet-50 with a free batch."""
    import torch
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None).eval()
    path = folder / "resnet50.onnx"
    batch = torch.export.Dim("N", min=1, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (torch.randn(2, 3, 224, 224),),
            str(path),
            input_names=["image"],
            output_names=["logits"],
            dynamic_shapes=({0: batch},),
            opset_version=18,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    return path


def plain_cases(path: Path, x: Any) -> dict[str, Any]:
    """ONNX Runtime as its own users call it."""
    import torch

    raw = ort.InferenceSession(str(path), providers=["CUDAExecutionProvider"])
    name = raw.get_inputs()[0].name
    host = x.cpu().numpy()
    y = torch.empty(x.shape[0], 1000, device="cuda")

    no_wait = ort.RunOptions()
    no_wait.add_run_config_entry("disable_synchronize_execution_providers", "1")
    no_wait.add_run_config_entry("gpu_graph_id", "-1")  # a missing entry costs an exception in each call

    def bound(session: Any, options: Any = None) -> Any:
        io = session.io_binding()
        io.bind_input(name, "cuda", 0, np.float32, tuple(x.shape), x.data_ptr())
        io.bind_output("logits", "cuda", 0, np.float32, tuple(y.shape), y.data_ptr())
        return lambda: session.run_with_iobinding(io, options)

    nhwc = ort.InferenceSession(str(path), providers=[("CUDAExecutionProvider", {"prefer_nhwc": "1"})])
    return {
        "onnxruntime run, NumPy": lambda: raw.run(None, {name: host}),
        "onnxruntime IO binding": bound(raw),
        "onnxruntime IO binding, no host wait": bound(raw, no_wait),
        "onnxruntime IO binding, NHWC by hand": bound(nhwc),
        "onnxruntime IO binding, NHWC by hand, no host wait": bound(nhwc, no_wait),
    }


def our_cases(path: Path, x: Any, want: Any) -> tuple[dict[str, Any], dict[str, float], list[Any]]:
    """Our sessions under each policy, each checked against fp32 on the same input."""
    cases: dict[str, Any] = {}
    errors: dict[str, float] = {}
    keep: list[Any] = []
    for label, policy in POLICIES.items():
        execution = {"device": "cuda:0", **policy.get("execution", {})}
        try:
            session = xrt.InferenceSession(path, policy={**policy, "execution": execution})
        except xrt.XpuRuntimeError as error:
            print(f"  xpuruntime {label}: refused: {str(error)[:200]}")
            continue
        name = session.inputs[0].name
        binding = session.bind({name: x})
        binding.run()
        errors[label] = float((binding.outputs["logits"].double() - want).abs().max() / want.abs().max())
        if label == "default":
            host = x.cpu().numpy()
            cases["xpuruntime default run, NumPy"] = lambda s=session, n=name, h=host: s.run({n: h})
            cases["xpuruntime default run, torch"] = lambda s=session, n=name: s.run({n: x})
        cases[f"xpuruntime {label}, bound"] = binding.run
        keep += [session, binding]
    return cases, errors, keep


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--out")
    options = parser.parse_args()
    body: dict[str, Any] = {"policies": POLICIES, "batches": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = export(Path(folder))
        for batch in (1, 32):
            x = torch.randn(batch, 3, 224, 224, device="cuda", generator=torch.Generator("cuda").manual_seed(batch))
            with xrt.InferenceSession(path, device="cpu") as reference:
                (logits,) = reference.run({reference.inputs[0].name: x.cpu().numpy()}).values()
            want = torch.from_numpy(logits).cuda().double()
            ours, errors, keep = our_cases(path, x, want)
            cases = {**plain_cases(path, x), **ours}
            finish = torch.cuda.synchronize
            samples = interleaved(cases, calls=options.calls, rounds=options.rounds, warm=10, finish=finish)
            print(f"ResNet-50, batch {batch}, milliseconds a call")
            medians = table(samples, unit="ms", scale=1e-3)
            for label, error in errors.items():
                print(f"  error of {label}: {error:.2e} of the largest logit, against fp32 on the CPU")
            body["batches"][str(batch)] = {"samples_us": samples, "median_ms": medians, "relative_error": errors}
            del keep, cases, ours
    write("resnet50_cuda", {**body, "calls": options.calls}, options.out)


if __name__ == "__main__":
    main()
