# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The sections of ``docs/benchmarks.md`` on policies for PyTorch, training steps and collectives."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

from report_generation import GENERATION_SECTIONS
from report_parts import Check, Section, machine, number, spread, table, target_table
from xpuruntime.measuring.statistics import Interval, paired_ratio

if TYPE_CHECKING:
    from collections.abc import Callable

ANCHOR = "by hand"


def override_overhead(record: dict[str, Any]) -> Section:
    """Overhead of a policy for a call that it leaves to PyTorch, and for one that it gives to an xpuruntime kernel."""
    samples, device = record["samples_us"], record["device"]
    least = {op: {state: min(values) for state, values in states.items()} for op, states in samples.items()}
    checks = [
        Check(f"{op}: {state}", times[state] - times["native"], record["targets"][op], "µs")
        for op, times in least.items()
        for state in times
        if state == "no rule matches"
    ]
    states = list(next(iter(least.values())))
    rows = [
        [state, *(number(times[state] - (0 if state == "native" else times["native"])) for times in least.values())]
        for state in states
    ]
    count = len(next(iter(next(iter(samples.values())).values())))
    note = f"{record['note']} " if "note" in record else ""
    text = (
        "What does a policy cost a call of PyTorch's operators on the host? *native* is the time of the call without a "
        "policy; the other rows are what comes on top of it. The products are tiny, so that only the host is measured, "
        f"and of the {count} rounds the least counts.\n\n{machine(record)}\n{note}"
        f"`python benchmarks/bench_override_overhead.py --device {device}`\n\n"
        f"{table(('µs a call', *least), rows)}"
    )
    steps = record.get("step_samples_ms", {})
    for name, found in steps.items():
        costs = {
            state: paired_ratio(times, found["native"], confidence=0.95)
            for state, times in found.items()
            if state != "native"
        }
        checks += [
            Check(f"{name}: rules on {state}", (cost.ratio - 1) * 100, record["step_target"] * 100, "%")
            for state, cost in costs.items()
            if state != "cleared"
        ]
        rows = [[state, *(number(round((value - 1) * 100, 9)) for value in cost)] for state, cost in costs.items()]
        text += (
            f"\nAn eager training step of {name}, whose host is what takes the time, without a policy: "
            f"{number(statistics.median(found['native']))} ms, the least of a few steps in each round. On top of it, "
            f"the median of the rounds, under policies of whose rules none matches, with the interval in which 95 % of "
            f"such medians lie where rounds are drawn anew; *cleared* is native once more, and says how much is "
            f"noise:\n\n"
            f"{table(('rules on', '%', 'from', 'to'), rows)}"
        )
    text += f"\n{target_table(checks)}"
    return Section(f"A policy on PyTorch's calls on {device}", text, tuple(checks))


def training_step(record: dict[str, Any]) -> Section:
    """Whole steps, for each shape all variants of all phases beside the capture by hand of the same phase."""
    cases = record["cases"]
    parts, checks = [], []
    for shape in dict.fromkeys(case["shape"] for case in cases):
        found = [case for case in cases if case["shape"] == shape]
        parts.append(f"### {shape}\n\n{_steps(found)}\n{_to_eager(found)}{_losses_to_compile(found)}")
        checks += _step_checks(found, record["targets"])
    policies = "".join(f"* {name}: `{json.dumps(policy)}`\n" for name, policy in record["policies"].items())
    note = f"{record['note']} " if "note" in record else ""
    quick = "**Models of two layers only, which says no more than that it runs.** " if record["quick"] else ""
    text = (
        "How long does a whole training step take, forward, backward and optimizer: eager, compiled by "
        "`torch.compile`, captured into a CUDA graph by hand, and by `capture_graph`, without a policy and under two?"
        f"\n\n{machine(record)}\n{note}"
        f"`python benchmarks/bench_training_step.py`: {quick}{record['dtype']}; "
        f"{record['optimizer']}; {record['rounds']} rounds, in each of which the least of {record['calls']} steps, "
        "each waited for, counts. A policy holds process-wide, so captures under one run in a phase of their own, in "
        "which the capture by hand, made without a policy, runs too; *to by hand* is the time over that of the same "
        "phase. Eager steps, under a policy or not, take turns in one phase, and *to eager* is the median of their "
        "rounds, for the tuned policy of many more in which these two alone take turns of five steps, with the "
        "interval in which 95 % of such medians lie where rounds are drawn anew. *Drift* is the largest difference of "
        "the first losses from those of the capture by hand, relative; more than 0.02 would be an error."
        f"\n\nThe policies:\n\n{policies}\n" + "\n".join(parts) + f"\n{target_table(checks)}"
    )
    return Section("Training steps", text, tuple(checks))


