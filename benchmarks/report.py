# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Write the pages of benchmarks from the result files in ``benchmarks/results``.

``docs/benchmarks.md`` has the charts (``docs/results/charts``), ``docs/results/benchmarks`` the tables.
``python benchmarks/report.py`` writes; ``--check`` only says whether all are up to date (``make lint``). The same files
give the same pages: they hold no date and nothing of the machine that writes them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charts import CHARTS, targets
from report_kernels import KERNEL_SECTIONS
from report_lock import locks, verdicts
from report_onnxruntime import custom_ops
from report_openvino import openvino
from report_parts import Check, Section, machine, number, spread, table, target_table
from report_profile import PROFILE_SECTIONS
from report_pytorch import PYTORCH_SECTIONS
from report_qnn import qnn
from report_rules import kernel_rules
from report_serving import SERVING_SECTIONS
from report_soak import soak, soak_serving
from report_step_tuning import STEP_TUNING_SECTIONS
from report_torch import torch_sessions
from report_tune import tuned_on_cuda, tuned_policies
from report_units import unit_times

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
TABLES, DRAWN = "results/benchmarks", "results/charts"
SCHEMA = "xpuruntime.benchmark/1"
MIB = 1 << 20

INTRO = """\
# Benchmarks

<!-- Written by benchmarks/report.py from benchmarks/results/*.json. Do not edit. -->

Medians of the result files in `benchmarks/results`; [how it is measured](results/benchmarks/method.md). The targets
were set before the measurements. Each chart links to its tables, which give the machine, the versions and the spread.
"""
WRITTEN = "<!-- Written by benchmarks/report.py from benchmarks/results/*.json. Do not edit. -->\n"
NOTHING = """
There are no results in `benchmarks/results` yet, so there are no figures here.
"""
METHOD = f"""\
# How it is measured

{WRITTEN}
* **Rounds.** All cases of a table run in one process, in interleaved rounds: each round times every case once, so
  drift of the machine affects all of them. A round is a number of calls of one case and gives one sample, their mean.
  Medians and 10th and 90th percentiles are taken over the rounds.
* **Warm-up and checks.** Each case is called several times before the first round. Before that, the results of a
  session's `run` are compared with ONNX Runtime's, and those of each ResNet-50 policy with fp32 on the CPU.
* **Host waits.** On CUDA, a round ends with a synchronization of the device, which is part of its time. The column
  "host waits" shows when a case waits before that. *Each call*: the call returns when the device is done, so the host
  cannot prepare the next call meanwhile. *Once a round*: the call returns when the work is queued, and results are in
  the order of the caller's stream. ONNX Runtime waits in each call unless a run option disables it; xpuruntime waits
  for NumPy arrays and for sessions with an xpuruntime memory pool. A difference between two rows of different kinds
  includes that wait.
* **Kernels on CUDA** are timed without the host. A CUDA graph holds one call for each of several sets of operands,
  together more than twice as large as L2, so that no call finds its data in the cache; events around many replays
  give a sample. Attention calls take a large part of a millisecond or more, and are timed by events around plain
  calls.
* **Loads on servers.** Open loops, where requests come at random moments whatever the server does, are issued by
  [MLPerf LoadGen](https://github.com/mlcommons/inference/tree/master/loadgen), in its Server and Offline scenarios; it
  computes the percentiles too. Closed loops, where each client waits for its answer, are issued by scripts of this
  repository. The client has a core of its own, and its processor time is shown: a client that is always busy is what
  was measured. Tables name their generator; those measured before LoadGen was used name `serving_load.py` for both.
* **Training steps** are timed by events around several steps in a row, after one that is not timed.
* **Comparisons.** Compare ratios within one table. Figures of two files come from two machines, or from two states of
  one.
"""
REPRODUCE = """
## How to reproduce

```console
.venv/bin/python -m pip install --group benchmarks
make bench
make bench-gpu
make bench-kernels
make bench-training
.venv/bin/python benchmarks/bench_serving_peers.py --prepare ~/peers
.venv/bin/python benchmarks/bench_serving_peers.py ~/peers
.venv/bin/python benchmarks/report.py
```

All but the last write JSON to `benchmarks/results`; the last writes this page, its charts and the tables.

| command | needs |
| --- | --- |
| `make bench-gpu` | an NVIDIA GPU, PyTorch and torchvision; with CuPy it also measures CuPy's pool |
| `make bench-kernels` | an NVIDIA GPU, PyTorch and CuPy |
| `make bench-training` | an NVIDIA GPU and PyTorch; for collectives, two GPUs and NCCL |
| `make bench` | for batched requests, two cores and MLPerf LoadGen, which is the group `benchmarks` |
| `bench_serving_peers.py` | the same; installs other servers into environments of their own |
"""


