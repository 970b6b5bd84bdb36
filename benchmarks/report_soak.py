# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sections on memory over time, of a session and of a server."""

from __future__ import annotations

from typing import Any

from report_parts import Check, Section, machine, table, target_table

__all__ = ["soak", "soak_serving"]

MIB = 1 << 20


def soak(record: dict[str, Any]) -> Section:
    """Memory growth after the first tenth of the work."""
    rows, checks = [], []
    parts = {
        "runs": "runs and bound runs",
        "plain": "sessions of ONNX Runtime alone",
        "sessions": "sessions of xpuruntime",
    }
    for key, what in parts.items():
        part = record.get(key)
        if part is None:
            continue
        name = f"{part['times']:,} {what}"
        for owner in part["growth"]:
            early, late = part["early"][owner] / MIB, part["late"][owner] / MIB
            rows.append([name, owner, f"{part['seconds']:.0f}", f"{early:.1f}", f"{late:.1f}"])
        for owner, grown in part.get("own_growth", part["growth"]).items() if key != "plain" else ():
            checks.append(Check(f"growth of {owner} memory over {name}", grown / MIB, record["allowance"] / MIB, "MiB"))
    device = record["device"]
    plain = (
        "ONNX Runtime's own CUDA sessions leave memory behind when they are closed; what as many of those leave is "
        "subtracted from those of xpuruntime in the second table.\n\n"
        if "plain" in record
        else ""
    )
    text = (
        f"Does memory grow? Held after a tenth of the work and after all of it.\n\n{plain}{machine(record)}\n"
        f"`python benchmarks/soak.py --device {device} --runs {record['runs']['times']} "
        f"--sessions {record['sessions']['times']}`\n\n"
        f"{table(('', 'memory', 'seconds', 'after a tenth, MiB', 'at the end, MiB'), rows)}\n{target_table(checks)}"
    )
    return Section(f"Memory over time on {device}", text, tuple(checks))


def soak_serving(record: dict[str, Any]) -> Section:
    """Memory growth of a server after the first tenth of its requests."""
    rows, checks = [], []
    for transport, part in record["parts"].items():
        early, late = part["early"]["resident"] / MIB, part["late"]["resident"] / MIB
        rows.append(
            [f"{part['times']:,} requests, {transport}", f"{part['seconds']:.0f}", f"{early:.1f}", f"{late:.1f}"]
        )
        name = f"growth of resident memory over {part['times']:,} requests, {transport}"
        checks.append(Check(name, part["growth"]["resident"] / MIB, record["allowance"] / MIB, "MiB"))
    text = (
        "Does a server's memory grow? Held after a tenth of the requests and after all of them, which come over "
        f"{record['connections']} connections.\n\n{machine(record)}\n"
        "`python benchmarks/bench_serving.py --requests 1000000`\n\n"
        f"{table(('', 'seconds', 'after a tenth, MiB', 'at the end, MiB'), rows)}\n{target_table(checks)}"
    )
    return Section("Memory of a server over time", text, tuple(checks))