def _steps(cases: list[dict[str, Any]]) -> str:
    rows = []
    for case in cases:
        name = f"{case['variant']} ({case['phase']})" if case["variant"] == ANCHOR else case["variant"]
        if "ms" not in case:
            rows.append([name, *["-"] * 5, f"failed: {_line(case['error'])}"])
            continue
        times = [f"{case[key]:.3f}" for key in ("ms", "p10", "p90")]
        note = f"failed: {_line(case['error'])}" if "error" in case else ""
        ratio = f"{case['to_anchor']:.3f}" if "to_anchor" in case else "-"
        drift = f"{case['loss_drift']:.1e}" if "loss_drift" in case else "-"
        rows.append([name, *times, ratio, drift, note])
    head = ["ms a step", "median", "p10", "p90", "to by hand", "drift"]
    if any(row[-1] for row in rows):
        return table([*head, ""], rows)
    return table(head, [row[:-1] for row in rows])


def _line(text: str) -> str:
    """Return a message as what can stand in a cell."""
    return text.partition("\n")[0].replace("|", "/")[:120]


def _losses_to_compile(cases: list[dict[str, Any]]) -> str:
    """Say where `torch.compile` is faster than the best of xpuruntime, and why it can be."""
    ratio = {case["variant"]: case["to_anchor"] for case in cases if "to_anchor" in case and "error" not in case}
    ours = {name: value for name, value in ratio.items() if name.startswith("capture_graph")}
    if not ours:
        return ""
    best = min(ours, key=lambda name: ours[name])
    faster = [
        f"`{name}` {number((1 - value / ours[best]) * 100)} %"
        for name, value in ratio.items()
        if name.startswith("compile") and value < ours[best]
    ]
    if not faster:
        return f"\nNo variant of `torch.compile` is faster than `{best}`.\n"
    return (
        f"\nFaster than `{best}`, each compared with the capture by hand of its phase: {', '.join(faster)}. "
        "`torch.compile` makes few kernels of what lies between the products: norms, activations, additions, casts, "
        "the loss, as the next section shows. A policy chooses kernels of single operations and fuses none.\n"
    )


def _over_eager(cases: list[dict[str, Any]]) -> dict[str, tuple[Interval, int]]:
    """Return what eager steps of each variant cost over those without a policy, and in how many rounds.

    Where there were rounds of the two alone, those.
    """
    found = {case["variant"]: case for case in cases if case["variant"].startswith("eager") and "error" not in case}
    plain = found.pop("eager", None)
    if plain is None:
        return {}
    rounds = {name: "pair_samples_ms" if "pair_samples_ms" in found[name] else "samples_ms" for name in sorted(found)}
    return {
        name: (paired_ratio(found[name][which], plain[which], confidence=0.95), len(plain[which]))
        for name, which in rounds.items()
    }


def _to_eager(cases: list[dict[str, Any]]) -> str:
    """Compare eager steps under a policy with those without."""
    rows = [
        [name, *(f"{value:.3f}" for value in cost), str(rounds)] for name, (cost, rounds) in _over_eager(cases).items()
    ]
    return f"{table(('to eager', 'median', 'from', 'to', 'rounds'), rows)}\n" if rows else ""


def _step_checks(cases: list[dict[str, Any]], targets: dict[str, float]) -> list[Check]:
    checks = []
    ratio = {case["variant"]: case["to_anchor"] for case in cases if "to_anchor" in case and "error" not in case}
    shape = cases[0]["shape"]
    for variant, target in (
        ("capture_graph", "capture_graph to by hand"),
        ("capture_graph, tuned", "tuned to by hand"),
    ):
        if variant in ratio:
            checks.append(Check(f"{shape}: {variant}, to by hand", ratio[variant], targets[target], "times"))
    costs = _over_eager(cases)
    if "eager, tuned" in costs:
        figure = costs["eager, tuned"][0].ratio
        checks.append(Check(f"{shape}: eager, tuned, to eager", figure, targets["tuned to by hand"], "times"))
    return checks


def training_kernels(record: dict[str, Any]) -> Section:
    """Return where the time of steps goes on the device, by kind of kernel."""
    parts = []
    for shape in dict.fromkeys(case["shape"] for case in record["cases"]):
        cases = {case["variant"]: case for case in record["cases"] if case["shape"] == shape}
        kinds = sorted(
            {kind for case in cases.values() for kind in case["ms"]},
            key=lambda kind: -max(case["ms"].get(kind, 0.0) for case in cases.values()),
        )
        rows = [[kind, *(f"{case['ms'].get(kind, 0.0):.2f}" for case in cases.values())] for kind in kinds]
        rows.append(["all", *(f"{sum(case['ms'].values()):.2f}" for case in cases.values())])
        rows.append(["kernels", *(f"{case['kernels']:.0f}" for case in cases.values())])
        parts.append(f"### Kernels of {shape}\n\n{table(('ms a step', *cases), rows)}\n")
    text = (
        "What do the kernels of these steps do? The time on the device of a step without a policy, by kind of kernel, "
        "as PyTorch's profiler saw them. Pointwise kernels are those of additions, activations, casts and copies; of "
        "compiled code, those that Inductor made, in which norms and the loss are too. Inductor also pads matrices "
        "whose rows are not aligned (its option `shape_padding`), as those of 50,257 or 30,522 words are; eager code, "
        "and so a policy and a captured graph, multiplies them as they are.\n\n"
        f"{machine(record)}\n`python benchmarks/bench_training_kernels.py`, {record['steps']} steps.\n\n"
        + "\n".join(parts)
    )
    return Section("Kernels of training steps", text)


