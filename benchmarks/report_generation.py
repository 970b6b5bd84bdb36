# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sections of the report about language models: captured decoding, planted faults, quantized weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from report_parts import Check, Section, machine, number, table, target_table

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GENERATION_SECTIONS"]


def generation(record: dict[str, Any]) -> Section:
    """Show what a token takes of captured decode steps."""
    rows, checks, bars = [], [], record["targets"]
    ways = {(case["mode"], case["shape"], case["batch"]): case for case in record["records"]}
    for case in sorted(record["records"], key=lambda case: (case["shape"], case["batch"])):
        shape, batch, step, plain = case["shape"], case["batch"], case.get("step_us"), case.get("plain_first_token_us")
        first = [case["first_token_us"] / 1e3, None if plain is None else plain / 1e3]
        figures = [
            step,
            case["token_us"],
            case["floor_us"],
            (step or case["token_us"]) / case["floor_us"],
            *first,
            case.get("peak_gib"),
            100 * case["top1"],
        ]
        rows.append([shape, str(batch), f"`{case['mode']}`", *("-" if x is None else number(x) for x in figures)])
        if case["mode"] != "fused" or step is None:
            continue
        name, step_of_1 = f"{shape}, {batch} rows", ways.get(("fused", shape, 1), {}).get("step_us")
        anchor, static = (ways.get((mode, shape, batch), {}) for mode in ("anchor", "static"))
        if batch == 1 and shape in bars["step_us"]:
            checks.append(Check(f"{name}: a step", step, bars["step_us"][shape], "µs"))
        if batch == 1 and shape in bars["of_floor"]:
            checks.append(
                Check(f"{name}: a step over reading", step / case["floor_us"], bars["of_floor"][shape], "times")
            )
        if step_of_1 and str(batch) in bars["of_one_row"]:
            checks.append(
                Check(f"{name}: a step over that of 1", step / step_of_1, bars["of_one_row"][str(batch)], "times")
            )
        if anchor.get("step_us"):
            checks.append(Check(f"{name}: a step over that of the anchor", step / anchor["step_us"], 1.0, "times"))
        if static.get("peak_gib"):
            memory = case["peak_gib"] / static["peak_gib"]
            checks.append(Check(f"{name}: memory over that of a static cache", memory, bars["memory"], "times"))
        if plain:
            of_plain = case.get("first_of_plain", [first[0] * 1e3 / plain])[0]
            checks.append(Check(f"{name}: the first token", of_plain, bars["first"], "times plain"))
    head = (
        "model", "rows", "mode", "µs a step", "µs a token", "µs to read it", "times that", "first token, ms",
        "plain, ms", "peak GiB", "top-1, %",
    )  # fmt: skip
    text = (
        "What does a token of a Llama with random weights in bfloat16 take, 128 tokens of prompt and 256 more? A "
        "*step* is the replay of a graph, a *token* `generate` from end to end without the first. *To read it*: "
        f"weights and cache at {record['bandwidth'] / 1e12:.2f} TB/s, the rate of a copy. *Anchor*: "
        '`torch.compile(mode="max-autotune-no-cudagraphs")`, captured by hand. *Loop*: ours without graphs. '
        f"*Top-1*: how often a plain forward over the same text puts the same token first.\n\n{machine(record)}\n"
        f"`python benchmarks/bench_generation.py{' --ahead' * record.get('compiled_ahead', False)}`.\n\n"
        f"{table(head, rows)}\n{record.get('remark', '')}\n\n{target_table(checks) if checks else ''}"
    )
    return Section("Generation by captured steps", text, tuple(checks))


def planted_faults(record: dict[str, Any]) -> Section:
    cases = {(row["dtype"], row["fault"], row["family"]): row for row in record["rows"]}
    families = list(dict.fromkeys(row["family"] for row in record["rows"]))
    rows = []
    for dtype, fault in dict.fromkeys((dtype, fault) for dtype, fault, _ in cases):
        cells = []
        for family in families:
            case = cases.get((dtype, fault, family))
            cells.append("-" if case is None else f"{', '.join(case['failed']) or 'none'} ({_kl(case)})")
        rows.append([fault, dtype, *cells])
    sound = [case for case in cases.values() if case["fault"] == "none"]
    faulty = [case for case in cases.values() if case["fault"] != "none"]
    fused = [family for family in families if any(case["fused"] for case in sound if case["family"] == family)]
    eager = [
        family for family in families if any(case["reasons"] for case in cases.values() if case["family"] == family)
    ]
    limits = "; ".join(
        f"{dtype.removeprefix('torch.')}: {', '.join(f'{name} {limit}' for name, limit in stated.items())}"
        for dtype, stated in record["limits"].items()
    )
    text = (
        "Which gates fail when a fault is planted into a captured model? Small models of bytes, trained for seconds, "
        "beside plain `generate` of the sound model in the same type; in parentheses the mean KL divergence in nats. "
        f"Five kernels a layer: {', '.join(fused) or 'none'}. Some steps eager: {', '.join(eager) or 'none'}. Limits: "
        f"{limits}. Of {len(faulty)} faults, {sum(bool(case['failed']) for case in faulty)} are caught; of "
        f"{len(sound)} sound models, {sum(bool(case['failed']) for case in sound)} are refused.\n\n{machine(record)}\n"
        f"`python benchmarks/bench_gates.py`.\n\n{table(('fault', 'type', *families), rows)}"
    )
    return Section("Faults planted into captured decoding", text)


