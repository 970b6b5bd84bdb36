# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Bar and dot charts of ``docs/benchmarks.md`` as static SVG, from the result files."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.sax.saxutils import escape

from report_parts import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from report_parts import Check

WIDTH, LABEL, ROW, BAR, HEAD = 560, 196, 26, 37, 30
OWN, OTHER, MISSED, INK = "#3f51b5", "#9aa0b5", "#c62828", "#33364a"
STYLE = (
    "text{font-family:system-ui,'Noto Sans',sans-serif;font-size:14px;fill:#33364a}"
    ".t{font-size:16px;font-weight:600}.g{font-weight:600}.v{font-size:13px}.e{text-anchor:end}.page{fill:#fbfbfe}"
    "@media(prefers-color-scheme:dark){.page{fill:#1f2129}text{fill:#eceef6}line{stroke:#6a6e86}"
    f'[fill="{OWN}"]{{fill:#8c9eff}}[fill="{MISSED}"]{{fill:#ef9a9a}}}}'
)


class Bar(NamedTuple):
    """One row of a chart; without a value, a heading of the rows below it."""

    label: str
    value: float | None = None
    own: bool = False


class Chart(NamedTuple):
    """A chart, the sentence below it, and what a screen reader reads."""

    svg: str
    caption: str
    title: str


def framed(title: str, height: int, body: Iterable[str]) -> str:
    """Return an SVG with a title above `body`."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img">',
            "<!-- Written by benchmarks/report.py. -->",
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="10" class="page"/>',
            f'<text class="t" x="16" y="27">{escape(title)}</text>',
            *body,
            "</svg>",
            "",
        ]
    )


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Return horizontal bars from zero, each with its figure."""
    longest = max((row.value for row in rows if row.value is not None), default=1.0) or 1.0
    body, y = [], HEAD + 12
    for row in rows:
        if row.value is None:
            y += 8
            body.append(f'<text class="g" x="16" y="{y + 16}">{escape(row.label)}</text>')
            y += ROW
            continue
        length = max(1.0, (WIDTH - 100) * row.value / longest)
        body += [
            f'<text x="16" y="{y + 15}">{escape(row.label)}</text>',
            f'<rect x="16" y="{y + 20}" width="{length:.1f}" height="11" rx="2" fill="{OWN if row.own else OTHER}"/>',
            f'<text class="v" x="{22 + length:.1f}" y="{y + 30}">{number(row.value)}</text>',
        ]
        y += BAR
    return framed(title, y + 10, body)


def targets(groups: Mapping[str, Sequence[Check]]) -> str:
    """Return one line of dots for each group: each figure as a share of its target."""
    left, right, most = LABEL, WIDTH - 84, 1.5
    body, y = [], HEAD + 14
    at = lambda ratio: left + (right - left) * min(max(ratio, 0.0), most) / most  # noqa: E731
    for title, checks in groups.items():
        middle = y + ROW // 2
        met = sum(check.figure <= check.target for check in checks)
        body.append(f'<text class="e" x="{LABEL - 12}" y="{middle + 5}">{escape(title)}</text>')
        body.append(f'<line x1="{left}" x2="{right}" y1="{middle}" y2="{middle}" stroke="#dcdfeb"/>')
        for check in sorted(checks, key=lambda one: one.figure > one.target):
            colour = OWN if check.figure <= check.target else MISSED
            x = at(check.figure / check.target)
            body.append(f'<circle cx="{x:.1f}" cy="{middle}" r="5" fill="{colour}" fill-opacity="0.55"/>')
        body.append(f'<text class="v" x="{right + 12}" y="{middle + 5}">{met} of {len(checks)}</text>')
        y += ROW
    line = at(1.0)
    body.append(f'<line x1="{line:.1f}" x2="{line:.1f}" y1="{HEAD + 10}" y2="{y + 4}" stroke="{INK}"/>')
    for ratio, text in ((0.0, "0"), (0.5, "half"), (1.0, "the target"), (1.5, "1.5 times")):
        body.append(f'<text class="v" x="{at(ratio):.1f}" y="{y + 20}" text-anchor="middle">{text}</text>')
    return framed("Figures as shares of their targets: left of the line is met", y + 34, body)


def medians(samples: Mapping[str, Sequence[float]], scale: float = 1.0) -> dict[str, float]:
    """Return the median of each row of samples, divided by `scale`."""
    return {name: statistics.median(values) / scale for name, values in samples.items()}


def rows_of(found: Mapping[str, float], own: Callable[[str], bool]) -> list[Bar]:
    """Return one bar for each figure."""
    return [Bar(name, value, own(name)) for name, value in found.items()]


def is_own(name: str) -> bool:
    """Return whether a row is of this library."""
    return name.startswith(("xpuruntime", "xrt", "auto", "cuda_raw", "layer_norm", "rms_norm", "capture_graph"))


def session(record: dict[str, Any]) -> Chart:
    title = f"A call of a session on {record['device']}, µs"
    caption = "The model computes almost nothing, so the time is the cost of the call."
    return Chart(bars(title, rows_of(medians(record["samples_us"]), is_own)), caption, title)


