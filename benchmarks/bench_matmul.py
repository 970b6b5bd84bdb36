# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Matrix products: decode shapes beside cuBLAS and a read of the weights; the tuned choice beside every candidate.

python benchmarks/bench_matmul.py
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import cupy
import torch

import xpuruntime as xrt
from gpu_timing import call_times, graph_times, matmul_rate, medians, sets_for
from harness import write

if TYPE_CHECKING:
    from collections.abc import Callable

#: Rows of a decode step, and the target in microseconds for 4096 x 4096 weights in bf16.
DECODE = {1: 10.2, 2: 10.2, 4: 10.2, 8: 10.2, 16: 10.2, 32: 11.0, 64: 11.0}
WEIGHTS = 32
#: How far the tuned choice may stay behind the best candidate.
TOLERANCE = 0.02
#: m, n, k; odd sizes among them.
GRID = (
    (1, 768, 768), (1, 3072, 768), (1, 768, 3072), (1, 4096, 4096), (1, 11008, 4096), (1, 50257, 768),
    (4, 4096, 4096), (4, 14336, 4096), (7, 1000, 1001), (8, 2304, 768), (16, 4096, 4096), (16, 4096, 11008),
    (17, 4097, 4099), (32, 4096, 4096), (32, 768, 3072), (33, 1111, 2222), (64, 4096, 4096), (64, 11008, 4096),
    (64, 3072, 768), (65, 4096, 4096), (100, 1000, 1000), (128, 768, 768), (128, 4096, 4096), (128, 50257, 768),
    (200, 333, 777), (256, 1024, 1024), (256, 4096, 4096), (257, 513, 1025), (384, 1536, 1536), (512, 512, 512),
    (512, 4096, 11008), (777, 999, 1111), (1000, 1000, 1000), (1024, 768, 3072), (1024, 1024, 1024),
    (1024, 4096, 4096), (1537, 2049, 1023), (2048, 2048, 2048), (2048, 4096, 4096), (2048, 50257, 768),
    (4096, 1024, 4096), (4096, 4096, 4096), (4095, 4097, 4093), (8192, 8192, 1024), (8192, 1024, 8192),
)  # fmt: skip
DTYPE = torch.bfloat16
BEST = xrt.KernelPolicy(matmul="auto", auto_strategy="best_performance")


def check(m: int, n: int, k: int) -> None:
    """Compare every kernel with float64 before anything is timed."""
    a, w = (torch.randn(*shape, device="cuda", dtype=DTYPE) for shape in ((m, k), (n, k)))
    wanted = a.double() @ w.double().t()
    bound = 2**-8 * (wanted.abs() + (a.double().abs() @ w.double().abs().t()) * 2**-10)
    for kernel in ("cublas.cublasLt", "cublas.cublas", *(("cuda_raw.skinny",) if m <= 64 else ())):
        out = torch.full((m, n), float("nan"), device="cuda", dtype=DTYPE)
        xrt.ops.matmul(a, w.t(), out=out, kernel=kernel)
        wrong = ((out.double() - wanted).abs() > bound) | out.isnan()
        if bool(wrong.any()):
            raise SystemExit(f"{kernel} is wrong at {m}x{n}x{k}: {int(wrong.sum())} elements")


class Problem:
    """One shape with rotated weights, `[n, k]` as in a linear layer."""

    def __init__(self, m: int, n: int, k: int, count: int | None = None) -> None:
        self.shape = m, n, k
        self.count = count or sets_for(2 * (m * k + n * k + m * n))
        make = {"device": "cuda", "dtype": DTYPE}
        self.a = [torch.randn(m, k, **make) for _ in range(self.count)]
        self.w = [torch.randn(n, k, **make) for _ in range(self.count)]
        self.out = [torch.empty(m, n, **make) for _ in range(self.count)]
        self.sets = [(a, w.t(), out) for a, w, out in zip(self.a, self.w, self.out)]

    def ours(self, **options: Any) -> list[Callable[[], Any]]:
        matmul = xrt.ops.matmul
        return [lambda a=a, b=b, out=out: matmul(a, b, out=out, **options) for a, b, out in self.sets]

    def torch(self) -> list[Callable[[], Any]]:
        mm = torch.mm
        return [lambda a=a, b=b, out=out: mm(a, b, out=out) for a, b, out in self.sets]

    def serves(self, kernel: str) -> bool:
        try:
            xrt.ops.matmul(self.a[0], self.w[0].t(), out=self.out[0], kernel=kernel)
        except xrt.UnsupportedOperationError:
            return False
        return True


