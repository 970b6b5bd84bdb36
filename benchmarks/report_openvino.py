# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The section of ``docs/benchmarks.md`` on sessions of OpenVINO."""

from __future__ import annotations

from typing import Any

from report_parts import Check, Section, machine, number, spread, table, target_table


def openvino(record: dict[str, Any]) -> Section:
    """Session overhead over OpenVINO's own best calls, for each model."""
    parts, checks = [], []
    count = 0
    for name, result in record["models"].items():
        found = {case: spread(values) for case, values in result["samples_us"].items()}
        count = len(next(iter(result["samples_us"].values())))
        parts.append(
            table((f"{name}, µs a call", "median", "p10", "p90"), [[c, *map(number, f)] for c, f in found.items()])
        )
        for ours, extra in result["overhead_us"].items():
            target = record["targets_us"]["bound" if "bound" in ours else "run"]
            checks.append(Check(f"{ours}, {name}, over OpenVINO's own best", extra, target, "µs"))
    text = (
        "What does a session cost over OpenVINO's own best call? A run has to give results that the caller may keep, "
        "so its measure is the faster of OpenVINO's two ways to that. The overhead is the median of the differences "
        f"within rounds.\n\n{machine(record)}\nOpenVINO {record['openvino']}. "
        "`python benchmarks/bench_openvino_overhead.py`: "
        f"{count} rounds of {record['calls']} calls each, the order rotated.\n\n"
        + "\n".join(parts)
        + f"\n{target_table(checks)}"
    )
    return Section("Sessions of OpenVINO on cpu", text, tuple(checks))