def pool(record: dict[str, Any]) -> Chart | None:
    size = record["sizes"].get(str(1 << 20))
    if size is None:
        return None
    title = f"Allocate and free 1 MiB from Python on {record['device']}, µs"
    found = {name: us for name, us in medians(size["samples_us"]).items() if not name.endswith("direct")}
    caption = "Without `direct`, which calls the driver each time and is in the tables."
    return Chart(bars(title, rows_of(found, is_own)), caption, title)


def resnet(record: dict[str, Any]) -> Chart:
    batch, result = list(record["batches"].items())[-1]
    title = f"ResNet-50, batch {batch}, ms a call"
    caption = "The rows do not compute in the same precision; the tables have the errors and when the host waits."
    return Chart(bars(title, rows_of(medians(result["samples_us"], 1e3), is_own)), caption, title)


def decoder(record: dict[str, Any]) -> Chart | None:
    rows = []
    for case in record.get("decoder", ()):
        if case["cuda_graph"] and not case["fused_attention"]:
            rows.append(Bar(f"batch {case['batch']}, {case['past']} tokens before"))
            rows += [
                Bar(name, ms, bool(case["xpuruntime_nodes"].get(name)))
                for name, ms in medians(case["samples_us"], 1e3).items()
            ]
    title = "GPT-2-size decoder step in ONNX Runtime, CUDA graph, ms"
    caption = "Dark rows: kernels of xpuruntime serve the nodes that the policy names."
    return Chart(bars(title, rows), caption, title) if rows else None


def training(record: dict[str, Any]) -> Chart | None:
    shown = {
        "eager": "eager",
        "compile, reduce-overhead": "torch.compile, reduce-overhead",
        "by hand (plain)": "CUDA graph by hand",
        "capture_graph": "capture_graph",
        "capture_graph, tuned": "capture_graph, tuned policy",
    }
    found: dict[str, dict[str, float]] = {}
    for case in record["cases"]:
        name = f"by hand ({case['phase']})" if case["variant"] == "by hand" else case["variant"]
        if name in shown and "ms" in case:
            found.setdefault(case["shape"], {})[name] = case["ms"]
    rows = []
    for shape, times in found.items():
        rows.append(Bar(shape))
        rows += [Bar(label, times[name], is_own(name)) for name, label in shown.items() if name in times]
    title = "A training step, ms"
    caption = (
        "bfloat16 autocast, AdamW. `torch.compile` fuses the operations between products; a policy does not. A "
        "captured compiled step, which is not in this chart, combines both: [it was the fastest]"
        "(guides/tune-training.md#on-an-h100) on an H100."
    )
    return Chart(bars(title, rows), caption, title) if rows else None


def attention(record: dict[str, Any]) -> Chart:
    rows = []
    for what in ("forward", "backward"):
        case = next((one for one in record["cases"] if one["what"] == what), None)
        if case is not None:
            shape = f"{case['batch']} x {case['heads']} x {case['length']} x {case['head_dim']}"
            rows.append(Bar(f"{what}, {shape}{', causal' if case['causal'] else ''}"))
            found = {name: case["flop"] / us / 1e6 for name, us in medians(case["samples_us"]).items()}
            rows += rows_of(found, is_own)
    title = "Attention, TFLOP/s (more is better)"
    return Chart(bars(title, rows), "`auto` is the fastest kernel measured; the tables have 20 shapes.", title)


def matmul(record: dict[str, Any]) -> Chart:
    rows = []
    for case in record["decode"]:
        if case["m"] in (1, 16, 64):
            rows.append(Bar(f"{case['m']} rows x 4096 x 4096"))
            rows += rows_of(medians(case["samples_us"]), is_own)
    title = "Matrix products with few rows, µs"
    return Chart(bars(title, rows), "The weights are not in the cache; the first row only reads them.", title)


def norms(record: dict[str, Any]) -> Chart:
    case = record["cases"][0]
    title = f"Norms of {case['rows']} x {case['columns']} in bfloat16, {case['what']}, µs"
    caption = "A norm cannot be faster than a copy of the same bytes."
    return Chart(bars(title, rows_of(medians(case["samples_us"]), is_own)), caption, title)


def servers(record: dict[str, Any]) -> Chart:
    title = "Requests that a server on one core answers in a second"
    rows = []
    for case, heading in (("alone", "tiny model, without batches"), ("batched", "wide model, in batches")):
        rows.append(Bar(heading))
        for name, found in record["cases"][case].items():
            rate = next(
                (load.get("per_second") for load in found.get("loads", ()) if load["load"] == "16 clients"), None
            )
            if rate is not None:
                rows.append(Bar(name, rate, is_own(name)))
    caption = "16 clients, each with one request at a time. The tables have latencies, other loads and lost requests."
    return Chart(bars(title, rows), caption, title)


#: Result name to its chart.
CHARTS: dict[str, Callable[[dict[str, Any]], Chart | None]] = {
    "session_cpu": session,
    "session_cuda": session,
    "pool_cuda": pool,
    "resnet50_cuda": resnet,
    "ort_custom_ops_cuda": decoder,
    "serving_peers_cpu": servers,
    "training_step": training,
    "norms_cuda": norms,
    "matmul_cuda": matmul,
    "attention_cuda": attention,
}
