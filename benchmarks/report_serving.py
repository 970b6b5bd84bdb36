# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The sections of ``docs/benchmarks.md`` on servers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from report_parts import Check, Section, machine, number, spread, table, target_table

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SERVING_SECTIONS"]

_CASES = {
    "alone": "A tiny model, without batches",
    "batched": "A wide model, in batches of up to {max_batch_size} rows that wait for {wait_ms:g} ms",
}


def _busy_note(record: dict[str, Any]) -> str:
    before, after = record["load_average"]
    return f"Load average before and after: {before:.1f} and {after:.1f}."


def overhead(record: dict[str, Any]) -> Section:
    """Show what a server adds to `session.run`, and how many requests one core answers."""
    samples, targets, through = record["samples_us"], record["targets"], record["throughput"]
    rounds = len(next(iter(samples.values())))
    checks = [
        Check("HTTP binary over session.run", record["added_us"]["HTTP binary"], targets["http_binary_added_us"], "µs"),
        Check("gRPC over session.run", record["added_us"]["gRPC"], targets["grpc_added_us"], "µs"),
        Check(
            "HTTP binary, a request of a full server",
            1e6 / through["HTTP binary"]["per_second"],
            1e6 / targets["http_binary_per_second"],
            "µs",
        ),
        Check(
            "gRPC, a request of a full server",
            1e6 / through["gRPC"]["per_second"],
            1e6 / targets["grpc_per_second"],
            "µs",
        ),
    ]
    rows = [
        [
            name,
            f"{one['per_second']:,.0f}",
            f"{one['server_busy']:.0%}",
            number(one["server_cpu_us"]),
            f"{one['client_busy']:.0%}",
        ]
        for name, one in through.items()
    ]
    text = (
        "What does a server add to `session.run` on a model that computes almost nothing? The server has one "
        f"core, its client another.\n\n{machine(record)}\n{_busy_note(record)} "
        f"`python benchmarks/bench_serving.py`: {rounds} rounds of {record['calls']} requests, one at a "
        "time, the order rotated.\n\n"
        + table(("µs a request", "median", "p10", "p90"), [[c, *map(number, spread(v))] for c, v in samples.items()])
        + f"\n{record['connections']} connections in a closed loop:\n\n"
        + table(("", "a second", "server's core", "µs of it each", "client's core"), rows)
        + "\nThe bare echo is a handler of grpc.aio that returns the bytes it gets, in the same event loop: what of "
        "gRPC's figures is grpc.aio's own. A client whose core is busy is what was measured.\n\n" + target_table(checks)
    )
    return Section("What a server adds on cpu", text, tuple(checks))


def peers(record: dict[str, Any]) -> Section:
    """Show our server beside those of other projects."""
    about = record["peers"]
    parts = [
        "How does the server compare with others, with the same models on the same ONNX Runtime, and the same load? "
        "Each has a virtual environment of its own, one core, and the request format that suits it best.\n\n"
        f"{machine(record)}\n{_busy_note(record)} `python benchmarks/bench_serving_peers.py`: {record['seconds']:g} s "
        "for each closed loop, the clients on another core; one rate for all in the open loop, where latency counts "
        "from the moment at which a request was due. *Lost*: no answer, or an error. Each answer was compared with the "
        "right one; *wrong* ones count as neither. Bold: the best of a column.\n\n",
        table(
            ("", "format", "batches", "versions"),
            [
                [name, one["format"], "yes" if one["batches"] else "none of its own", _versions(one["versions"])]
                for name, one in about.items()
            ],
        ),
    ]
    for case, title in _CASES.items():
        results = record["cases"][case]
        measured = {
            name: {one["load"]: one for one in found["loads"]} for name, found in results.items() if "loads" in found
        }
        parts.append(f"\n### {title.format(**record['batching'])}\n")
        for load in next(iter(measured.values()), {}):
            rows = [[name, *_figures(found[load])] for name, found in measured.items()]
            parts.append(f"\n{load}:\n\n{table(_HEAD, _with_best(rows))}")
        parts += [f"\nNot measured: {name}, {one['problem']}\n" for name, one in results.items() if "problem" in one]
    if "remark" in record:
        parts.append(f"\n{record['remark']}\n")
    return Section("Servers beside each other on cpu", "".join(parts))


_BATCH_FIGURES = ("batch_ms", "batch_ms_after", "p50_ms", "p99_ms", "p99_to_batch", "ideal_p99_to_batch")


def batches(record: dict[str, Any]) -> Section:
    """Show latencies of batched requests at a part of the peak."""
    rows, checks = [], []
    for one in record["rows"]:
        name = f"up to {one['max_batch_size']} rows, a delay of {one['max_queue_delay_us'] / 1e3:g} ms"
        after = [f"{one[key]:.2f}" for key in _BATCH_FIGURES]
        rows.append([name, f"{one['peak_per_second']:,.0f}", f"{one['requests']:,}", *after])
        checks.append(Check(f"p99 to a full batch's time, {name}", one["p99_to_batch"], record["target"], "times"))
    head = ("", "peak, a second", "requests", "batch, ms", "later, ms", "p50, ms", "p99, ms", "batches", "ideal")
    text = (
        f"How long do batched requests take at {record['load']:.0%} of the peak? Requests of one row come at random "
        "(Poisson) to a model of the same process; the peak is what it answers with all of them there at once. One "
        "that comes just after an execution began waits for that one and for its own, so two batches are the floor of "
        "the worst case. The last column is the p99, in batches, of a server that costs nothing and is never "
        "interrupted, at as much of its own peak: computed from the times of batches of each size."
        f"\n\n{machine(record)}\n{_busy_note(record)} `python benchmarks/bench_serving_batches.py`: "
        f"{record['seconds']:g} s each, one thread of ONNX Runtime; batches were timed before and after.\n\n"
        + table(head, rows)
        + f"\n{record['note']}\n\n{target_table(checks)}"
    )
    return Section("Batched requests at seven tenths of the peak on cpu", text, tuple(checks))