def waits(case: str) -> str:
    """Return when the host waits in a case on CUDA; see METHOD."""
    alone = case.startswith("onnxruntime") and "no host wait" not in case
    return "each call" if alone or "NumPy" in case else "once a round"


def rounds(record: dict[str, Any], samples: dict[str, list[float]]) -> str:
    """Say how much was measured."""
    return f"{len(next(iter(samples.values())))} rounds of {record['calls']} calls each."


def session(record: dict[str, Any]) -> Section:
    """Session overhead: each call of the engine's own, then xpuruntime's that do the same."""
    samples, device = record["samples_us"], record["device"]
    found = {case: spread(values) for case, values in samples.items()}
    rows, checks = [], []
    own = ""
    for case, (median, low, high) in found.items():
        ours = not case.startswith("onnxruntime")
        own = own if ours else case
        rows.append([case, number(median), number(low), number(high), number(median / found[own][0]) if ours else "1"])
        if ours:
            target = record["targets_us"]["bound" if "bound" in case else "run"]
            checks.append(Check(f"{case}, over {own}", median - found[own][0], target, "µs"))
    head = ["µs a call", "median", "p10", "p90", "to the engine's own call"]
    text = (
        "What does a session cost over ONNX Runtime's own best call, on a model that computes almost nothing (an MLP "
        "over 4 rows of 64)?\n\n"
        f"{machine(record)}\n`python benchmarks/bench_session.py --device {device}`: {rounds(record, samples)}\n\n"
        f"{table(head, rows)}\n{target_table(checks)}"
    )
    return Section(f"Session overhead on {device}", text, tuple(checks))


def cold_start(record: dict[str, Any]) -> Section:
    """Return the processor time of new processes, and that of `xrt --help`."""
    samples, ratios = record["samples_ms"], record["ratios"]
    intervals = record.get("intervals", {})
    rows = [
        [
            case,
            *map(number, spread(values)),
            number(ratios[case]) if case in ratios else "-",
            " to ".join(map(number, intervals[case])) if case in intervals else "-",
        ]
        for case, values in samples.items()
    ]
    checks = [Check(f"cold start: {case}", ratio, record["target_ratio"], "x") for case, ratio in ratios.items()]
    help_ms = record["median_ms"]["xrt --help"]
    checks.append(Check("cold start: xrt --help", help_ms, record["target_help_ms"], "ms"))
    note = f" Note: {record['note']}." if record.get("note") else ""
    text = (
        "How much processor time does a new process take that opens a small model and runs it once?\n\n"
        f"{machine(record)}\n`python benchmarks/bench_cold_start.py`: {record['rounds']} rounds, each with a process "
        "of each case; user and system time of all threads, imports and exit included. The ratio is of the medians, "
        "its 95 % interval from resampled rounds. A first opening has an empty cache folder; a later one finds in it "
        f"what the check of the model found.{note}\n\n"
        + table(("ms", "median", "p10", "p90", "to onnxruntime", "interval"), rows)
        + f"\n{target_table(checks)}"
    )
    return Section("Cold start", text, tuple(checks))


def pool(record: dict[str, Any]) -> Section:
    """Allocating and freeing, for each size."""
    device, parts, checks = record["device"], [], []
    for size, result in record["sizes"].items():
        found = {case: spread(values) for case, values in result["samples_us"].items()}
        ours = found["xpuruntime caching"][0]
        rows = [[case, *map(number, figures), number(figures[0] / ours)] for case, figures in found.items()]
        label = f"{int(size) >> 20} MiB" if int(size) >= MIB else f"{int(size) >> 10} KiB"
        parts.append(table((f"{label}, µs", "median", "p10", "p90", "to xpuruntime caching"), rows))
        if int(size) == MIB:
            checks.append(Check("xpuruntime caching, 1 MiB, allocate and free", ours, record["target_us"], "µs"))
    first = next(iter(record["sizes"].values()))["samples_us"]
    text = (
        "What does it cost from Python to allocate memory and free it again, beside the pools people use today?\n\n"
        f"{machine(record)}\n`python benchmarks/bench_pool.py --device {device}`: {rounds(record, first)} `direct` and "
        "`pinned` are timed apart, with a twentieth of the calls, as they may wait for the device and would disturb "
        "the others.\n\n" + "\n".join(parts) + f"\n{target_table(checks)}"
    )
    return Section(f"Memory pools on {device}", text, tuple(checks))


