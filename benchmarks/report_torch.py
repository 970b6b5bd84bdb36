# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The section of ``docs/benchmarks.md`` on sessions of PyTorch."""

from __future__ import annotations

from typing import Any

from report_parts import Check, Section, machine, number, spread, table, target_table


def torch_sessions(record: dict[str, Any]) -> Section:
    """Session overhead over PyTorch's own call of the same program."""
    found = {case: spread(values) for case, values in record["samples_us"].items()}
    count = len(next(iter(record["samples_us"].values())))
    checks = [
        Check(
            f"{case} over PyTorch's own call", extra, record["targets_us"]["bound" if "bound" in case else "run"], "µs"
        )
        for case, extra in record["overhead_us"].items()
    ]
    text = (
        "What does a session cost over PyTorch's own call of the same exported program? Bound buffers are compared "
        f"with the call and a copy into a buffer, since PyTorch makes new results.\n\n{machine(record)}\n"
        f"PyTorch {record['versions']['torch']}. `python benchmarks/bench_torch_overhead.py`: {count} rounds of "
        f"{record['calls']} calls each, one thread.\n\n"
        + table(("µs a call", "median", "p10", "p90"), [[c, *map(number, f)] for c, f in found.items()])
        + f"\n{target_table(checks)}"
    )
    return Section("Sessions of PyTorch on cpu", text, tuple(checks))