def collectives(record: dict[str, Any]) -> Section:
    """All-reduce for each size, xpuruntime beside PyTorch's over the same NCCL."""
    ranks = record["ranks"]
    names = list(record["cases"][0]["samples_us"])
    rows, host = [], []
    for case in record["cases"]:
        found = {name: spread(values)[0] for name, values in case["samples_us"].items()}
        bandwidth = 2 * (ranks - 1) / ranks * case["bytes"] / min(found.values()) / 1e3
        rows.append([_size(case["bytes"]), *(number(found[name]) for name in names), number(bandwidth)])
    least = record["cases"][0]
    for name, values in least["host_us"].items():
        host.append([name, number(statistics.median(values))])
    text = (
        f"How long does an all-reduce between {ranks} GPUs take through us, beside `torch.distributed` over the same "
        f"NCCL? In place, {record['dtype']}, the median on the device; *graph* is a CUDA graph of "
        f"{record['in_a_graph']} calls, divided by them. *GB/s* is the bus bandwidth of the quickest case.\n\n"
        f"{machine(record)}\n{ranks} of {record['device']}, NCCL {record['nccl']}, `NCCL_NVLS_ENABLE`: "
        f"{record['nvls']}. `python benchmarks/bench_collectives.py --ranks {ranks}`\n\n"
        f"{table(('µs a call', *names, 'GB/s'), rows)}\n"
        f"What the host needs to enqueue a call of {_size(least['bytes'])}; of a graph, divided by its calls:\n\n"
        f"{table(('', 'µs'), host)}"
    )
    return Section("All-reduce between GPUs", text)


def many_gpus(record: dict[str, Any]) -> Section:
    """Show steps of a Llama for each number of ranks and way to share it, beside one rank and compiled code."""
    rows, checks, choices = [], [], {}
    efficiencies = {
        (case["ranks"], case["wrap"], case["variant"]): case["efficiency"]
        for case in record["cases"]
        if "efficiency" in case
    }
    for case in record["cases"]:
        begin = [f"{case['ranks']} {case['wrap']}", f"`{case['variant']}`"]
        if "samples_ms" not in case:
            rows.append([*begin, *["-"] * 6, f"failed: {_line(case.get('error', 'not timed'))}"])
            continue
        ratio = case.get("faster_than_compile")
        share = case["collectives_share"]
        rows.append([
            *begin, f"{spread(case['samples_ms'])[0]:.3f}", f"{case['tokens_per_second']:,.0f}",
            f"{case['efficiency']:.3f}" if "efficiency" in case else "-",
            "-" if ratio is None else f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]",
            f"{max(case['peak_bytes']) / 2**20:,.0f}" if "peak_bytes" in case else "-",
            share if isinstance(share, str) else f"{100 * max(share):.1f}",
            {True: "yes", False: "no"}.get(case.get("same_kernels"), "unobservable"),
        ])  # fmt: skip
        if case["ranks"] > 1:
            choices[f"{case['ranks']} ranks, {case['wrap']}"] = case["choices"]
        if case["ranks"] > 1 and case["variant"].startswith("captured"):
            of = f"{case['ranks']} ranks, {case['wrap']}, {case['variant']}"
            eager = efficiencies.get((case["ranks"], case["wrap"], "eager"))
            if eager and "efficiency" in case:
                checks.append(Check(f"{of}: efficiency lost to eager", 100 * (1 - case["efficiency"] / eager), 3, "%"))
            if case["wrap"] == "fsdp2" and ratio is not None and record["size"] == "small":
                wanted = 100 / record["targets"]["captured FSDP2 to compiled"]
                checks.append(Check(f"{of}: time compared with compiled code", 100 / ratio[0], wanted, "%"))
    head = (
        "ranks", "variant", "ms", "tokens/s", "efficiency", "speed of compile", "MiB a rank", "NCCL %", "same kernels",
    )  # fmt: skip
    ran = "".join(
        f"* {where}: {found if isinstance(found, str) else ', '.join(f'{name} ({n})' for name, n in found.items())}\n"
        for where, found in choices.items()
    )
    most = ",".join(str(ranks) for ranks in dict.fromkeys(case["ranks"] for case in record["cases"]))
    note = f"{record['note']} " if "note" in record else ""
    text = (
        "How do training steps of a Llama scale, under DDP, FSDP2 and with tensor-parallel layers: eager, compiled, "
        "captured after compiling, and that under `auto`? A time is that of the slowest rank. *Efficiency* is the "
        "throughput of a GPU compared with one GPU under the same variant. *NCCL %* is the share of its kernels in the "
        "time of all kernels of a step, as PyTorch's profiler saw them, and *same kernels* whether all ranks ran the "
        f"same ones.\n\n{machine(record)}\n{note}{record['device']}, NCCL {record['nccl']}, `NCCL_NVLS_ENABLE`: "
        f"{record['nvls']}. `python benchmarks/bench_many_gpus.py --ranks {most} --size {record['size']}`: "
        f"{record['rounds']} rounds of {record['calls']} steps.\n\n{table(head, rows)}\n"
        f"What NCCL logged of an eager run, with how often:\n\n{ran}\n{target_table(checks) if checks else ''}"
    )
    return Section("Training steps on many GPUs", text, tuple(checks))