def resnet(record: dict[str, Any]) -> Section:
    """ResNet-50 for each batch; there is no target, the ratio is to ONNX Runtime's own IO binding."""
    own = "onnxruntime IO binding"
    parts = []
    for batch, result in record["batches"].items():
        found = {case: spread(values) for case, values in result["samples_us"].items()}
        errors = result["relative_error"]
        rows = []
        for case, figures in found.items():
            label = case.removeprefix("xpuruntime ").partition(",")[0].removesuffix(" run")
            error = f"{errors[label]:.1e}" if case.startswith("xpuruntime") and label in errors else "-"
            in_ms = [f"{f / 1e3:.3f}" for f in figures]
            rows.append([case, waits(case), *in_ms, number(found[own][0] / figures[0]), error])
        best = min((case for case in found if case.startswith("xpuruntime")), key=lambda case: found[case][0])
        parts.append(
            f"### Batch {batch}\n\n"
            + table(("ms a call", "host waits", "median", "p10", "p90", "times as fast", "error"), rows)
            + f"\nFastest of xpuruntime: `{best}`, {number(found[own][0] / found[best][0])} times as fast as `{own}`.\n"
        )
    policies = "".join(
        f"* `{name}`: {f'`{json.dumps(policy)}`' if policy else 'nothing stated'}\n"
        for name, policy in record["policies"].items()
    )
    sample = next(iter(record["batches"].values()))["samples_us"]
    text = (
        "How long does ResNet-50 take through plain ONNX Runtime, through xpuruntime by default, and under policies "
        f"found by hand?\n\n{machine(record)}\n`python benchmarks/bench_resnet.py`: {rounds(record, sample)} Random "
        f"weights. The last two columns are speed against `{own}` and the largest error against fp32 on the CPU, as "
        "a share of the largest logit. There is no target.\n\nThe policies:\n\n"
        f"{policies}\nThey do not compute in the same precision. By default ONNX Runtime's CUDA provider uses TF32 for "
        "fp32 convolutions and matrix products, and so does xpuruntime under `default`. Compare rows of one "
        "precision to see what layout and graph bring.\n\n" + "\n".join(parts)
    )
    return Section("ResNet-50 on CUDA", text)


#: Result name to what writes its section, in the order of the page.
SECTIONS: dict[str, Callable[[dict[str, Any]], Section]] = {
    "session_cpu": session,
    "session_cuda": session,
    "cold_start": cold_start,
    "pool_cpu": pool,
    "pool_cuda": pool,
    "resnet50_cuda": resnet,
    "soak_cpu": soak,
    "soak_cuda": soak,
    "soak_serving": soak_serving,
    "ort_custom_ops_cpu": custom_ops,
    "ort_custom_ops_cuda": custom_ops,
    "openvino_overhead": openvino,
    "qnn_overhead": qnn,
    "torch_overhead": torch_sessions,
    "unit_times": unit_times,
    "rules_cpu": kernel_rules,
    "lock_cpu": locks,
    "lock_cuda": locks,
    "verify_power": verdicts,
    "tune_cpu": tuned_policies,
    "tune_cuda": tuned_on_cuda,
    **SERVING_SECTIONS,
    **PROFILE_SECTIONS,
    **PYTORCH_SECTIONS,
    **STEP_TUNING_SECTIONS,
    **KERNEL_SECTIONS,
}


def load(folder: Path) -> list[dict[str, Any]]:
    """Return the result files of a folder in the order of the page.

    Raises
    ------
    ValueError
        A file is not a result, or no section is known for it: leaving it out would hide a figure.
    """
    records = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        name = record.get("name") if isinstance(record, dict) else None
        if name is None or record.get("schema") != SCHEMA:
            msg = f"{path.name} is not a result of the schema {SCHEMA}: remove it, or write it with harness.write"
            raise ValueError(msg)
        if name not in SECTIONS:
            msg = f"{path.name}: report.py has no section for {name!r}: add one to SECTIONS"
            raise ValueError(msg)
        records[name] = record
    return [records[name] for name in SECTIONS if name in records]


#: Page of tables to its title and the results on it, in the order of `SECTIONS`.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sessions": (
        "Sessions",
        (
            "session_cpu",
            "session_cuda",
            "cold_start",
            "openvino_overhead",
            "qnn_overhead",
            "torch_overhead",
            "unit_times",
            "rules_cpu",
            "lock_cpu",
            "lock_cuda",
            "verify_power",
            "tune_cpu",
            "tune_cuda",
        ),
    ),
    "memory": ("Memory", ("pool_cpu", "pool_cuda", "soak_cpu", "soak_cuda", "soak_serving")),
    "models": ("Models on ONNX Runtime", ("resnet50_cuda", "ort_custom_ops_cpu", "ort_custom_ops_cuda")),
    "serving": ("Serving", tuple(SERVING_SECTIONS)),
    "profiling": ("Profiling", tuple(PROFILE_SECTIONS)),
    "pytorch": ("PyTorch and collectives", (*PYTORCH_SECTIONS, *STEP_TUNING_SECTIONS)),
    "kernels": ("Single operations", tuple(KERNEL_SECTIONS)),
}


