# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The section on what many kernel rules cost."""

from __future__ import annotations

import re
from typing import Any

from report_parts import Check, Section, machine, number, spread, table, target_table


def kernel_rules(record: dict[str, Any]) -> Section:
    """Plan times by rules and nodes, then the time of a cached call by rules."""
    medians: dict[int, dict[int, float]] = {}
    for case, samples in record["samples_s"].items():
        rules, nodes = map(int, re.findall("[0-9]+", case))
        medians.setdefault(rules, {})[nodes] = spread(samples)[0]
    columns = sorted({nodes for row in medians.values() for nodes in row})
    plans = [[f"{rules:,}", *(number(row[nodes]) for nodes in columns)] for rules, row in sorted(medians.items())]
    calls = [[case, *map(number, spread(samples))] for case, samples in record["samples_us"].items()]
    most, widest = max(medians), max(columns)
    check = Check(
        f"plan of {most:,} rules over {widest:,} nodes", medians[most][widest], record["targets"]["plan_s"], "s"
    )
    rounds = [len(next(iter(record[kind].values()))) for kind in ("samples_s", "samples_us")]
    text = (
        "What do many kernel rules cost? Each rule states a node, a type and one size, as a lock does.\n\n"
        f"{machine(record)}\n`python benchmarks/bench_rules.py`: medians of "
        f"{rounds[0]} plans, and of {rounds[1]} rounds of {record['calls']} calls.\n\n"
        + table(("one plan, s: rules", *(f"{nodes:,} nodes" for nodes in columns)), plans)
        + "\nOne `torch.mm` of 8 by 8 on the CPU, whose route is cached:\n\n"
        + table(("µs a call", "median", "p10", "p90"), calls)
        + f"\n{target_table([check])}"
    )
    return Section("Kernel rules", text, (check,))
