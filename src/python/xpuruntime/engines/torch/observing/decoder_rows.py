# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`observe_decoder`: what an explanation of PyTorch saw of prefills and decode steps, as units of a report."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.base import Observed
from xpuruntime.engines.precision.types import FLOATS
from xpuruntime.engines.torch.pinning import read_back
from xpuruntime.evidence.documents import COLD, COUNTED, checkpoint
from xpuruntime.evidence.records import KeySeen, Time, Unit

if TYPE_CHECKING:
    from xpuruntime.engines.torch.decoder_model import DecoderModel
    from xpuruntime.pytorch.explanation.explanation import Explanation
    from xpuruntime.pytorch.explanation.summary import Row

_GREEDY = {"temperature": 0.0}


def observe_decoder(model: DecoderModel, tokens: Any, runs: int) -> Observed:
    """Generate `runs` times a token after the prompt and one more, watched, after a cold time."""
    from xpuruntime.pytorch.explanation.explain import explain

    new = min(2, model.folder.context - len(tokens))
    spent: list[float] = []

    def generate() -> None:
        began = time.perf_counter_ns()
        if new:
            generated = model.generated(tokens, new, _GREEDY, logprobs=False)
            spent.append(generated.first_ns / 1e3)
        else:
            model._logits(None, tokens)
            spent.append((time.perf_counter_ns() - began) / 1e3)

    generate()
    spent.clear()
    checkpoint(COLD)
    with model.pins.hold(), explain(root=model.module) as explanation:
        for _ in range(runs):
            generate()
    checkpoint(COUNTED)
    rows = [row for row in explanation.rows if row.status != "other"]
    others = sum(row.time_us for row in explanation.rows if row.status == "other")
    units = tuple(_units(model, rows, runs))
    phases = {unit.phase for unit in units}
    notes = [f"the prompt has {len(tokens)} tokens; times are of {explanation.time_kind}, for one run"]
    notes.append(f"operators that no policy can affect took {others / runs:,.1f} us a run, and are not among the units")
    if "decode" not in phases:
        notes.append("no decode step was observed: the prompt fills the context, or its first token ends the text")
    notes += [note for note in explanation.notes if note not in explanation.weight_deviations]
    effective = {"execution.engine": "torch", "execution.device": model.device}
    effective.update(read_back(model.settings, model.switches()))
    keys = _keys(model, rows, explanation)
    if model.captured is not None:
        report = model.captured.report
        notes += str(report).splitlines()
        keys["execution.cuda_graph"] = KeySeen(
            observed=f"{report.replays} steps replayed",
            status="honoured" if report.replays and not report.reasons else "substituted",
            reason="; ".join(report.reasons) or "only first tokens were computed eagerly",
        )
    return Observed(
        units=units,
        effective=effective,
        notes=tuple(notes),
        partial="decode" not in phases,
        keys=keys,
        run_us=tuple(spent),
    )


def _units(model: DecoderModel, rows: Iterable[Row], runs: int) -> Iterable[Unit]:
    """Yield a unit for each operator of each module in each phase, whatever the lengths."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.phase, row.module, row.operator), []).append(row)
    statuses: dict[str, Any] = {"substituted": "substituted", "bypassed": "substituted", "opaque": "unobservable"}
    for (phase, module, operator), kind in sorted(groups.items()):
        ran = sorted({row.resolved or ", ".join(row.observed[:1]) for row in kind} - {""})
        worst = next((row for row in kind if row.status in statuses), kind[0])
        floats = sorted({dtype for row in kind for dtype in row.dtypes if dtype in FLOATS})
        yield Unit(
            id=f"{phase or 'opaque'}:{module or '-'}/{operator}",
            op=kind[0].op or operator,
            relation="opaque" if worst.status == "opaque" else "exact",
            source_nodes=(),
            outputs=(),
            serves=(module or operator,),
            engine="torch",
            device=model.device,
            kernel=", ".join(ran) or None,
            kernel_source="reported" if ran else "unknown",
            precision_requested=model.computes if any(row.dtypes for row in kind) else None,
            precision_run=", ".join(floats) or None,
            time=Time(
                value=sum(row.time_us for row in kind) / runs,
                unit="us",
                kind="device" if model.device != "cpu" else "wall",
                runs=runs,
            ),
            placement_reason=worst.reason or None,
            status=statuses.get(worst.status, "honoured"),
            phase=phase if phase in ("prefill", "decode") else "",
        )


def _keys(model: DecoderModel, rows: list[Row], explanation: Explanation) -> dict[str, KeySeen]:
    seen: dict[str, KeySeen] = {}
    for control in model.controls:
        if control.enforceability == "unsupported" or control.key == "kernels.auto_strategy":
            continue
        if control.key.startswith("kernels."):
            of_key = [row for row in rows if model.pins.keys.get(row.source) == control.key]
            said = (sentence.partition(" ") for sentence in (*explanation.never_ran, *explanation.unmatched))
            idle = next((rest for source, _, rest in said if model.pins.keys.get(source) == control.key), "")
            seen[control.key] = _kernel_seen(of_key, idle and f"{control.key} {idle}")
        elif control.key.startswith("execution.weights.") and not control.key.endswith(".exclude"):
            seen[control.key] = _weights_seen(control.key, explanation)
    return seen


def _kernel_seen(rows: list[Row], idle: str) -> KeySeen:
    if not rows and idle:
        return KeySeen(observed="-", status="substituted", reason=idle)
    if not rows:
        return KeySeen(
            observed="-", status="unobservable", reason="no call of the observed runs was one that it is for"
        )
    counts: dict[str, int] = {}
    for row in rows:
        name = row.resolved or ", ".join(row.observed[:1]) or "unknown"
        counts[name] = counts.get(name, 0) + row.count
    observed = ", ".join(f"{name} ({count} calls)" for name, count in sorted(counts.items()))
    wrong = next((row for row in rows if row.status != "honoured"), None)
    if wrong is None:
        return KeySeen(observed=observed, status="honoured", reason="every call that it is for was served by it")
    status: Any = "unobservable" if wrong.status == "opaque" else "substituted"
    return KeySeen(observed=observed, status=status, reason=f"{wrong.title}: {wrong.reason or wrong.status}")


def _weights_seen(key: str, explanation: Explanation) -> KeySeen:
    kinds = {weight.storage if key.endswith("storage") else weight.compute for weight in explanation.weights}
    if key.endswith("group"):
        kinds = {str(weight.group) for weight in explanation.weights}
    wrong = next((sentence for sentence in explanation.weight_deviations if key in sentence), "")
    unsure = wrong.startswith("inconclusive")
    status: Any = "unobservable" if unsure else "substituted" if wrong else "honoured"
    return KeySeen(observed=", ".join(sorted(kinds)), status=status, reason=wrong or "compared in each linear layer")
