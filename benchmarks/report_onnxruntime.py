# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The section of ``docs/benchmarks.md`` about xpuruntime kernels inside ONNX Runtime."""

from __future__ import annotations

import statistics
from typing import Any

from report_parts import Check, Section, machine, number, table, target_table

PLAIN = "onnxruntime"


def costs(record: dict[str, Any]) -> tuple[list[str], list[Check]]:
    """Return chains of one operator, stock and of xpuruntime; a target where the same kernels ran."""
    parts, checks = [], []
    for dtype, cases in record.get("cost", {}).items():
        rows = []
        for title, modes in cases.items():
            for mode, result in modes.items():
                found = {label: statistics.median(values) for label, values in result["samples_us"].items()}
                what = f"{title}, {'CUDA graph' if mode == 'graph' else 'plain'}"
                for label, us in found.items():
                    same = result["kernels"][label] == result["kernels"]["stock"]
                    kernels = "-" if label == "stock" else "the same" if same else "others"
                    off = "-" if label == "stock" else f"{result['difference'][label]:.1e}"
                    rows.append([what, label, number(us), number(us / found["stock"]), kernels, off])
                    if same and label != "stock":
                        target = found["stock"] * (1 + record["target_percent"] / 100)
                        checks.append(Check(f"{what}, {dtype}, {label}", us, target, "µs"))
        head = (f"{dtype}, four in a row", "kernel asked for", "µs", "to stock", "kernels", "difference")
        parts.append(table(head, rows))
    return parts, checks


def steps(record: dict[str, Any]) -> tuple[list[str], list[Check]]:
    """Return steps of the decoder; the fastest of xpuruntime is compared with ONNX Runtime alone."""
    rows, checks = [], []
    for case in record.get("decoder", ()):
        found = {label: statistics.median(values) / 1e3 for label, values in case["samples_us"].items()}
        form = "MultiHeadAttention" if case["fused_attention"] else "products"
        mode = ", CUDA graph" if case["cuda_graph"] else ""
        what = f"batch {case['batch']}, {case['past']} tokens before, {form}{mode}"
        for label, ms in found.items():
            count, off = case["xpuruntime_nodes"].get(label, 0), case["difference"][label]
            rows.append([what, label, f"{ms:.3f}", number(found[PLAIN] / ms), str(count), f"{off:.1e}"])
        ours = {label: ms for label, ms in found.items() if case["xpuruntime_nodes"].get(label)}
        if ours and record["device"] != "cpu":
            best = min(ours, key=lambda label: ours[label])
            checks.append(Check(f"decoder, {what}, {best}", ours[best], found[PLAIN], "ms"))
    head = ("one step of the decoder", "policy", "ms", "times as fast", "xpuruntime nodes", "difference")
    return ([table(head, rows)] if rows else []), checks


def custom_ops(record: dict[str, Any]) -> Section:
    """Our kernels as operators of ONNX Runtime."""
    device = record["device"]
    parts, checks = [], []
    if "host_ns" in record:
        rows = [[label, number(ns)] for label, ns in record["host_ns"].items()]
        parts.append(table(("host, on the CPU", "ns a node"), rows))
        own = record["host_ns"]["xpuruntime, an empty kernel"] - record["host_ns"]["stock Relu, 4x4"]
        checks.append(Check("a node with an empty kernel, over a stock Relu", own, record["target_ns"], "ns"))
    for made, held in (costs(record), steps(record)):
        parts += made
        checks += held
    text = (
        "What does an xpuruntime operator cost over a stock one that runs the same kernels, and what does one step of "
        "a decoder of GPT-2's size (12 layers of 768, 12 heads, 50,257 words) gain?\n\n"
        f"{machine(record)}\n`python benchmarks/bench_ort_custom_ops.py --device {device}`: random weights. The last "
        "column is the largest difference to plain ONNX Runtime's result, as a share of its largest value.\n\n"
        + "\n".join(parts)
        + (f"\n{target_table(checks)}" if checks else "")
    )
    return Section(f"xpuruntime kernels inside ONNX Runtime on {device}", text, tuple(checks))
