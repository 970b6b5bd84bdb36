# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`assemble`: a page as one file. Style, script and data are in it, and its own policy lets nothing else in."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.files.paths import json_bytes
from xpuruntime.notebook import escaped, fragment, fragment_style, fragment_table
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["assemble", "render_serving", "render_shown", "render_timings"]

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


_PARTS = ("elements", "served", "shell", "serving")


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
    return assemble("serving.html", "status", _PARTS, f"{state} - xpuruntime", dict(plain), told)


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
