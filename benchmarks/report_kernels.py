# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The sections of ``docs/benchmarks.md`` about single operations."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from report_parts import Check, Section, machine, number, spread, table, target_table

if TYPE_CHECKING:
    from collections.abc import Callable

OURS = ("auto", "cuda_raw", "cublas", "cudnn", "cpu")


def medians(case: dict[str, Any]) -> dict[str, float]:
    """Return the median of each row of one case, in microseconds."""
    return {name: statistics.median(values) for name, values in case["samples_us"].items()}


NORMS_BOUND = """
What bounds the rows that miss: the statistics of a row are known only when all of it was read, so a block writes after
it has read, where a copy does both all the time. More rows in flight, persistent blocks and bulk copies were tried and
were slower. The gradient also adds the weight's and the bias's partial sums, and a second, small kernel joins them; the
kernel that it is compared with moves its bytes faster than a copy does.
"""
MATMUL_BOUND = """
What bounds the decode shapes from 16 rows on: each multiprocessor reads `a` again for its columns, so the traffic from
L2 grows with the rows, to as many bytes as the weights at 64. That is an estimate from bytes, not from counters. The
kernel that only reads the weights is launched plainly; `cuda_raw.skinny` begins to fetch before the kernel in front of
it has ended, which is how it comes below. Where the tuned choice is behind, its own measurement had another winner a
moment earlier.
"""


def norms(record: dict[str, Any]) -> Section:
    """Norms beside a copy of the same bytes."""
    ceiling = record["copy_bytes_per_second"]
    parts, checks = [], []
    floors = {"forward": "copy (torch)", "residual": "two copies of the bytes", "backward": "add of two (same bytes)"}
    for case in record["cases"]:
        found = medians(case)
        floor = found[floors[case["what"]]]
        rows = [
            [name, number(us), number(us / floor), f"{case['bytes'] / us * 1e6 / ceiling:.0%}"]
            for name, us in found.items()
        ]
        shape = f"{case['rows']} x {case['columns']}"
        parts.append(table((f"{case['what']}, {shape}", "µs", "to the same bytes", "of the copy ceiling"), rows))
        ours = {"forward": ("layer_norm", "rms_norm"), "backward": ("layer_norm_backward",), "residual": ()}
        if case["rows"] * case["columns"] >= 1 << 25:
            target = record["targets"].get(case["what"])
            checks += [Check(f"{name}, {shape}", found[name], floor * target, "µs") for name in ours[case["what"]]]
    text = (
        "How close do layer norm and RMS norm come to copying the same bytes? bfloat16; the residual case adds two "
        "arrays, returns the sum and normalizes it.\n\n"
        f"{machine(record)}\n`python benchmarks/bench_norms.py`: the ceiling is a copy of 2 GiB, "
        f"{ceiling / 1e12:.2f} TB/s. The targets are 1.05 and, backward, 1.10 times the same bytes; small shapes, "
        "which L2 or the launch decide, have none.\n\n" + "\n".join(parts) + f"\n{target_table(checks)}{NORMS_BOUND}"
    )
    return Section("Norms on CUDA", text, tuple(checks))


def depthwise(record: dict[str, Any]) -> Section:
    """Depthwise convolutions beside the fastest of cuDNN and PyTorch."""
    ceiling, ours = record["copy_bytes_per_second"], "cuda_raw.depthwise_conv"
    rows = []
    for case in record["cases"]:
        found = medians(case)
        others = {name: us for name, us in found.items() if name not in (ours, "copy")}
        best = min(others, key=others.__getitem__)
        rows.append(
            [
                case["model"], f"{case['dtype']} {case['layout']}",
                f"{case['batch']} x {case['channels']} x {case['side']}²", f"{case['window']}², /{case['stride']}",
                number(found[ours]), number(found["torch"]), best, number(others[best]),
                number(others[best] / found[ours]), f"{case['bytes'] / found[ours] * 1e6 / ceiling:.0%}",
            ]
        )  # fmt: skip
    heads = (
        "model", "type, layout", "x", "window, stride", "`cuda_raw`, µs", "torch, µs", "fastest other", "µs", "ratio",
        "of the copy ceiling",
    )  # fmt: skip
    text = (
        "Is the depthwise convolution of xpuruntime faster than cuDNN's plans and PyTorch's kernel? A ratio above 1 "
        "says that it is; PyTorch times cuDNN's algorithms (`cudnn.benchmark`) where it calls cuDNN.\n\n"
        f"{machine(record)}\n`python benchmarks/bench_depthwise_conv.py`: the ceiling is a copy of 2 GiB, "
        f"{ceiling / 1e12:.2f} TB/s.\n\n{table(heads, rows)}"
    )
    return Section("Depthwise convolutions on CUDA", text, ())


