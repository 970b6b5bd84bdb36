# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Text table of an explanation for terminals; every colour stands beside a word that says the same."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

from msgspec import structs

from xpuruntime.evidence.render_text.tables import duration_text, table
from xpuruntime.notebook import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.pytorch.explanation.explanation import Explanation
    from xpuruntime.pytorch.explanation.summary import Row

__all__ = ["plain_text", "render", "short_kernel"]

_STYLE = {
    "honoured": "green",
    "substituted": "bold red",
    "default": "",
    "bypassed": "bold red",
    "opaque": "yellow",
    "other": "dim",
}
_TOP = 40
_TOP_OTHER = 5
_SHAPES = 4
_NARROW = 120
_WIDTHS = {"status": 11, "operator": 12, "requested": 10, "observed": 12}


def plain_text(explanation: Explanation, width: int | None = None) -> str:
    """Return the explanation as text without colours or control codes."""
    columns = shutil.get_terminal_size((_NARROW, 24)).columns if width is None else width
    return plain(render(explanation), max(60, columns))


def render(explanation: Explanation) -> RenderableType:
    """Return the explanation as rich renderables."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_headline(explanation)]
    named = [row for row in explanation.rows if row.status != "other"]
    others = [row for row in explanation.rows if row.status == "other"]
    total = explanation.total_us
    if named:
        parts.append(_calls(named, total))
    if others:
        parts.append(_others(others, total))
    reasons = dict.fromkeys(
        f"{row.status}: {row.operator}: {row.reason}"
        for row in named
        if row.reason and row.status in ("substituted", "bypassed", "opaque")
    )
    if reasons or explanation.notes:
        parts.append(Text("\nnotes", style="bold"))
        parts += [Text(f"- {line}") for line in (*reasons, *explanation.notes)]
    if explanation.fast_path:
        parts.append(Text(f"\nthe policy reaches PyTorch's operators by: {explanation.fast_path}", style="dim"))
    return Group(*parts)


def _headline(explanation: Explanation) -> RenderableType:
    from rich.text import Text

    coverage = explanation.coverage
    where = "on devices" if explanation.time_kind == "device" else "on the CPU"
    text = Text(f"{duration_text(explanation.total_us)} {where}: ")
    text.append(f"{coverage.rule:.1%} under a rule", style="bold")
    if coverage.substituted:
        text.append(f" ({coverage.substituted:.1%} substituted)", style="bold red")
    text.append(f", {coverage.default:.1%} by default, ")
    text.append(f"{coverage.bypassed:.1%} bypassed", style="bold red" if coverage.bypassed else "")
    if coverage.opaque:
        text.append(f", {coverage.opaque:.1%} opaque", style="yellow")
    text.append(f", {coverage.other:.1%} other")
    if explanation.never_ran:
        text.append(
            f"\nasked for and never ran, or not known to: {len(explanation.never_ran)}, see the notes", style="bold red"
        )
    if explanation.partial:
        text.append("\nincomplete: the block was left by an exception", style="yellow")
    return text


def _calls(rows: list[Row], total: float) -> RenderableType:
    from rich.text import Text

    shown = table(
        "operations that a policy can affect",
        ("operator", "module", "shapes", "requested", "resolved", "observed", "status", ">calls", ">time", ">share"),
        widths=_WIDTHS,
        dense=True,
    )
    groups = _grouped(rows)
    for row, modules in groups[:_TOP]:
        shapes = " ".join("x".join(map(str, shape)) for shape in row.shapes[:_SHAPES])
        if len(row.shapes) > _SHAPES:
            shapes += f" + {len(row.shapes) - _SHAPES}"
        observed = [short_kernel(name) for name in row.observed]
        shown.add_row(
            Text("\n".join(filter(None, (row.operator.removeprefix("aten::"), row.phase, row.kv and f"kv {row.kv}")))),
            Text(_module(row.module, modules)),
            Text("\n".join(filter(None, (shapes, " ".join(row.dtypes)))) or "-"),
            Text(f"{', '.join(row.requested)}\n({row.source})" if row.requested else "-"),
            Text(row.resolved or "-"),
            Text(observed[0] + (f" + {len(observed) - 1}" if len(observed) > 1 else "") if observed else "-"),
            Text(row.status, style=_STYLE[row.status]),
            str(row.count),
            duration_text(row.time_us),
            _share(row.time_us, total),
        )
    if len(groups) > _TOP:
        rest = sum(row.time_us for row, _ in groups[_TOP:])
        calls = sum(row.count for row, _ in groups[_TOP:])
        shown.add_row(f"{len(groups) - _TOP} more", *[""] * 6, str(calls), duration_text(rest), _share(rest, total))
    return shown


def _grouped(rows: list[Row]) -> list[tuple[Row, int]]:
    """Put rows together that differ only in numbers in the path of the module, as of the layers of one stack."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.module)
        alike = structs.replace(row, module=pattern, count=0, time_us=0.0, observed=row.observed[:1])
        groups.setdefault(alike, []).append(row)
    found = []
    for alike, members in groups.items():
        first = members[0] if len(members) == 1 else structs.replace(alike, observed=members[0].observed)
        time = sum(row.time_us for row in members)
        found.append((structs.replace(first, count=sum(row.count for row in members), time_us=time), len(members)))
    return sorted(found, key=lambda one: -one[0].time_us)


def _module(path: str, modules: int) -> str:
    return f"{path}\n({modules} modules)" if modules > 1 else path or "-"


def _others(rows: list[Row], total: float) -> RenderableType:
    from rich.text import Text

    shown = table(
        "operations that no policy can affect", ("operator", ">count", ">time", ">share"), widths=_WIDTHS, dense=True
    )
    for row in rows[:_TOP_OTHER]:
        shown.add_row(
            Text(short_kernel(row.operator)), str(row.count), duration_text(row.time_us), _share(row.time_us, total)
        )
    if len(rows) > _TOP_OTHER:
        rest = sum(row.time_us for row in rows[_TOP_OTHER:])
        count = sum(row.count for row in rows[_TOP_OTHER:])
        shown.add_row(f"{len(rows) - _TOP_OTHER} more", str(count), duration_text(rest), _share(rest, total))
    return shown


def short_kernel(name: str) -> str:
    """Return the name of a kernel without result, namespaces and template arguments."""
    if name.startswith(("aten::", "xpuruntime::")):
        return name.removeprefix("aten::")
    bare = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    head = re.split(r"[<(]", bare, maxsplit=1)[0]
    return head.rpartition("::")[2] or name


def _share(us: float, total: float) -> str:
    return f"{us / total:.1%}" if total else "-"
