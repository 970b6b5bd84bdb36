# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The sections of ``docs/benchmarks.md`` on training steps that ``xpuruntime.pytorch.tune`` made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from report_parts import Check, Section, machine, spread, table, target_table

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["STEP_TUNING_SECTIONS"]

_TUNED, _OVERHEAD = "tuned", "compile:reduce-overhead"
MIB = 1 << 20


def tuned_steps(record: dict[str, Any]) -> Section:
    """Show each step by hand and tuned, and the race that the tuner decided."""
    ranks, parts, checks = record["ranks"], [], []
    for name, case in record["cases"].items():
        note = f"{case['note']}\n\n" if "note" in case else ""
        parts.append(f"### {name}\n\n{note}{_steps(case)}\n{_race(case)}")
        checks += [] if record["quick"] else _checks(name, case, record["target"])
    by = f" --ranks {ranks}" if ranks > 1 else ""
    on = f" on {ranks} GPUs" if ranks > 1 else ""
    quick = "**Models of two layers only, which says no more than that it runs.** " if record["quick"] else ""
    note = f"{record['note']} " if "note" in record else ""
    text = (
        f"Does `xpuruntime.pytorch.tune` make a training step{on} that is faster than what is written by hand? "
        "Models of transformers under autocast with AdamW, each from the same weights on the same batches.\n\n"
        f"{machine(record)}\n{note}`python benchmarks/bench_step_tuning.py{by}`: {quick}"
        f"{record['rounds']} rounds of {record['calls']} steps of each variant, the order rotated. *Tuned to it* is "
        "the median of the ratios of the rounds with its interval; below 1, the tuned step is faster. "
        '`torch.compile(mode="reduce-overhead")` runs in the race of the tuner; the ratio to it has the worst ends '
        "of both intervals. *Losses* is the largest relative difference of the loss curve from that of the eager "
        "step.\n\n" + "\n".join(parts) + (f"\n{target_table(checks)}" if checks else "")
    )
    return Section(f"Tuned training steps{on}", text, tuple(checks))


def _steps(case: dict[str, Any]) -> str:
    rows = []
    for variant, row in case["variants"].items():
        label = f"tuned (`{case['winner']}`, {case['verdict']})" if variant == _TUNED else f"`{variant}`"
        figures = [f"{value:.3f}" for value in spread(row["samples_ms"])]
        rows.append([label, *figures, _size(row["peak"]), _share(row["loss_difference"]),
                     f"{row['prepare_s']:.0f}", _ratio(case["ratios"].get(variant))])  # fmt: skip
    rows += [[f"`{name}`", *["-"] * 6, f"failed: {_line(why)}"] for name, why in case["failures"].items()]
    head = ("ms a step", "median", "p10", "p90", "MiB", "losses", "first steps, s", "tuned to it")
    return table(head, rows)


def _race(case: dict[str, Any]) -> str:
    """Show the candidates of the race, with what each was left out for."""
    rows = []
    for candidate in case["candidates"]:
        seconds = "-" if candidate["seconds"] is None else f"{candidate['seconds'] * 1e3:.3f}"
        to_it = _ratio(case["ratios"].get(_OVERHEAD)) if candidate["name"] == _OVERHEAD else "-"
        outcome = (
            candidate["code"]
            if candidate["seconds"] is not None
            else f"{candidate['code']}: {_line(candidate['reason'])}"
        )
        rows.append([f"`{candidate['name']}`", seconds, _ratio(candidate["ratio"]), _size(candidate["memory"]),
                     _share(candidate["loss_difference"]), to_it, outcome])  # fmt: skip
    head = ("race of the tuner", "ms", "to eager", "MiB", "losses", "tuned to it", "outcome")
    return f"{table(head, rows)}\n"


def _checks(name: str, case: dict[str, Any], target: float) -> list[Check]:
    ratios = case["ratios"]
    checks = [Check(f"{name}: tuned to the step by hand, {variant}", ratios[variant][0], 1.0, "times")
             for variant in case["variants"] if variant in ratios]  # fmt: skip
    if _OVERHEAD in ratios:
        what = f'{name}: tuned to torch.compile(mode="reduce-overhead")'
        checks.append(Check(what, ratios[_OVERHEAD][0], target, "times"))
    return checks


def _ratio(ratio: list[float] | None) -> str:
    return "-" if ratio is None else f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]"


def _size(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _line(text: str) -> str:
    """Return a message as what can stand in a cell."""
    return text.partition("\n")[0].replace("|", "/")[:120]


STEP_TUNING_SECTIONS: dict[str, Callable[[dict[str, Any]], Section]] = {
    f"step_tuning{ranks}": tuned_steps for ranks in ("", "_2")
}