def matmul(record: dict[str, Any]) -> Section:
    """Decode shapes, then the tuned choice over the grid."""
    checks = []
    rows = []
    for case in record["decode"]:
        found = medians(case)
        rows.append([str(case["m"]), *(number(us) for us in found.values())])
        best = min(found["auto"], found["cuda_raw.skinny"])
        checks.append(Check(f"decode, {case['m']} rows, fastest of xpuruntime", best, case["target_us"], "µs"))
    decode = table(("rows", *medians(record["decode"][0])), rows)
    rows, behind, worst = [], 0, 0.0
    for case in record["grid"]:
        found = medians(case)
        others = {name: us for name, us in found.items() if name not in ("auto", "cupy (float16)")}
        name = min(others, key=lambda other: others[other])
        ratio = found["auto"] / others[name]
        worst = max(worst, ratio)
        behind += ratio > 1 + record["targets"]["behind_best"]
        rate = 2 * case["m"] * case["n"] * case["k"] / (found["auto"] * 1e-6) / record["flop_per_second"]
        first = found.get("cublas.cublasLt")
        rows.append([
            f"{case['m']} x {case['n']} x {case['k']}", number(found["auto"]), f"`{case['chosen'].partition('@')[0]}`",
            number(others[name]), name, number(ratio), number(first / found["auto"]) if first else "-",
            number(found["torch"] / found["auto"]), number(found["cupy (float16)"]), f"{rate:.0%}",
        ])  # fmt: skip
    head = ("m x n x k", "auto, µs", "chosen", "best other, µs", "which", "auto to best", "cublasLt first to auto",
            "torch to auto", "CuPy float16, µs", "of the matmul ceiling")  # fmt: skip
    checks.append(Check(f"auto over the best candidate, worst of {len(rows)} shapes", worst, 1.02, "times"))
    text = (
        "How fast is a matrix product with few rows, and does the tuned choice ever lose? bfloat16, weights `[n, k]` "
        f"as in a linear layer.\n\n{machine(record)}\n`python benchmarks/bench_matmul.py`: decode shapes have 4096 x "
        "4096 weights, 32 of them in turn inside one CUDA graph. The first column of figures is a kernel that only "
        f"reads the weights. µs a call:\n\n{decode}\n{len(rows)} shapes; `auto` is "
        "`auto_strategy: best_performance` with a cold tuning cache, which measured every kernel and up to 8 "
        f"algorithms of cuBLASLt when the shape was first seen. {behind} of {len(rows)} are more than 2 % behind the "
        "best candidate. CuPy's product cannot be captured into a graph, so its host time counts. The ceiling is "
        f"torch's product of 8192 x 8192 x 8192, {record['flop_per_second'] / 1e12:.0f} TFLOP/s.\n\n"
        f"{table(head, rows)}\n{target_table(checks)}{MATMUL_BOUND}"
    )
    return Section("Matrix products on CUDA", text, tuple(checks))


def attention(record: dict[str, Any]) -> Section:
    """Attention in TFLOP/s."""
    columns = list(dict.fromkeys(name for case in record["cases"] for name in case["samples_us"]))
    parts, checks = [], []
    for what in ("forward", "backward"):
        rows = []
        for index, case in enumerate(one for one in record["cases"] if one["what"] == what):
            found = medians(case)
            shape = f"{case['batch']} x {case['heads']}/{case['kv_heads']} x {case['length']} x {case['head_dim']}"
            label = shape + (", causal" if case["causal"] else "")
            rates = [f"{case['flop'] / found[name] / 1e6:.0f}" if name in found else "-" for name in columns]
            share = case["flop"] / (found["auto"] * 1e-6) / record["flop_per_second"]
            rows.append([label, *rates, f"{share:.0%}"])
            others = [us for name, us in found.items() if name != "auto"]
            limit = min(others) * (1 + record["targets"]["behind_best"])
            checks.append(Check(f"auto, {what}, {label}", found["auto"], limit, "µs"))
            if index == 0:
                flash = found["cuda_raw.flash_attention_v2"]
                target = case["flop"] / record["targets"][f"flash_{what}"] * 1e6
                checks.append(Check(f"cuda_raw.flash_attention_v2, {what}, {label}", flash, target, "µs"))
        parts.append(table((f"{what}, TFLOP/s", *columns, "auto, of the matmul ceiling"), rows))
    text = (
        "How fast is attention, beside PyTorch's own kernels? bfloat16; batch x heads/kv_heads x length x head_dim.\n"
        "Causal work counts half.\n\n"
        f"{machine(record)}\n`python benchmarks/bench_attention.py`: PyTorch's backward goes through its autograd. The "
        f"ceiling is torch's product of 8192 x 8192 x 8192, {record['flop_per_second'] / 1e12:.0f} TFLOP/s. The "
        "targets are 308 TFLOP/s forward and 200 backward for `cuda_raw.flash_attention_v2` in the first shape, "
        "and for `auto` the best row less 2 %.\n\n" + "\n".join(parts) + f"\n{target_table(checks)}"
    )
    return Section("Attention on CUDA", text, tuple(checks))


