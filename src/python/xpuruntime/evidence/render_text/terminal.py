# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Text rendering of a report. Every color stands beside a word that says the same."""

from __future__ import annotations

import shlex
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.kernel_records import summed, tensor_cores_text
from xpuruntime.evidence.render_text.changes import duration_text
from xpuruntime.evidence.render_text.changes import time_text as _time
from xpuruntime.evidence.render_text.sections import (
    by_operator,
    decision_tables,
    graph_tables,
    memory_tables,
    shape_tables,
)
from xpuruntime.notebook import plain
from xpuruntime.printable import bytes_text
from xpuruntime.tables import table as _table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from xpuruntime.evidence.records import Boundary, Unit
    from xpuruntime.evidence.report import Report

_STYLE = {
    "honoured": "green",
    "fallback": "yellow",
    "substituted": "bold red",
    "unsupported": "red",
    "inconclusive": "bold yellow",
    "unobservable": "yellow",
}
_TOP = 10
#: Units that a screen shows.
_FEW = 3
_BAR = 12
#: Units beyond which their operators are summed up, too.
_MANY = 40


def plain_text(report: Report, width: int = 80) -> str:
    """Return the report as text without colors or control codes, `width` columns wide at most."""
    return plain(render(report), width)


def render(report: Report, *, summary: bool = False, brief: bool = False) -> RenderableType:
    """Return the report as rich renderables.

    With `summary` it is the headline, the policy and the reasons alone, with `brief` also the slowest units, which fit
    a screen.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_headline(report)]
    if report.observations:
        parts += [_policy(report), *_reasons(report)]
    if summary:
        return Group(*parts)
    timed = [u for u in report.units if u.time is not None]
    if brief:
        parts += [_hot_units(timed, _instrumented(report), _FEW)] if timed else []
        parts += [_accounting(report)] if report.units else []
        hint = "For notes, memory, boundaries, shapes and all units, pipe it into less, or add --html FILE."
        return Group(*parts, Text(hint, "dim"))
    if timed:
        parts.append(_hot_units(timed, _instrumented(report)))
        if len(timed) > _MANY:
            parts.append(by_operator(timed))
        parts.append(_precisions(timed))
        parts += _device_kernels(timed)
    if report.units:
        parts.append(_accounting(report))
    parts += decision_tables(report.decisions, "xpuruntime kernels, in the instrumented pass")
    if report.boundaries:
        parts.append(_boundaries(report.boundaries))
    parts += graph_tables(report.cuda_graph)
    if report.conversions:
        table = _table("what the session converted", ("what", "reason", ">count"))
        for c in report.conversions:
            table.add_row(Text(c.what), Text(c.reason), str(c.count))
        parts.append(table)
    if report.memory:
        table = _table("memory", ("owner", ">bytes"))
        for owner, held in report.memory.items():
            table.add_row(Text(owner), bytes_text(held))
        parts.append(table)
    parts += memory_tables(report)
    parts += shape_tables(report.shapes)
    if report.determinism is not None:
        parts.append(report.determinism.__rich__())
    if report.notes:
        parts.append(Text("\nnotes", style="bold"))
        parts += [Text(f"- {note}") for note in report.notes]
    if report.command:
        parts.append(_Command(report.command))
    return Group(*parts)


class _Command:
    def __init__(self, command: str) -> None:
        self.command = command

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        try:
            words = [shlex.quote(word) for word in shlex.split(self.command)]
        except ValueError:  # of a file that was edited: no command of a shell
            words = self.command.split()
        lines, line = [], "reproduce:"
        for quoted in words:
            if line != "reproduce:" and len(line) + len(quoted) + 3 > options.max_width:
                lines.append(f"{line} \\")
                line = "   "
            line += f" {quoted}"
        yield Text("\n" + "\n".join([*lines, line]), style="dim")


def _headline(report: Report) -> RenderableType:
    from rich.text import Text

    text = Text()
    text.append(report.headline, style="bold green" if report.honoured else "bold red")
    if report.unobservable:
        text.append(f"; {len(report.unobservable)} of {len(report.observations)} keys could not be observed")
    if report.partial:
        text.append(
            "\nincomplete: the observing pass broke off or a source was missing (see the notes)", style="yellow"
        )
    if report.latency is not None:
        latency = report.latency
        text.append(
            f"\nlatency: median {duration_text(latency.median_us)}, p90 {duration_text(latency.p90_us)}, "
            f"min {duration_text(latency.min_us)} over {latency.runs} {'run' if latency.runs == 1 else 'runs'}"
        )
    return text


def _policy(report: Report) -> RenderableType:
    from rich.text import Text

    table = _table("asked, resolved, observed", ("key", "requested", "?resolved", "observed", "status"))
    for o in report.observations:
        table.add_row(
            Text(o.key),
            Text(o.requested),
            Text(o.resolved),
            Text(o.observed),
            Text(o.status, style=_STYLE[o.status]),
        )
    return table


def _reasons(report: Report) -> list[RenderableType]:
    from rich.text import Text

    lines: list[RenderableType] = []
    for o in report.observations:
        if o.status != "honoured":
            lines.append(Text.assemble((f"{o.status}: ", _STYLE[o.status]), (o.key, "bold"), f": {o.reason}"))
    return lines


def _instrumented(report: Report) -> dict[str, Any]:
    instrumented: dict[str, Any] = (report.latency.detail if report.latency else {}).get("instrumented", {})
    return instrumented


def _hot_units(units: list[Unit], run: dict[str, Any], most: int = _TOP) -> RenderableType:
    from rich.text import Text

    times = [u.time for u in units if u.time is not None]
    total = sum(t.value for t in times)
    kinds = ", ".join(sorted({f"{t.unit}, {t.kind} time" for t in times}))
    runs = max(t.runs for t in times)
    title = f"where the time goes: {total:,.1f} ({kinds}; of {runs} instrumented runs)"
    table = _table(title, ("unit", "op", "?stands for", "ran in", "?on", ">time", ">share", "?"))
    order = sorted(units, key=lambda u: -(u.time.value if u.time else 0.0))
    for unit in order[:most]:
        value = unit.time.value if unit.time else 0.0
        share = value / total if total else 0.0
        table.add_row(
            Text(unit.id),
            Text(unit.op),
            Text(_stands_for(unit)),
            unit.precision_run or "?",
            unit.device,
            f"{value:,.1f}",
            f"{share:.0%}",
            "#" * round(share * _BAR),
        )
    rest = sum(u.time.value for u in order[most:] if u.time)
    if rest or len(order) > most:
        table.add_row(
            Text(f"{len(order) - most} others"),
            "",
            "",
            "",
            "",
            f"{rest:,.1f}",
            f"{rest / total if total else 0:.0%}",
            "",
        )
    if "outside_us" in run:
        table.add_row("outside of units", "", "", "", "", f"{run['outside_us']:,.1f}", "", "")
    return table


def _device_kernels(units: list[Unit]) -> list[RenderableType]:
    sums = summed(units)
    if not sums:
        return []
    shown = _table("kernels on the device, in one run", ("kernel", "multiplies on", ">times", ">us", ">share"))
    for kernel in sums[:_TOP]:
        math = tensor_cores_text(kernel.tensor_cores, kernel.precision)
        shown.add_row(kernel.short, math, f"{kernel.times:g}", f"{kernel.us:,.1f}", f"{kernel.share:.0%}")
    rest = sums[_TOP:]
    if rest:
        share = sum(kernel.share for kernel in rest)
        shown.add_row(f"{len(rest)} others", "", "", f"{sum(kernel.us for kernel in rest):,.1f}", f"{share:.0%}")
    return [shown]


def _stands_for(unit: Unit) -> str:
    if unit.source_nodes:
        first = unit.source_nodes[0]
        if len(unit.source_nodes) == 1 and unit.id in (first, f"{unit.phase}:{first}"):
            return "itself"
        return first if len(unit.source_nodes) == 1 else f"{first} + {len(unit.source_nodes) - 1} more"
    return f"a step of {unit.serves[0]}" if unit.serves else "inserted"


def _precisions(units: list[Unit]) -> RenderableType:
    from rich.text import Text

    groups: dict[tuple[str, str, str], list[Unit]] = defaultdict(list)
    for unit in units:
        groups[(unit.device, unit.precision_run or "?", unit.precision_requested or "-")].append(unit)
    table = _table("precision", ("on", "ran in", "asked", ">units", ">time", "as asked"))
    for (device, ran, wanted), members in sorted(groups.items()):
        time = sum(u.time.value for u in members if u.time)
        unlike = sum(u.status == "substituted" for u in members)
        word = "yes" if not unlike else f"no: {unlike}"
        table.add_row(
            Text(device),
            Text(ran),
            Text(wanted),
            str(len(members)),
            f"{time:,.1f}",
            Text(word, "red" if unlike else ""),
        )
    return table


def _accounting(report: Report) -> RenderableType:
    from rich.text import Text

    count: dict[str, int] = defaultdict(int)
    nodes: dict[str, int] = defaultdict(int)
    for unit in report.units:
        if unit.phase != "decode":  # which runs the nodes of the prefill again
            count[unit.relation] += 1
            nodes[unit.relation] += len(unit.source_nodes)
    total = sum(nodes.values())
    words = []
    for relation in ("exact", "fused", "opaque", "folded", "inserted"):
        if count[relation] and relation == "fused":
            words.append(f"{nodes[relation]} fused into {count[relation]}")
        elif count[relation] and relation == "inserted":
            words.append(f"{count[relation]} {'unit' if count[relation] == 1 else 'units'} inserted")
        elif count[relation]:
            words.append(f"{nodes[relation]} {relation}")
    ran = sum(count.values()) - count["folded"]
    text = f"\n{total} source {'node' if total == 1 else 'nodes'} ran as {ran} units: {', '.join(words)}"
    run = _instrumented(report)
    if "coverage" in run:
        text += f"; their times are {run['coverage']:.0%} of an instrumented run ({duration_text(run['run_us'])})"
    computes = sum(unit.computes and unit.phase != "decode" for unit in report.units)
    if computes < ran:
        text += f". The keys count the {computes} that compute, not those that only move or convert data"
    return Text(text)


def _boundaries(boundaries: tuple[Boundary, ...]) -> RenderableType:
    from rich.text import Text

    table = _table("boundaries, in one run", ("kind", "where", ">count", ">bytes", ">time"))
    for b in boundaries:
        table.add_row(Text(b.kind), Text(b.where), str(b.count), bytes_text(b.bytes), _time(b.time))
    return table
