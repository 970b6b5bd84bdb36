# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention, forward and backward, beside PyTorch's own kernels.

python benchmarks/bench_attention.py
"""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import xpuruntime as xrt
from gpu_timing import call_times, matmul_rate, medians
from harness import write
from xpuruntime.printable import error_line

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPE = torch.bfloat16
BEST = xrt.KernelPolicy(attention="auto", auto_strategy="best_performance")
KERNELS = ("cuda_raw.flash_attention_v2", "cudnn.sdpa")
THEIRS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TARGETS = {"flash_forward": 308e12, "flash_backward": 200e12, "behind_best": 0.02}


class Shape(NamedTuple):
    """Sizes of one attention."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: bool

    def flops(self, products: int) -> float:
        """Return the floating point operations of this many products, half of them where causal."""
        whole = 2.0 * products * self.batch * self.heads * self.length**2 * self.head_dim
        return whole / 2 if self.causal else whole


#: The first is the one that the targets are about.
SHAPES = (
    Shape(4, 16, 16, 4096, 128, True),
    Shape(4, 16, 16, 4096, 128, False),
    Shape(4, 32, 8, 4096, 128, True),
    Shape(4, 16, 16, 4096, 64, True),
    Shape(16, 16, 16, 1024, 128, True),
    Shape(32, 16, 16, 512, 64, False),
    Shape(1, 16, 16, 16384, 128, True),
    Shape(2, 16, 16, 4096, 96, True),
    Shape(2, 8, 8, 4096, 256, True),
    Shape(8, 12, 12, 1023, 64, True),
)


def operands(shape: Shape) -> tuple[torch.Tensor, ...]:
    def make(heads: int) -> torch.Tensor:
        return torch.randn(shape.batch, heads, shape.length, shape.head_dim, device="cuda", dtype=DTYPE)

    return make(shape.heads), make(shape.kv_heads), make(shape.kv_heads), make(shape.heads)


def check(shape: Shape) -> None:
    """Compare our kernels with float64 before anything is timed."""
    q, k, v, g = operands(shape)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    repeat = shape.heads // shape.kv_heads
    wide = [leaves[0], *(t.repeat_interleave(repeat, 1) for t in leaves[1:])]
    with sdpa_kernel(SDPBackend.MATH):
        wanted = scaled_dot_product_attention(*wide, is_causal=shape.causal)
    wanted.backward(g.double())
    for kernel in KERNELS:
        out, lse = xrt.ops.attention(q, k, v, is_causal=shape.causal, return_lse=True, kernel=kernel)
        torch.testing.assert_close(out.double(), wanted.detach(), rtol=2e-2, atol=2e-2)
        found = xrt.ops.attention_backward(g, q, k, v, out, lse, is_causal=shape.causal, kernel=kernel)
        for ours, leaf in zip(found, leaves, strict=True):
            scale = float(leaf.grad.abs().max())
            torch.testing.assert_close(ours.double() / scale, leaf.grad / scale, rtol=0, atol=2e-2)


def forward_cases(shape: Shape) -> dict[str, Callable[[], Any]]:
    q, k, v, _ = operands(shape)
    out = torch.empty_like(q)
    attention = xrt.ops.attention

    def ours(**options: Any) -> Callable[[], Any]:
        return lambda: attention(q, k, v, is_causal=shape.causal, out=out, **options)

    def theirs(backend: SDPBackend) -> Callable[[], Any]:
        def run() -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
                )

        return run

    cases = {"auto": ours(policy=BEST), **{kernel: ours(kernel=kernel) for kernel in KERNELS}}
    return _that_run(cases | {name: theirs(backend) for name, backend in THEIRS.items()})


def backward_cases(shape: Shape) -> dict[str, Callable[[], Any]]:
    q, k, v, g = operands(shape)
    out, lse = xrt.ops.attention(q, k, v, is_causal=shape.causal, return_lse=True, kernel=KERNELS[0])
    grads = {f"grad_{name}": torch.empty_like(t) for name, t in (("q", q), ("k", k), ("v", v))}
    backward = xrt.ops.attention_backward

    def ours(**options: Any) -> Callable[[], Any]:
        return lambda: backward(g, q, k, v, out, lse, is_causal=shape.causal, **grads, **options)

    def theirs(backend: SDPBackend) -> Callable[[], Any]:
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        grouped = shape.heads != shape.kv_heads
        try:
            with sdpa_kernel(backend):
                result = scaled_dot_product_attention(*leaves, is_causal=shape.causal, enable_gqa=grouped)
        except RuntimeError as error:
            message = str(error)

            def refuse() -> Any:
                raise RuntimeError(message)

            return refuse
        return lambda: torch.autograd.grad(result, leaves, g, retain_graph=True)

    cases = {"auto": ours(policy=BEST), **{kernel: ours(kernel=kernel) for kernel in KERNELS}}
    return _that_run(cases | {name: theirs(backend) for name, backend in THEIRS.items()})


def _that_run(cases: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    kept = {}
    for name, run in cases.items():
        try:
            run()
        except (RuntimeError, xrt.UnsupportedOperationError) as error:
            print(f"  {name} does not serve this: {error_line(error)[:110]}")
            continue
        kept[name] = run
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    options = parser.parse_args()
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # PyTorch's, about kernels of its own that do not serve
    for shape in (Shape(2, 4, 2, 333, 128, True), Shape(1, 4, 4, 512, 64, False)):
        check(shape)
    rows = []
    for shape in SHAPES:
        for what, make, products in (("forward", forward_cases, 2), ("backward", backward_cases, 5)):
            samples = call_times(make(shape), calls=10 if shape.length > 2048 else 30)
            found = medians(samples)
            flops = shape.flops(products)
            rows.append({"what": what, **shape._asdict(), "flop": flops, "samples_us": samples})
            rates = "  ".join(f"{name} {flops / value / 1e6:.0f}" for name, value in found.items())
            print(f"{what:8} {tuple(shape)}: TFLOP/s  {rates}")
            torch.cuda.empty_cache()
    body = {"dtype": "bfloat16", "flop_per_second": matmul_rate(), "cases": rows, "targets": TARGETS}
    write("attention_cuda", body, options.out)


if __name__ == "__main__":
    main()