def model_steps(record: dict[str, Any]) -> Section:
    """Show steps of models of transformers, each mode in a process of its own."""
    rows, checks, chosen = [], [], []
    for case in record["cases"]:
        layers = f", {case['layers']} layers" if case.get("layers") else ""
        sizes = f", {' x '.join(map(str, case['batch']))}" if "batch" in case else ""
        begin = [f"{case['model']}{layers}{sizes}", f"`{case['mode']}`"]
        if "error" in case:
            rows.append([*begin, *["-"] * 7, f"failed: {_line(case['error'])}"])
            continue
        gib = [number(case[f"{name}_gib"]) if f"{name}_gib" in case else "-" for name in ("steady", "peak", "reserved")]
        times = [number(value) for value in spread(case["samples_ms"])]
        drift = [f"{case[name]:.1e}" if name in case else "-" for name in ("loss_difference", "from_float32")]
        rows.append([*begin, *times, *gib, *drift])
        if case["mode"] == "eager auto":
            chosen += [
                f"* {case['model']}, {case.get('size', 'usual')}, {op}: "
                + ", ".join(f"`{name}` {number(us / 1e3)} ms" for name, us in found.items())
                for op, found in case["kernels_us"].items()
            ]
    kinds = [
        (case["model"], case.get("size", "usual"), *([f"{case['layers']} layers"] if case.get("layers") else []))
        for case in record["cases"]
    ]
    by_mode = {
        (*kind, case["mode"]): case for kind, case in zip(kinds, record["cases"], strict=True) if "error" not in case
    }
    for only, mode, than, bars in record["bars"]:
        for kind in dict.fromkeys(kinds):
            measured, reference = by_mode.get((*kind, mode), {}), by_mode.get((*kind, than), {})
            checks += [
                Check(
                    f"{', '.join(kind)}, {mode} over {than}: {figure}",
                    measured[figure] / reference[figure],
                    bar,
                    "times",
                )
                for figure, bar in bars.items()
                if only in ("", *kind) and figure in measured and figure in reference
            ]
    head = (
        "model, batch", "mode", "ms", "p10", "p90", "GiB", "peak GiB", "reserved GiB",
        "loss differs by", "from float32 by",
    )  # fmt: skip
    text = (
        "What does a training step of a model of transformers take, plain, by Liger's own patches, and under a policy "
        "that has all kernels measured (`auto`)? *GiB* is the peak of the timed steps, *peak* that of the whole "
        "process, measuring and capture included. Losses are compared with those of the plain eager step, or "
        "of plain compiled code where that was left out, and with those of a step in float32. `eager reordered` is a "
        "plain step of the same rows in another order, whose losses differ by rounding alone.\n\n"
        f"{machine(record)}\n`python benchmarks/bench_model_steps.py`: random weights, {record['dtype']}, "
        f"{record['optimizer']}; each mode in a process of its own.\n\n{table(head, rows)}\n"
        + (f"Kernels of the eager step under `auto`:\n\n{chr(10).join(chosen)}\n\n" if chosen else "")
        + (f"{record['remark']}\n\n" if "remark" in record else "")
        + (target_table(checks) if checks else "")
    )
    return Section("Steps of models of transformers", text, tuple(checks))


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


#: Result name to what writes its section.
PYTORCH_SECTIONS: dict[str, Callable[[dict[str, Any]], Section]] = {
    "override_overhead_cpu": override_overhead,
    "override_overhead_cuda": override_overhead,
    "training_step": training_step,
    "training_kernels": training_kernels,
    "collectives": collectives,
    "many_gpus": many_gpus,
    "model_steps": model_steps,
    **GENERATION_SECTIONS,
}
