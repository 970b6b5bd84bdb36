# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Pages of one file: two reports, several engines on one model, any record; their own policy lets nothing else in."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.evidence.difference import difference_rows
from xpuruntime.evidence.render_text.changes import arrow_text, boundary_row, change_text, units_text
from xpuruntime.evidence.render_text.sections import call_at, memory_change_rows
from xpuruntime.files.paths import json_bytes
from xpuruntime.notebook import escaped, fragment, fragment_style, fragment_table
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from xpuruntime.evidence.report_comparison import GroupChange, ReportComparison

_HERE = Path(__file__).parent
#: How each template begins; the frame says it for the whole page.
_LICENCE = "<!-- SPDX-License-Identifier: Apache-2.0 -->\n<!-- SPDX-FileCopyrightText: The xpuruntime developers -->\n"
#: In JSON these may stand as escapes only: inside of HTML they could end the block that holds them.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def assemble(template: str, kind: str, scripts: tuple[str, ...], title: str, data: object, fragment: str) -> str:
    """Return a page made of a template."""
    style, script = _assets(scripts)
    parts = {
        "kind": html.escape(kind),
        "policy": html.escape(_content_policy(style, script)),
        "title": html.escape(title),
        "style": style,
        "data": re.sub("[<>&\u2028\u2029]", lambda match: _ESCAPES[match.group()], json_bytes(data).decode()),
        "script": script,
        "fragment": fragment,
    }
    body = (_HERE / template).read_text(encoding="utf-8").removeprefix(_LICENCE)
    text = (_HERE / "frame.html").read_text(encoding="utf-8").replace("{{body}}", body)
    return printable(re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], text))


@functools.cache
def _assets(scripts: tuple[str, ...]) -> tuple[str, str]:
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    bodies = "\n".join((_HERE / "js" / f"{name}.js").read_text(encoding="utf-8") for name in scripts)
    return style, f'"use strict";\n(() => {{\n{bodies}}})();\n'


def _content_policy(style: str, script: str) -> str:
    """Return the Content-Security-Policy: nothing, but the style and script that are in the page."""
    return (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)} {_digest(fragment_style())}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def render_shown(kind: str, title: str, shown: str) -> str:
    """Return the page of a record that has none of its own: what it shows in a notebook."""
    return assemble("shown.html", kind, ("elements", "shell", "shown"), title, {}, f"<h1>{escaped(title)}</h1>{shown}")


_STATUS_PARTS = ("elements", "served", "shell", "serving")


def render_serving(plain: Mapping[str, Any]) -> str:
    """Return the page of a server."""
    state = "ready" if plain["ready"] else "not ready"
    rows = [
        (model["name"], model["version"] or "-", model["state"], model["reason"] or model["engine"])
        for model in plain["models"]
    ]
    kind = "honoured" if plain["ready"] else "substituted"
    told = fragment(
        (
            f"<p class='xrt-headline xrt-{kind}'>{escaped(state)} {escaped(plain['reason'])}</p>",
            fragment_table("Models", ("model", "version", "state", "engine"), rows),
        )
    )
    return assemble("serving.html", "status", _STATUS_PARTS, f"{state} - xpuruntime", dict(plain), told)


_TIMED = ("elements", "intervals", "shell", "timings")
#: Runs of one call that are drawn.
_DRAWN = 1000


