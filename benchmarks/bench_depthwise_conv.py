# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Depthwise convolutions of MobileNetV2, EfficientNet-B0 and ConvNeXt-T beside cuDNN, PyTorch and a copy.

python benchmarks/bench_depthwise_conv.py
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

import xpuruntime as xrt
from gpu_timing import copy_bandwidth, graph_times, medians, sets_for
from harness import write

if TYPE_CHECKING:
    from collections.abc import Callable

#: Model, batch, channels, side of the image, window, stride.
SHAPES = (
    ("MobileNetV2", 32, 32, 112, 3, 1),
    ("MobileNetV2", 32, 96, 112, 3, 2),
    ("MobileNetV2", 32, 144, 56, 3, 1),
    ("MobileNetV2", 32, 384, 14, 3, 1),
    ("MobileNetV2", 32, 960, 7, 3, 1),
    ("EfficientNet-B0", 32, 144, 56, 5, 2),
    ("EfficientNet-B0", 32, 240, 28, 5, 1),
    ("EfficientNet-B0", 32, 672, 14, 5, 1),
    ("EfficientNet-B0", 32, 1152, 7, 5, 1),
    ("ConvNeXt-T", 32, 96, 56, 7, 1),
    ("ConvNeXt-T", 32, 192, 28, 7, 1),
    ("ConvNeXt-T", 32, 384, 14, 7, 1),
    ("ConvNeXt-T", 32, 768, 7, 7, 1),
    ("MobileNetV2", 1, 144, 56, 3, 1),
    ("ConvNeXt-T", 1, 384, 14, 7, 1),
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
OURS = "cuda_raw.depthwise_conv"
KERNELS = (OURS, "cudnn.conv_heuristic")


def cases(
    kernels: tuple[str, ...],
    batch: int,
    channels: int,
    side: int,
    window: int,
    stride: int,
    dtype: torch.dtype,
    layout: torch.memory_format,
) -> tuple[dict[str, list[Callable[[], Any]]], dict[str, str], int]:
    """Return the calls of each way, why some cannot serve, and the bytes that one has to move."""
    size = batch * channels * side * side
    out_size = size // stride**2  # the sides are even where the stride is 2
    count = sets_for((size + out_size) * dtype.itemsize)
    how: dict[str, Any] = {"stride": stride, "padding": window // 2, "groups": channels}
    xs = [
        torch.randn(batch, channels, side, side, device="cuda").to(dtype).contiguous(memory_format=layout)
        for _ in range(count)
    ]
    weight = (torch.randn(channels, 1, window, window, device="cuda") / window).to(dtype)
    theirs = weight.contiguous(memory_format=layout)
    exact = functional.conv2d(xs[0].double(), weight.double(), **how)
    outs = [torch.empty_like(exact, dtype=dtype).contiguous(memory_format=layout) for _ in range(count)]
    found: dict[str, list[Callable[[], Any]]] = {"torch": [lambda x=x: functional.conv2d(x, theirs, **how) for x in xs]}
    if stride == 1:
        found["copy"] = [lambda x=x, o=o: o.copy_(x) for x, o in zip(xs, outs, strict=True)]
    refused = {}
    for kernel in kernels:
        try:
            outs[0].fill_(float("nan"))
            xrt.ops.conv2d(xs[0], weight, out=outs[0], kernel=kernel, **how)
        except xrt.UnsupportedOperationError as error:
            refused[kernel] = str(error).splitlines()[-1]
            continue
        scale = float(exact.abs().max())
        torch.testing.assert_close(outs[0].double() / scale, exact / scale, rtol=0, atol=1e-2)
        found[kernel] = [
            lambda x=x, o=o, k=kernel: xrt.ops.conv2d(x, weight, out=o, kernel=k, **how)
            for x, o in zip(xs, outs, strict=True)
        ]
    return found, refused, (size + out_size) * dtype.itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--exhaustive", action="store_true", help="also cudnn.conv_exhaustive: seconds for each shape")
    options = parser.parse_args()
    kernels = (*KERNELS, "cudnn.conv_exhaustive") if options.exhaustive else KERNELS
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True  # PyTorch's fastest: cuDNN's algorithms by timing, where it calls cuDNN
    torch.backends.cudnn.allow_tf32 = False
    ceiling = copy_bandwidth()
    print(f"copy of 2 GiB: {ceiling / 1e12:.2f} TB/s")
    rows = []
    for name in options.dtypes:
        for layout, order in LAYOUTS.items():
            for model, *shape in SHAPES:
                calls, refused, moved = cases(kernels, *shape, DTYPES[name], order)
                samples = graph_times(calls, rounds=9, milliseconds=2.0)
                batch, channels, side, window, stride = shape
                rows.append(
                    {
                        "model": model, "dtype": name, "layout": layout, "batch": batch, "channels": channels,
                        "side": side, "window": window, "stride": stride, "bytes": moved, "refused": refused,
                        "samples_us": samples,
                    }
                )  # fmt: skip
                times = medians(samples)
                line = "  ".join(f"{way} {us:.1f}" for way, us in times.items())
                best = min(us for way, us in times.items() if way not in (OURS, "copy"))
                print(
                    f"{name} {layout} {model:15} {batch}x{channels}x{side} {window}x{window}/{stride}: {line}  "
                    f"(floor {moved / ceiling * 1e6:.1f}, {best / times[OURS]:.2f} x the best other)",
                    flush=True,
                )
                del calls
                torch.cuda.empty_cache()
    write("depthwise_conv_cuda", {"copy_bytes_per_second": ceiling, "cases": rows}, options.out)


if __name__ == "__main__":
    main()
