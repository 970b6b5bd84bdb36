# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The section of ``docs/benchmarks.md`` on sessions of QNN."""

from __future__ import annotations

from typing import Any

from report_parts import Check, Section, machine, number, spread, table, target_table

#: Which target a case has; one without is no more than shown.
_TARGETS = {"xpuruntime run": "run", "xpuruntime bound": "bound"}


def qnn(record: dict[str, Any]) -> Section:
    """Session overhead over ONNX Runtime's own best calls on the plugin, and that of a second chip."""
    found = {case: spread(values) for case, values in record["samples_us"].items()}
    count = len(next(iter(record["samples_us"].values())))
    checks = [
        Check(f"{case} over ONNX Runtime's own best", record["overhead_us"][case], record["targets_us"][target], "µs")
        for case, target in _TARGETS.items()
    ]
    apart = next(case for case in found if case not in _TARGETS and case.startswith("xpuruntime"))
    version = record["versions"]["onnxruntime-qnn"]
    text = (
        "What does a session cost over ONNX Runtime's own best call on the plugin? The model is one Relu, so that the "
        f"simulator's own time is short.\n\n{machine(record)}\nonnxruntime-qnn {version}, "
        f"x86-64 simulator. `python benchmarks/bench_qnn_overhead.py`: {count} rounds of {record['calls']} calls each, "
        "the order rotated.\n\n"
        + table(("µs a call", "median", "p10", "p90"), [[c, *map(number, f)] for c, f in found.items()])
        + f"\nA second chip in one process runs in a worker: {number(record['overhead_us'][apart])} µs more.\n\n"
        + target_table(checks)
    )
    return Section("Sessions of QNN on its simulator", text, tuple(checks))
