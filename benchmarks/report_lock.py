# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The section on what a lock costs, and whether it holds."""

from __future__ import annotations

from typing import Any

from report_parts import Check, Section, machine, number, table, target_table


def locks(record: dict[str, Any]) -> Section:
    """Return sizes and times of locks, and whether fresh processes ran the same kernels with the same bits."""
    sizes = [
        [
            row["model"],
            *(str(row[key]) for key in ("units", "calls", "configurations")),
            *("yes" if row[key] else "no" for key in ("same_kernels", "same_bits")),
        ]
        for row in record["rows"]
    ]
    times = [
        [
            row["model"],
            *(number(row[key]) for key in ("lock_s", "open_s", "open_locked_s")),
            " ".join(number(one) for one in row["validate_ms"]),
        ]
        for row in record["rows"]
    ]
    checks = [
        Check(
            f"{row['model']}: validators before the model is loaded",
            min(row["validate_ms"]),
            record["targets"]["validate_ms"],
            "ms",
        )
        for row in record["rows"]
    ]
    note = f" {record['note'][0].upper()}{record['note'][1:]}." if record.get("note") else ""
    text = (
        "Does a fresh process under a lock run the same, and what does it cost?\n\n"
        f"{machine(record)}\n`python benchmarks/bench_lock.py`: a lock, then three fresh processes under it.{note} In "
        "a fresh process the validators include reading and hashing the model, which a plan needs, too.\n\n"
        + table(("model", "units", "calls of xpuruntime", "with a configuration", "same kernels", "same bits"), sizes)
        + "\n"
        + table(("model", "lock, s", "open, s", "open under the lock, s", "validators, ms"), times)
        + f"\n{target_table(checks)}"
    )
    return Section("Locks", text, tuple(checks))