def _kl(case: dict[str, Any]) -> str:
    return f"{case['gates']['kl'][2]['kl']:.1e}"


def _kernel_name(kernel: str) -> str:
    return kernel.removeprefix("void ").partition("(")[0].partition("<")[0].rpartition("::")[2]


def weights(record: dict[str, Any]) -> Section:
    plain = next((row.get("step_us") for row in record["rows"] if row["mode"] == "bf16"), None)
    rows, checks = [], []
    for row in record["rows"]:
        step = row.get("step_us")
        if row.get("refused"):
            rows.append([f"`{row['mode']}`", *("-" * 6), row["refused"]])
            continue
        gates = row.get("gates", {})
        rows.append([
            f"`{row['mode']}`",
            ", ".join(f"`{name}`" for name in row.get("operators", ())) or "-",
            f"`{_kernel_name(next(iter(row['kernels'])))}`" if row.get("kernels") else "; ".join(row["reasons"]) or "-",
            number(step) if step else "-",
            number(step / plain) if step and plain else "-",
            f"{number(row['layers_us'])} of {number(row['floor_us'])}" if row.get("floor_us") else "-",
            f"{gates['kl'][2]['kl']:.1e}" if gates else "-",
            row.get("traffic", "-"),
        ])  # fmt: skip
        if row["mode"] == "fp8/fp8" and step and plain:
            checks.append(Check("fp8 computed in fp8: a step over that of bf16", step / plain, 1.0, "times"))
    head = (
        "stored/computed",
        "operators, eager",
        "longest kernel of a step, or why there is none",
        "µs a step",
        "of bf16",
        "µs in layers, to read bf16",
        "KL, nats",
        "less read",
    )
    text = (
        "Decode steps of one row of a random decoder in bfloat16, 4 layers of width 4096. A *step* is the replay of a "
        "graph of compiled code; *in layers* is the device's time in linear layers of an eager step, beside the least "
        "in which the same weights are read in bf16: *less read* is proved where it is shorter. *KL*: from bf16, whose "
        f"limit here is 1 nat, with random weights.\n\n{machine(record)}\n"
        f"`python benchmarks/bench_weights.py`.\n\n{table(head, rows)}\n"
        f"{record.get('remark', '')}\n\n{target_table(checks) if checks else ''}"
    )
    return Section("Quantized weights", text, tuple(checks))


def decode_policies(record: dict[str, Any]) -> Section:
    names = list(dict.fromkeys(name for row in record["rows"] for name in row["step_us"]))
    rows, checks = [], []
    for row in record["rows"]:
        what = "layers fused where the policy leaves them open" if row["fuse"] else "single kernels"
        steps = [number(row["step_us"][name]) if name in row["step_us"] else "-" for name in names]
        best = row.get("auto_of_best")
        rows.append([what, *steps, "-" if best is None else f"{best[0]:.3f} [{best[1]:.3f}, {best[2]:.3f}]"])
        if best is not None:
            checks.append(Check(f"{what}: `auto` over `{row['best']}`", best[0], record["target"], "times"))
    text = (
        "Does `auto` find what a decode step should run? The same captured step of a random Llama of one row "
        f"(`{record['shape']}`), of code that torch.compile has not compiled, under no policy, under `auto` with "
        "`best_performance`, and under kernels that are named; µs of a replay, in turns. The last column is `auto` "
        f"over the best of those with names.\n\n{machine(record)}\n`python benchmarks/bench_decode_policies.py`.\n\n"
        f"{table(('step', *names, 'ratio'), rows)}\n{record.get('remark', '')}\n\n"
        f"{target_table(checks) if checks else ''}"
    )
    return Section("Policies of captured decoding", text, tuple(checks))


#: Result name to what writes its section.
GENERATION_SECTIONS: dict[str, Callable[[dict[str, Any]], Section]] = {
    "generation": generation,
    "gates_cuda": planted_faults,
    "weights_cuda": weights,
    "decode_policies": decode_policies,
}