def chart_lines(record: dict[str, Any], name: str, title: str, found: dict[str, str]) -> str:
    """Return the chart of one result as Markdown, and put the file into `found`."""
    chart = CHARTS[record["name"]](record)
    if chart is None:
        return ""
    file = f"{DRAWN}/{record['name']}.svg"
    found[file] = chart.svg
    link = f"[Tables]({TABLES}/{name}.md#{title.lower().replace(' ', '-').replace(':', '')})"
    return f"\n![{chart.title}]({file})\n\n{chart.caption} {link}.\n"


def pages(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return all files by their path below ``docs``, the page with the charts first."""
    made = {record["name"]: (record, SECTIONS[record["name"]](record)) for record in records}
    parts, tables = [INTRO], {"benchmarks.md": ""}
    if not made:
        parts.append(NOTHING)
    checks: dict[str, list[Check]] = {}
    charts: list[str] = []
    for name, (title, names) in GROUPS.items():
        here = [made[one] for one in names if one in made]
        if not here:
            continue
        checks[title] = [check for _, section in here for check in section.checks]
        tables[f"{TABLES}/{name}.md"] = "".join([
            f"# {title}: tables\n\n{WRITTEN}\nCharts: [benchmarks](../../benchmarks.md), [method](method.md).\n",
            *(f"\n## {section.title}\n\n{section.text}" for _, section in here),
        ])  # fmt: skip
        drawn = [chart_lines(r, name, s.title, tables) for r, s in here if r["name"] in CHARTS]
        charts.append("".join([f"\n## {title}\n", *drawn, f"\n[All tables]({TABLES}/{name}.md).\n"]))
    every = [(title, check) for title, some in checks.items() for check in some]
    if every:
        met = sum(check.figure <= check.target for _, check in every)
        heading = f"Targets: {met} of {len(every)} met"
        tables[f"{DRAWN}/targets.svg"] = targets({title: some for title, some in checks.items() if some})
        rows = [(f"{title}: {c.what}", f"{number(c.figure)} {c.unit}", f"≤ {number(c.target)} {c.unit}", c.verdict)
                for title, c in every]  # fmt: skip
        all_targets = f"# All targets\n\n{WRITTEN}\n## {heading}\n\n{table(('', 'figure', 'target', ''), rows)}"
        short = [row[:3] for row in rows if "missed" in row[-1]]
        if short:
            all_targets += f"\n## Missed targets\n\n{table(('', 'figure', 'target'), short)}"
        tables[f"{TABLES}/targets.md"] = all_targets
        parts.append(f"\n## {heading}\n\n![each figure as a share of its target]({DRAWN}/targets.svg)\n")
        missed = f", [the {len(short)} missed]({TABLES}/targets.md#missed-targets)" if short else ""
        parts.append(f"\nA dot is one figure; [all of them]({TABLES}/targets.md){missed}.\n")
        missing = [name for name in SECTIONS if name not in made]
        if missing:
            parts.append(f"\nNot measured yet: {', '.join(f'`{name}`' for name in missing)}.\n")
    tables[f"{TABLES}/method.md"] = METHOD
    return {**tables, "benchmarks.md": "".join([*parts, *charts, REPRODUCE])}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the page is stale")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args(arguments)
    try:
        fresh = pages(load(options.results))
    except ValueError as error:
        print(f"error: {error}")
        return 1
    there = [path for folder in (TABLES, DRAWN) for path in (options.docs / folder).glob("*.*")]
    old = [path for path in there if path.relative_to(options.docs).as_posix() not in fresh]
    stale = {
        name: text
        for name, text in fresh.items()
        if not (path := options.docs / name).is_file() or path.read_text(encoding="utf-8") != text
    }
    if options.check and (stale or old):
        names = ", ".join([*stale, *(path.name for path in old)])
        print(f"error: these do not match the results: {names}: run python benchmarks/report.py")
        return 1
    if options.check:
        return 0
    for path in old:
        path.unlink()
    for name, text in stale.items():
        (options.docs / name).parent.mkdir(parents=True, exist_ok=True)
        (options.docs / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
