# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Time of many units by operator: in a large model, no single unit shows where the time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.evidence.render_text.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from xpuruntime.evidence.records import Unit

__all__ = ["by_operator"]

_TOP = 8


def by_operator(units: Sequence[Unit]) -> RenderableType:
    """Return a table of operators on devices, those with the most time first. Units without a time are left out."""
    from rich.text import Text

    groups: dict[tuple[str, str, str], list[float]] = {}
    for unit in units:
        if unit.time is not None:
            groups.setdefault((unit.op, unit.device, unit.time.unit), []).append(unit.time.value)
    total: dict[str, float] = {}
    for (_, _, measure), values in groups.items():
        total[measure] = total.get(measure, 0.0) + sum(values)
    made = table("where the time goes, by operator", ("op", "on", ">units", ">time", ">share"))
    order = sorted(groups.items(), key=lambda item: -sum(item[1]) / (total[item[0][2]] or 1.0))
    for (op, device, measure), values in order[:_TOP]:
        spent = sum(values)
        share = spent / total[measure] if total[measure] else 0.0
        made.add_row(Text(op), Text(device), str(len(values)), f"{spent:,.1f} {measure}", f"{share:.0%}")
    rest = order[_TOP:]
    if rest:
        sums = {measure: 0.0 for (_, _, measure), _ in rest}
        for (_, _, measure), values in rest:
            sums[measure] += sum(values)
        spent_text = ", ".join(f"{value:,.1f} {measure}" for measure, value in sums.items())
        count = sum(len(values) for _, values in rest)
        made.add_row(Text(f"{len(rest)} others"), "", str(count), spent_text, "")
    return made
