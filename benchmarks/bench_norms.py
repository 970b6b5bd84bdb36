# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Layer norm and RMS norm beside a copy of the same bytes, PyTorch and CuPy's copy.

python benchmarks/bench_norms.py
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import cupy
import torch

import xpuruntime as xrt
from gpu_timing import copy_bandwidth, graph_times, medians, sets_for
from harness import write

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = ((8192, 4096), (65536, 768))
MORE = ((1, 4096), (128, 4096), (4096, 8192), (16384, 1024))
FORWARD_TARGET, BACKWARD_TARGET = 1.05, 1.10
DTYPE = torch.bfloat16


def tensors(count: int, rows: int, columns: int) -> list[torch.Tensor]:
    return [torch.randn(rows, columns, device="cuda", dtype=DTYPE) for _ in range(count)]


def check(rows: int, columns: int) -> None:
    """Compare with float64 before anything is timed."""
    x, g = tensors(2, rows, columns)
    w, b = (torch.randn(columns, device="cuda", dtype=DTYPE) for _ in range(2))
    out, mean, rstd = xrt.ops.layer_norm(x, w, b, return_stats=True, kernel="cuda_raw")
    leaves = [t.double().requires_grad_() for t in (x, w, b)]
    wanted = torch.nn.functional.layer_norm(leaves[0], (columns,), leaves[1], leaves[2])
    torch.testing.assert_close(out.double(), wanted.detach(), rtol=1.6e-2, atol=3e-2)
    wanted.backward(g.double())
    found = xrt.ops.layer_norm_backward(g, x, mean, rstd, w, has_bias=True, kernel="cuda_raw")
    for ours, leaf in zip(found, leaves, strict=True):
        scale = float(leaf.grad.abs().max())
        torch.testing.assert_close(ours.double() / scale, leaf.grad / scale, rtol=0, atol=1e-2)


def forward_cases(rows: int, columns: int) -> dict[str, list[Callable[[], Any]]]:
    size = rows * columns * 2
    count = sets_for(2 * size)
    xs, outs = tensors(count, rows, columns), tensors(count, rows, columns)
    w, b = (torch.randn(columns, device="cuda", dtype=DTYPE) for _ in range(2))
    views = [(cupy.from_dlpack(x.view(torch.int16)), cupy.from_dlpack(o.view(torch.int16))) for x, o in zip(xs, outs)]

    def cupy_copy(x: Any, out: Any) -> None:
        with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            cupy.copyto(out, x)

    pairs = list(zip(xs, outs))
    ops, functional = xrt.ops, torch.nn.functional
    return {
        "copy (torch)": [lambda x=x, o=o: o.copy_(x) for x, o in pairs],
        "copy (cupy)": [lambda x=x, o=o: cupy_copy(x, o) for x, o in views],
        "layer_norm": [lambda x=x, o=o: ops.layer_norm(x, w, b, out=o, kernel="cuda_raw") for x, o in pairs],
        "rms_norm": [lambda x=x, o=o: ops.rms_norm(x, w, out=o, kernel="cuda_raw") for x, o in pairs],
        "torch layer_norm": [lambda x=x: functional.layer_norm(x, (columns,), w, b) for x in xs],
        "torch rms_norm": [lambda x=x: functional.rms_norm(x, (columns,), w) for x in xs],
    }


def residual_cases(rows: int, columns: int) -> dict[str, list[Callable[[], Any]]]:
    count = sets_for(8 * rows * columns)
    xs, rs, outs, sums = (tensors(count, rows, columns) for _ in range(4))
    w = torch.randn(columns, device="cuda", dtype=DTYPE)
    rms, functional = xrt.ops.rms_norm, torch.nn.functional

    def apart(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + r
        return functional.rms_norm(total, (columns,), w), total

    return {
        "two copies of the bytes": [lambda x=x, r=r, o=o, s=s: (o.copy_(x), s.copy_(r)) for x, r, o, s in
                                    zip(xs, rs, outs, sums)],
        "add + rms_norm": [lambda x=x, r=r, o=o, s=s: rms(x, w, r, return_sum=True, out=o, sum_out=s,
                                                          kernel="cuda_raw") for x, r, o, s in zip(xs, rs, outs, sums)],
        "torch add, rms_norm": [lambda x=x, r=r: apart(x, r) for x, r in zip(xs, rs)],
    }  # fmt: skip


def backward_cases(rows: int, columns: int) -> dict[str, list[Callable[[], Any]]]:
    size = rows * columns * 2
    count = sets_for(3 * size)
    xs, gs, outs, others = (tensors(count, rows, columns) for _ in range(4))
    w, b = (torch.randn(columns, device="cuda", dtype=DTYPE) for _ in range(2))
    stats = [xrt.ops.layer_norm(x, w, b, return_stats=True, kernel="cuda_raw")[1:] for x in xs]
    native = torch.ops.aten.native_layer_norm_backward
    theirs = [torch.ops.aten.native_layer_norm(x, (columns,), w, b, 1e-5)[1:] for x in xs]
    add = torch.add
    ours = xrt.ops.layer_norm_backward
    mask = [True, True, True]
    return {
        # Reads two arrays and writes one, as the gradient does.
        "add of two (same bytes)": [lambda x=x, g=g, o=o: add(x, g, out=o) for x, g, o in zip(xs, gs, outs)],
        "layer_norm_backward": [
            lambda x=x, g=g, s=s, o=o: ours(g, x, *s, w, has_bias=True, grad_x=o, kernel="cuda_raw")
            for x, g, s, o in zip(xs, gs, stats, others)
        ],
        "torch": [lambda x=x, g=g, t=t: native(g, x, (columns,), *t, w, b, mask) for x, g, t in zip(xs, gs, theirs)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    options = parser.parse_args()
    torch.manual_seed(0)
    for rows, columns in ((64, 4096), (1000, 768)):
        check(rows, columns)
    ceiling = copy_bandwidth()
    print(f"copy of 2 GiB: {ceiling / 1e12:.2f} TB/s")
    rows_out = []
    for rows, columns in SHAPES + MORE:
        for what, cases, moved in (
            ("forward", forward_cases, 2),
            ("residual", residual_cases, 4),
            ("backward", backward_cases, 3),
        ):
            samples = graph_times(cases(rows, columns))
            found = medians(samples)
            moved_bytes = moved * rows * columns * 2
            rows_out.append(
                {"what": what, "rows": rows, "columns": columns, "bytes": moved_bytes, "samples_us": samples}
            )
            line = "  ".join(f"{name} {value:.1f}" for name, value in found.items())
            print(f"{what:9} {rows}x{columns}: {line}")
            torch.cuda.empty_cache()
    body = {
        "copy_bytes_per_second": ceiling,
        "dtype": "bfloat16",
        "cases": rows_out,
        "targets": {"forward": FORWARD_TARGET, "backward": BACKWARD_TARGET},
    }
    write("norms_cuda", body, options.out)


if __name__ == "__main__":
    main()
