# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The sections of ``docs/benchmarks.md`` on what a profile costs."""

from __future__ import annotations

import statistics
from typing import Any

from report_parts import Check, Section, machine, number, table, target_table

_TITLES = {
    "profile_cpu": "A profile on cpu",
    "profile_cupti": "A profile on cuda:0, by CUPTI",
    "profile_kineto": "A profile on cuda:0, by PyTorch's profiler",
}

_HEADS = {
    "control": "never, once more",
    "after": "after a profile",
    "released": "after one with TEARDOWN_CUPTI=1",
    "inside": "inside one",
}


def _profile(name: str, record: dict[str, Any]) -> Section:
    """Return what a call costs after a profile and inside one, against a process that has never taken one."""
    samples = record["samples_us"]
    rows, checks = [], []
    states = ["control", "after", *(["released"] if name == "profile_kineto" else []), "inside"]
    for call in dict.fromkeys(case.partition(", ")[0] for case in samples):
        never = samples[f"{call}, never"]

        def added(state: str, call: str = call, never: list[float] = never) -> tuple[float, float] | None:
            """Return the medians of the differences within rounds, in percent and microseconds."""
            other = samples.get(f"{call}, {state}")
            if other is None:
                return None
            pairs = list(zip(never, other, strict=True))
            return statistics.median((b / a - 1) * 100 for a, b in pairs), statistics.median(b - a for a, b in pairs)

        cells = []
        for state in states:
            found = added(state)
            cells.append("-" if found is None else f"{found[0]:+.1f} %")
            if state == "inside" and found is not None:
                cells.append(number(found[1]))
        rows.append([call, number(statistics.median(never)), *cells])
        after = added("released" if name == "profile_kineto" else "after")
        if after is not None:
            checks.append(Check(f"{call}, {_HEADS[states[-2]]}", after[0], 100 * record["target_off"], "%"))
    head = ("", "never, µs a call", *(_HEADS[state] for state in states), "inside one, µs more")
    command = f"--device {record['device']}" + (" --beside-torch" if name == "profile_kineto" else "")
    count = len(next(iter(samples.values())))
    note = (
        "PyTorch's profiler keeps CUPTI when it has ended, unless `TEARDOWN_CUPTI=1` is in the environment: calls cost "
        "more after it, too.\n\n"
        if name == "profile_kineto"
        else ""
    )
    text = (
        "What does a call cost in a process that has never profiled, in another such, in one that has, and in one that "
        f"does? Medians of the differences within {count} rounds of {record['calls_a_round']} calls; the processes "
        "take turns. The first column of percent is the noise of such a comparison, where it was taken.\n\n"
        f"{note}{machine(record)}\n`python benchmarks/bench_profile.py {command}`\n\n{table(head, rows)}"
    )
    return Section(_TITLES[name], text + (f"\n{target_table(checks)}" if checks else ""), tuple(checks))


def _page(record: dict[str, Any]) -> Section:
    rows = [[name, number(min(times)), number(max(times))] for name, times in record["longest_ms"].items()]
    longest = max(max(times) for times in record["longest_ms"].values())
    checks = (Check("page: longest task", longest, record["target_ms"], "ms"),)
    text = (
        "How long does the page of a report hold the browser at once?\n\n"
        f"{machine(record)}\n`python benchmarks/bench_page.py`: {record['nodes']:,} nodes, {record['units']:,} units, "
        f"a page of {record['bytes'] / 1e6:.1f} MB, {record['rounds']} rounds, a new Chromium each; the longest task "
        "of the main thread during each step, its processor time from the performance trace. Load average of the "
        f"machine meanwhile: {record['load_average']:.1f}.\n\n"
        + table(("ms", "least", "most"), rows)
        + f"\n{target_table(checks)}"
    )
    return Section("Page of a report", text, checks)


PROFILE_SECTIONS = {name: lambda record, name=name: _profile(name, record) for name in _TITLES} | {"page_cpu": _page}
