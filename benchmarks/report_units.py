# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The section of ``docs/benchmarks.md`` on whether the times of units add up to a run."""

from __future__ import annotations

from typing import Any

from report_parts import Check, Section, machine, number, table, target_table


def unexplained(found: dict[str, Any]) -> float:
    """Return the share of a run that neither units nor what was measured beside them, nor what is cut off, explain."""
    told = found["units_us"] + sum(found.get("outside", {}).values())
    most = told + found.get("cut_us", 0.0)
    run = found["run_us"]
    return float(max(told - run, run - most, 0.0) / run)


def unit_times(record: dict[str, Any]) -> Section:
    """Show the engines' own counters, then the reports."""
    plain, own, shown, checks = [], [], [], []
    target = 100 * record["target"]
    for name, body in record["models"].items():
        off, on = body["openvino"]["without counters"], body["openvino"]["with counters"]
        figures = map(number, (off["own"], on["own"], on["mean"], on["counted"]))
        plain.append([name, *figures, f"{on['nodes']}"])
        run = body["onnxruntime"]
        share = run["kernel_time"] / run["model_run"]
        figures = map(number, (run["called"], run["model_run"], run["kernel_time"]))
        own.append([name, *figures, f"{run['nodes']:.0f}", f"{share:.0%}"])
        for engine, found in body["reports"].items():
            outside = found.get("outside", {})
            told = [
                found["run_us"],
                found["units_us"],
                outside.get("call"),
                outside.get("between"),
                found.get("cut_us"),
            ]
            cells = ["-" if value is None else number(value) for value in told]
            shown.append([f"{engine}, {name}", *cells, f"{found['coverage']:.0%}"])
            checks.append(Check(f"{engine}, {name}, unexplained", 100 * unexplained(found), target, "%"))
            if found["run_us"] > 1000:
                off_by = 100 * abs(found["coverage"] - 1)
                checks.append(Check(f"{engine}, {name}, units alone against the run", off_by, target, "%"))
    chains = record["softmaxes"]
    fixed, many = chains["0"], max(chains.values(), key=lambda chain: chain["own"])
    each = (many["own"] - chains["1"]["own"]) / (max(map(int, chains)) - 1)
    text = (
        "Do the times of units add up to the run they were taken in? First the engines' own counters, by the engines' "
        "own API, one thread, medians (OpenVINO's counters are means); then what `session.explain()` makes of them.\n\n"
        f"{machine(record)}\nOpenVINO {record['openvino']}. `python benchmarks/bench_unit_times.py`: {record['runs']} "
        f"runs each; of {record['tries']} reports, the one in the middle.\n\n"
        + table(
            ("OpenVINO alone, µs", "run, no counters", "run", "run, mean", "sum of counters", "nodes above 0"),
            plain,
        )
        + f"\nA request of a graph without operators takes OpenVINO {number(fixed['own'])} µs, and its Python layer "
        f"{number(fixed['called'] - fixed['own'])} µs more. {max(map(int, chains))} softmaxes of 16 numbers take "
        f"{number(each)} µs each, and their counters add up to {many['counted']:.0f} µs: each is cut to whole "
        "microseconds in each run.\n\n"
        + table(
            ("ONNX Runtime alone, µs", "run, no profile", "`model_run`", "sum of `kernel_time`", "nodes", "share"), own
        )
        + "\nWhere the sum of `kernel_time` is above the run without a profile, the profiler's own work is in it.\n\n"
        + table(("reports, µs", "run", "units", "call", "between", "cut off, at most", "units of the run"), shown)
        + "\nUnexplained is what of a run is neither in units, nor in what was measured beside them, nor cut off.\n"
        + f"\n{target_table(checks)}"
    )
    return Section("Times of units", text, tuple(checks))