def providers(record: dict[str, Any]) -> Section:
    """Kernels of other packages beside PyTorch's and this library's, and what `auto` takes."""
    groups: dict[str, list[tuple[str, dict[str, list[float]]]]] = {}
    checks, first = [], {}
    for case in record["cases"]:
        names = ("batch", "heads", "kv_heads", "length", "head_dim", "rows", "columns")
        sizes = " x ".join(str(case[name]) for name in names if name in case)
        label = f"{sizes}, causal" if case.get("causal") else sizes
        called = "called" if ", compiled" in case["what"] else "eager"
        for key, way in (("eager_us", called), ("samples_us", "in a graph")):
            if key in case:
                title = case["what"] if case["what"].endswith("host") else f"{case['what']}, {way}"
                groups.setdefault(title, []).append((label, case[key]))
        checks += [Check(f"{case['what']}, {label}: {name}", *bar, "") for name, bar in case["bars"].items()]
        first |= {name: max(first.get(name, 0.0), seconds) for name, seconds in case["first_call_s"].items()}
    parts = []
    for title, rows in groups.items():
        columns = list(dict.fromkeys(name for _, samples in rows for name in samples))
        lines = [
            [label, *(number(statistics.median(one[n])) if n in one else "-" for n in columns)] for label, one in rows
        ]
        parts.append(table((f"{title}, µs", *columns), lines))
    refused = [f"{case['what']}, {name}: {why}" for case in record["cases"] for name, why in case["refused"].items()]
    named = "\nLargest difference from float64, in parts of the largest number:\n\n"
    far = [
        f"* {case['what']}, {case['batch']} x {case['heads']} x {case['length']} x {case['head_dim']}: "
        + ", ".join(f"{name} {'NaN' if one is None else number(one)}" for name, one in case["differs"].items())
        for case in record["cases"]
        if "differs" in case
    ]
    notes = "".join(f"* {' '.join(sentence.split())}\n" for sentence in dict.fromkeys(refused))
    longest = ", ".join(f"{name} {number(seconds)} s" for name, seconds in first.items() if seconds >= 1)
    text = (
        "How fast are kernels of Liger, quack and FlashAttention 4 through a policy, beside PyTorch's, Inductor's and "
        "this library's, and does `auto` take the fastest? bfloat16; each kernel was compared with float64 before it "
        f"was timed.\n\n{machine(record)}\n"
        "`python benchmarks/bench_providers.py`: cases of a row run in turns.\n\n"
        + (f"{record['remark']}\n\n" if "remark" in record else "") + "\n".join(parts)
        + (f"\nLongest first call, comparing and compiling included: {longest}.\n" if longest else "")
        + (named + "\n".join(far) + "\n" if far else "")
        + (f"\nDid not serve:\n\n{notes}" if notes else "")
        + f"\n{target_table(checks)}"
    )  # fmt: skip
    return Section("Kernels of other packages", text, tuple(checks))


def dispatch(record: dict[str, Any]) -> Section:
    """Host cost of an operation."""
    samples, device = record["samples_us"], record["device"]
    rows = [[name, *(number(value) for value in spread(values))] for name, values in samples.items()]
    found = {name: statistics.median(values) for name, values in samples.items()}
    checks = [
        Check(f"cached choice, {name}", value, record["targets"]["cached_choice_ns"], "ns")
        for name, value in record["cached_choice_ns"].items()
    ]
    if "torch.mm" in found:
        checks.append(Check("xrt.ops.matmul, host, against torch.mm", found["xrt.ops.matmul"], found["torch.mm"], "µs"))
    text = (
        "What does an operation cost the host? A choice that was made before, measured in C++, and whole calls from "
        f"Python.\n\n{machine(record)}\n`python benchmarks/bench_dispatch.py --device {device}`\n\n"
        f"{table(('µs a call', 'median', 'p10', 'p90'), rows)}\n{target_table(checks)}"
    )
    return Section(f"Cost of an operation on {device}", text, tuple(checks))


#: Result name to what writes its section, in the order of the page.
KERNEL_SECTIONS: dict[str, Callable[[dict[str, Any]], Section]] = {
    "dispatch_cpu": dispatch,
    "dispatch_cuda": dispatch,
    "norms_cuda": norms,
    "matmul_cuda": matmul,
    "depthwise_conv_cuda": depthwise,
    "attention_cuda": attention,
    "providers_cuda": providers,
}