def render_timings(plain: Mapping[str, Any], baselines: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the page of a benchmark beside earlier ones. The first of those is the baseline, else its first call."""
    own = plain["samples_us"]
    base = baselines[0][1]["samples_us"] if baselines else dict.fromkeys(own, next(iter(own.values())))
    named = [(call, call, samples) for call, samples in own.items()]
    named += [
        (f"{name}: {call}", call, held) for name, timings in baselines for call, held in timings["samples_us"].items()
    ]
    rows = [_timed_row(name, samples, base.get(call)) for name, call, samples in named]
    headline = ", ".join(f"{call} {plain['latency'][call]['median_us']:,.1f} us" for call in own)
    facts = {"version": "engine_version", "CUDA graph": "cuda_graph"}
    data = {
        "headline": headline,
        "known": [
            [name, str(plain[facts.get(name, name)])]
            for name in ("model", "engine", "version", "device", "precision", "CUDA graph")
        ],
        "baseline": baselines[0][0] if baselines else next(iter(own)),
        "rows": rows,
        "notes": [str(note) for note in plain["warnings"]],
    }
    shown = [
        (row["name"], *(f"{row[key]:,.1f}" for key in ("median", "p90", "p99", "min")), row["runs"]) for row in rows
    ]
    told = fragment([fragment_table("Microseconds", ("call", "median", "p90", "p99", "min", "runs"), shown)])
    return assemble("timings.html", "benchmark", _TIMED, f"{headline} - {Path(plain['model']).name}", data, told)


def _timed_row(name: str, samples: Sequence[float], base: Sequence[float] | None) -> dict[str, Any]:
    import numpy as np

    from xpuruntime.measuring.statistics import median_interval

    interval, other = median_interval(samples), None if base is None or base is samples else median_interval(base)
    ratio = None
    if interval is not None and other is not None:
        ratio = {
            "value": interval.ratio / other.ratio,
            "low": interval.low / other.high,
            "high": interval.high / other.low,
        }
    return {
        "name": name,
        "points": [round(float(sample), 2) for sample in samples[:: -(-len(samples) // _DRAWN)]],
        **{
            key: float(np.percentile(samples, share))
            for key, share in (("median", 50), ("p90", 90), ("p99", 99), ("min", 0))
        },
        "interval": None if interval is None else [interval.low, interval.high],
        "runs": len(samples),
        "ratio": ratio,
        "ratioText": "" if ratio is None else f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
    }


_CHANGES_PARTS = ("elements", "sorting", "changed", "shell", "changes")


def render_changes(comparison: ReportComparison) -> str:
    """Return the page. It says what `str(comparison)` says, of all groups of nodes."""
    name = comparison.after.model.replace("\\", "/").rpartition("/")[2] or "a model"
    data = _data(comparison)
    return assemble(
        "changes.html",
        "comparison",
        _CHANGES_PARTS,
        f"{comparison.headline} - {name}",
        data,
        _fragment(comparison, data),
    )


def _data(comparison: ReportComparison) -> dict[str, Any]:
    return {
        "headline": comparison.headline,
        "same": comparison.same,
        "sides": [msgspec.to_builtins(side) for side in (comparison.before, comparison.after)],
        "speeds": _speeds(comparison),
        "noise": f"{comparison.noise:.0%} or {comparison.noise_us:g} us".replace("%", " %"),
        "groups": [_group(group) for group in comparison.groups],
        "unchanged": comparison.unchanged,
        "only": [list(comparison.only_before), list(comparison.only_after)],
        "keys": [
            {
                "cells": [
                    key.key,
                    arrow_text(key.requested_before, key.requested_after),
                    arrow_text(key.observed_before, key.observed_after),
                    arrow_text(key.status_before, key.status_after),
                    key.reason,
                ],
                "deviates": key.deviates,
            }
            for key in comparison.keys
        ],
        "decisions": [
            [
                call_at(decision.description or decision.op, decision.nodes),
                arrow_text(decision.kernel_before, decision.kernel_after),
                arrow_text(decision.asked_before, decision.asked_after),
                arrow_text(decision.asked_by_before, decision.asked_by_after),
                decision.reason,
            ]
            for decision in comparison.decisions
        ],
        "boundaries": [list(boundary_row(border)) for border in comparison.boundaries],
        "memory": [list(row) for row in memory_change_rows(comparison.memory)],
        "peaks": [list(row) for row in memory_change_rows(comparison.peaks)],
        "cuda_graph": [list(row) for row in difference_rows(comparison.cuda_graph, "reason")],
        "shapes": [list(row) for row in difference_rows(comparison.shapes)],
        "surroundings": [list(row) for row in difference_rows(comparison.surroundings)],
        "notes": list(comparison.notes),
    }


def _speeds(comparison: ReportComparison) -> list[list[str]]:
    named = [] if comparison.latency is None else [("latency, median", comparison.latency)]
    named += [(f"all units, {total.kind} time", total) for total in comparison.totals]
    return [[name, change_text(time), time.verdict] for name, time in named]


def _group(group: GroupChange) -> dict[str, Any]:
    time = group.time
    return {
        "nodes": list(group.nodes),
        "what": list(group.what),
        "before": units_text(group, group.before),
        "after": units_text(group, group.after),
        "time": None if time is None else {"before": time.before, "after": time.after, "unit": time.unit},
        "change": None if time is None else time.change,
        "verdict": "unknown" if time is None else time.verdict,
    }


def _fragment(comparison: ReportComparison, data: dict[str, Any]) -> str:
    """Return headline, speed and keys, for browsers without scripts."""
    kind = "honoured" if comparison.same else "substituted"
    parts = [f"<p class='xrt-headline xrt-{kind}'>{escaped(comparison.headline)}</p>"]
    if data["speeds"]:
        parts.append(fragment_table("Speed", ("what", "change", "verdict"), [tuple(speed) for speed in data["speeds"]]))
    rows = [
        (
            ", ".join(group["nodes"][:4]) or "(inserted)",
            ", ".join(group["what"]) or group["verdict"],
            group["before"],
            group["after"],
        )
        for group in data["groups"][:20]
    ]
    if rows:
        title = f"Nodes ({len(rows)} of {len(data['groups'])} groups)"
        parts.append(fragment_table(title, ("nodes", "what", "before", "after"), rows))
    return fragment(parts)


_COMPARISON_PARTS = ("elements", "sorting", "compared", "drift", "shell", "comparison")
_FIGURES = ("max_abs", "max_rel", "cosine")
_ASK = "run `xrt compare MODEL --layers --html FILE`, or `compare_engines(..., layers=True)`"
_OTHER = (
    "make the tensors in question outputs of the model, or compare on onnxruntime or openvino, which give the tensors "
    "inside of a model"
)


def render_comparison(plain: Mapping[str, Any]) -> str:
    """Return the page of a comparison."""
    data = _compared_data(plain)
    name = str(plain["model"]).replace("\\", "/").rpartition("/")[2]
    return assemble(
        "comparison.html",
        "comparison",
        _COMPARISON_PARTS,
        f"{plain['headline']} - {name}",
        data,
        _compared_fragment(plain, data),
    )


def _compared_data(plain: Mapping[str, Any]) -> dict[str, Any]:
    labels = _labels(plain["rows"])
    return {
        **{key: plain[key] for key in ("headline", "agreed", "model", "reference", "inputs", "schema")},
        "rows": [_row(row, label, plain["layers"]) for row, label in zip(plain["rows"], labels, strict=True)],
        **_points(plain["rows"]),
    }


def _labels(rows: list[dict[str, Any]]) -> list[str]:
    seen: dict[str, int] = {}
    labels = []
    for row in rows:
        label = f"{row['engine']}@{row['device']} ({row['precision']})"
        seen[label] = seen.get(label, 0) + 1
        labels.append(label if seen[label] == 1 else f"{label}, again" + (f" {seen[label]}" * (seen[label] > 2)))
    return labels


def _row(row: dict[str, Any], label: str, requested: bool) -> dict[str, Any]:
    drift = row["drift"]
    why, how = _missing(row, requested)
    return {
        "label": label,
        **{key: row[key] for key in ("engine", "device", "precision", "status", "reason", "tolerance", "notes")},
        **{key: _number(row[key]) for key in (*_FIGURES, "median_us")},
        "divergence": None if row["divergence"] is None else _divergence(row["divergence"]),
        "outputs": [
            {**{key: output[key] for key in ("name", "passed", "nan", "inf", "reason")}, **_figures(output)}
            for output in row["outputs"]
        ],
        "measured": 0 if drift is None else len(drift["layers"]),
        "drift_note": "" if drift is None else drift["note"],
        "skipped": [] if drift is None else list(drift["skipped"].items()),
        "why": why,
        "how": how,
    }


def _divergence(divergence: dict[str, Any]) -> dict[str, Any]:
    return {
        **{key: divergence[key] for key in ("nodes", "op", "output", "note")},
        "reason": divergence["figures"]["reason"],
    }


def _missing(row: dict[str, Any], requested: bool) -> tuple[str, str]:
    drift = row["drift"]
    if row["status"] in ("rejected", "failed"):
        return f"the engine did not run ({row['status']}): {row['reason']}", "make it run first: see the reason"
    if not requested:
        return "it was not asked for", _ASK
    if drift is None:
        return (row["notes"] or ["the reference gave no layers"])[-1], _OTHER
    if not drift["layers"]:
        return next(iter(drift["skipped"].values()), "the model has no layer that computes anything"), _OTHER
    return "", _OTHER if any(
        "the engine" in reason or "refused" in reason for reason in drift["skipped"].values()
    ) else ""


def _points(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the layers in their order, and the points as columns of indices and figures."""
    layers: dict[int, tuple[str, str]] = {}
    for row in rows:
        for layer in (row["drift"] or {}).get("layers", ()):
            layers.setdefault(layer["place"], (layer["name"], layer["op"]))
    order = {layer: index for index, layer in enumerate(sorted(layers))}
    strings: dict[str, int] = {}
    names = ("row", "layer", "tensor", "passed", "odd", "first", "reason", *_FIGURES)
    points: dict[str, list[Any]] = {name: [] for name in names}
    for index, row in enumerate(rows):
        drift = row["drift"] or {"layers": (), "first": None}
        for at, layer in enumerate(drift["layers"]):
            figures = layer["figures"]
            values = {
                "row": index,
                "layer": order[layer["place"]],
                "tensor": strings.setdefault(figures["name"], len(strings)),
                "passed": int(figures["passed"]),
                "odd": figures["nan"] + figures["inf"],
                "first": int(at == drift["first"]),
                "reason": strings.setdefault(figures["reason"], len(strings)),
                **_figures(figures),
            }
            for name in names:
                points[name].append(values[name])
    ordered = [layers[layer] for layer in sorted(layers)]
    return {
        "layers": {
            "place": sorted(layers),
            "name": [name for name, _ in ordered],
            "op": [strings.setdefault(op, len(strings)) for _, op in ordered],
        },
        "points": points,
        "strings": list(strings),
    }


def _figures(record: dict[str, Any]) -> dict[str, float | str | None]:
    return {key: _number(record[key]) for key in _FIGURES}


def _number(value: float | None) -> float | str | None:
    if value is None:
        return None
    if math.isfinite(value):
        return float(f"{value:.7g}")
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _compared_fragment(plain: Mapping[str, Any], data: dict[str, Any]) -> str:
    """Return verdict and table of the engines, for browsers without scripts."""
    kind = "honoured" if plain["agreed"] else "substituted"
    rows = [
        (row["label"], row["status"], *("-" if row[key] is None else str(row[key]) for key in _FIGURES), row["reason"])
        for row in data["rows"]
    ]
    columns = ("engine", "verdict", "max abs", "max rel", "cosine", "reason")
    title = f"{plain['model']} against {plain['reference']}, input {plain['inputs']}"
    headline = f"<p class='xrt-headline xrt-{kind}'>{escaped(plain['headline'])}</p>"
    return fragment((headline, fragment_table(title, columns, rows)))