def cupy_times(problem: Problem) -> list[float]:
    """Time CuPy's product in float16; bfloat16 it has not. Its cuBLAS cannot be captured, so the host counts too."""
    as_cupy = [[cupy.from_dlpack(t.to(torch.float16)) for t in tensors] for tensors in (problem.a, problem.w)]
    outs = [cupy.empty(out.shape, cupy.float16) for out in problem.out]

    def run() -> None:
        with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            for a, w, out in zip(*as_cupy, outs):
                cupy.matmul(a, w.T, out=out)

    calls = max(1, 20 // len(outs))
    return [us / len(outs) for us in call_times({"cupy": run}, rounds=5, calls=calls)["cupy"]]


def read_case(problem: Problem) -> list[Callable[[], Any]]:
    """Give a kernel that only reads the weights: the floor of a decode step."""
    read = cupy.RawKernel(
        r"""
        extern "C" __global__ void __launch_bounds__(512)
        read(const uint4* __restrict__ data, long long count, unsigned* out) {
          unsigned sum = 0;
          const long long stride = (long long)gridDim.x * blockDim.x;
          long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
          for (; i + 7 * stride < count; i += 8 * stride) {
            uint4 v[8];
            #pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = __ldcs(data + i + j * stride);
            #pragma unroll
            for (int j = 0; j < 8; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
          }
          for (; i < count; i += stride) { const uint4 v = __ldcs(data + i); sum ^= v.x ^ v.y ^ v.z ^ v.w; }
          if (sum == 0x12345678u) out[0] = sum;
        }""",
        "read",
    )
    sink = cupy.zeros(1, cupy.uint32)
    count = problem.w[0].numel() // 8

    def run(weight: torch.Tensor) -> None:
        with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            read((264,), (512,), (cupy.uint64(weight.data_ptr()), cupy.int64(count), sink))

    return [lambda w=w: run(w) for w in problem.w]


def decode() -> list[dict[str, Any]]:
    rows = []
    for m, target in DECODE.items():
        problem = Problem(m, 4096, 4096, WEIGHTS)
        cases = {
            "read of the weights": read_case(problem),
            "cuda_raw.skinny": problem.ours(kernel="cuda_raw.skinny"),
            "auto": problem.ours(policy=BEST),
            "cublas.cublasLt": problem.ours(kernel="cublas.cublasLt"),
            "torch": problem.torch(),
        }
        samples = graph_times(cases)
        found = medians(samples)
        rows.append({"m": m, "n": 4096, "k": 4096, "target_us": target, "samples_us": samples})
        print(f"decode m={m:3}: " + "  ".join(f"{name} {value:.2f}" for name, value in found.items()))
    return rows


def grid() -> list[dict[str, Any]]:
    rows = []
    for m, n, k in GRID:
        problem = Problem(m, n, k)
        cases = {"auto": problem.ours(policy=BEST)}
        for kernel in ("cublas.cublasLt", "cublas.cublas", "cuda_raw.skinny"):
            if problem.serves(kernel):
                cases[kernel] = problem.ours(kernel=kernel)
        cases["torch"] = problem.torch()
        samples = graph_times(cases, rounds=11, milliseconds=2.0)
        samples["cupy (float16)"] = cupy_times(problem)
        found = medians(samples)
        best = min((value, name) for name, value in found.items() if name not in ("auto", "cupy (float16)"))
        ratio = found["auto"] / best[0]
        chosen = next(
            entry for entry in reversed(xrt.decisions())
            if entry.asked_by == "kernels.matmul" and entry.source in ("tuned", "first")
        )  # fmt: skip
        picked = chosen.kernel
        rows.append({"m": m, "n": n, "k": k, "chosen": picked, "samples_us": samples})
        mark = "" if ratio <= 1 + TOLERANCE else "  <-- behind"
        shape = f"{m:5}x{n:5}x{k:5}"
        print(f"{shape}  auto {found['auto']:9.2f}  best {best[0]:9.2f} ({best[1]})  {ratio:.3f}{mark}  {picked[:60]}")
        del problem, cases
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    options = parser.parse_args()
    torch.manual_seed(0)
    for shape in ((1, 4096, 4096), (16, 768, 3072), (64, 1111, 2222), (257, 513, 1025)):
        check(*shape)
    ceiling = matmul_rate()
    print(f"bf16 product of 8192: {ceiling / 1e12:.0f} TFLOP/s")
    body = {
        "dtype": "bfloat16",
        "flop_per_second": ceiling,
        "decode": decode(),
        "grid": grid(),
        "targets": {"behind_best": TOLERANCE},
    }
    write("matmul_cuda", body, options.out)


if __name__ == "__main__":
    main()