_HEAD = ("", "a second", "p50, ms", "p99, ms", "lost", "wrong", "server's core", "µs of it each", "clients' core")


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _figures(one: dict[str, Any]) -> list[str]:
    answered = one["answered"] > 0
    return [
        f"{one['per_second']:,.0f}" if answered else "0",
        number(one["p50_ms"]) if answered else "-",
        number(one["p99_ms"]) if answered else "-",
        str(one["lost"]),
        str(one["wrong"]),
        f"{one['server_busy']:.0%}",
        f"{one['server_cpu_us']:,.0f}",
        f"{one['client_busy']:.0%}",
    ]


def _with_best(rows: list[list[str]]) -> list[list[str]]:
    """Mark the best rate, p50 and p99."""

    def value(text: str) -> float:
        return float(text.replace(",", "").replace("-", "inf"))

    made = [list(row) for row in rows]
    choices: dict[int, Callable[[list[float]], float]] = {1: max, 2: min, 3: min}
    for column, choose in choices.items():
        best = choose([value(row[column]) for row in rows])
        for row in made:
            if value(row[column]) == best:
                row[column] = f"**{row[column]}**"
    return made


def served_models(record: dict[str, Any]) -> Section:
    """Show the throughput of served models beside the best of raw sessions, and two models in one budget."""
    settings, target, parts, checks = record["settings"], record["target"], [], []
    for name, model in record["models"].items():
        size = max(model["raw"]["run"], key=model["raw"]["run"].__getitem__)
        peak = sum(model["raw"]["peaks"]) / len(model["raw"]["peaks"])
        rows = [[f"raw `run`, {size}", f"{peak:,.0f}", "-", "-", "1", "-"]]
        within = {many: sum(rates) / len(rates) for many, rates in model["raw"]["peaks_within"].items()}
        rows += [
            [f"raw `run`, {many} rows at a time at most", f"{rate:,.0f}", "-", "-", number(rate / peak), "1"]
            for many, rate in within.items()
        ]
        if model["raw"]["graph"]:
            size, rate = max(model["raw"]["graph"].items(), key=lambda pair: pair[1])
            rows.append([f"raw graph, {size} rows, no copies", f"{rate:,.0f}", "-", "-", number(rate / peak), "-"])
        for way, label in (("served", "in this process"), ("http", "HTTP")):
            rows += [
                [f"{label}, {many} at a time", f"{one['rows_per_second']:,.0f}", number(one["p50_ms"]),
                 number(one["p99_ms"]), number(one["rows_per_second"] / peak),
                 number(one["rows_per_second"] / within[many])]
                for many, one in model[way].items()
            ]  # fmt: skip
        parts.append(f"### Served: {name}\n\nMemory of host arrays: {model['memory']}.\n\n{table(_RATES, rows)}\n")
        best = max(one["rows_per_second"] for way in ("served", "http") for one in model[way].values())
        if settings["small"]:
            continue
        checks.append(Check(f"{name}, raw peak to the best served", peak / best, 1 / target, "times"))
    small = "**Models of a few layers, which says no more than that it runs.** " if settings["small"] else ""
    note = f"{record['note']} " if "note" in record else ""
    text = (
        "How much of what a raw session of ONNX Runtime reaches is left when requests of one row are served in "
        "batches? The raw peak is the best of all batch sizes, by one thread and by two, timed again before and after "
        "the served requests; so is the best with no more rows at a time than there are requests.\n\n"
        f"{machine(record)}\n{note}`python benchmarks/bench_serving_gpu.py --device {settings['device']}`: {small}"
        f"batches of up to {settings['batch']} rows, a delay of {settings['delay']} us, {settings['instances']} "
        f"instances, {settings['seconds']:g} s "
        f"each, policy `{json.dumps(settings['policy'])}`. Clients over HTTP are processes of the same machine. "
        "Answers were compared with those of the raw session.\n\n"
        + "\n".join(parts)
        + (f"\n{_budget(record['budget'])}" if record["budget"] else "")
        + (f"\n{target_table(checks)}" if checks else "")
    )
    return Section(f"Served models on {settings['device']}", text, tuple(checks))


_RATES = ("", "rows a second", "p50, ms", "p99, ms", "to the raw peak", "to raw with as many rows")


def _budget(budget: dict[str, Any]) -> str:
    """Show two models that share a budget of memory."""
    sizes = ", ".join(f"{name} {one['bytes'] / 2**20:,.0f} MiB" for name, one in budget["sizes"].items())
    rows = [
        [f"room for {name}", f"{one['limit'] / 2**20:,.0f}", str(one["evictions"]),
         number(max(one["seconds"])) if one["seconds"] else "-", one["refused"].replace("|", "/") or "-"]
        for name, one in budget.items() if name != "sizes"
    ]  # fmt: skip
    head = ("budget", "MiB", "evictions", "longest 16 requests, s", "refused")
    return f"Both models in turn under one budget of memory; measured sizes: {sizes}.\n\n{table(head, rows)}"


SERVING_SECTIONS: dict[str, Callable[[dict[str, Any]], Section]] = {
    "serving_cpu": overhead,
    "serving_peers_cpu": peers,
    "serving_batches": batches,
    "serving_gpu": served_models,
}
