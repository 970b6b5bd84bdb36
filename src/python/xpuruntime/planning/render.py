# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Text rendering of a plan: plain text, and tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.render_text.tables import table
from xpuruntime.evidence.verdict_codes import VerdictCode
from xpuruntime.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.text import Text

    from xpuruntime.planning.plan import InputFacts, Plan

__all__ = ["plan_tables", "plan_text"]

#: Keys up to this length are never broken, and values are folded at it.
_KEY = 26
_COLOUR = {"enforced": "green", "advisory": "yellow", "unsupported": "red"}


def plan_text(plan: Plan) -> str:
    """Return the plan as plain text."""
    return printable("\n".join(_lines(plan)))


def plan_tables(plan: Plan) -> RenderableType:
    """Return the plan as a group of rich tables."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 2))
    head.add_column(style="bold", no_wrap=True)
    head.add_column(overflow="fold")
    for name, value in _facts(plan):
        head.add_row(name, Text(value[: len("sha256:") + 12] if value.startswith("sha256:") else value))

    tried = table("candidates", ("candidate", "verdict", "reason"))
    tried.columns[0].no_wrap = tried.columns[1].no_wrap = True
    for verdict in plan.verdicts:
        if verdict.code != VerdictCode.NOT_TRIED:
            colour = "green" if verdict.accepted else "red"
            reason = _reason(verdict.reason, verdict.fix)
            tried.add_row(Text(verdict.candidate), Text(verdict.code, style=colour), reason)

    parts: list[RenderableType] = [head, tried]
    after = [verdict.candidate for verdict in plan.verdicts if verdict.code == VerdictCode.NOT_TRIED]
    if after:
        parts.append(Text(f"not tried, because {plan.candidate} comes before: {', '.join(after)}", style="dim"))
    if plan.controls:
        keys = table("policy keys", ("key", "requested", "resolved", "enforceability"))
        keys.columns[0].no_wrap = max(len(control.key) for control in plan.controls) <= _KEY
        for control in plan.controls:
            colour = _COLOUR[control.enforceability]
            keys.add_row(
                Text(control.key),
                Text(control.requested),
                Text(control.resolved),
                Text.assemble((control.enforceability, colour), ": ", _reason(control.reason, control.fix)),
            )
        parts.append(keys)
    if plan.settings:
        given = table("settings given to the engine", ("setting", "value"))
        for name, value in _flat(plan.settings):
            given.add_row(Text(name), Text(value))
        parts.append(given)
    parts.extend(Text(f"warning: {line}", style="yellow") for line in plan.warnings)
    parts.extend(Text(f"note: {line}", style="dim") for line in plan.notes)
    return Group(*parts)


def _reason(reason: str, fix: str | None) -> Text:
    from rich.text import Text

    return Text.assemble(reason, (f"\nfix: {fix}", "bold")) if fix else Text(reason)


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    model = plan.model
    nodes = "1 node" if model.nodes == 1 else f"{model.nodes} nodes"
    yield "model", f"{model.path} ({nodes}, {model.size:,} bytes, sha256 {model.sha256[:12]})"
    yield "inputs", ", ".join(_tensor(t) for t in model.inputs) or "none"
    yield "outputs", ", ".join(_tensor(t) for t in model.outputs) or "none"
    if plan.policy_source in ("model metadata", "artifact"):
        yield "policy", f"from {plan.policy_source}"
    yield "mode", plan.mode
    yield "engine", plan.engine + (f" {plan.engine_version}" if plan.engine_version else "")
    yield "device", plan.device
    yield "precision", plan.precision
    yield "request hash", plan.request_hash
    yield "execution hash", plan.execution_hash


def _lines(plan: Plan) -> Iterator[str]:
    yield f"plan: {plan.candidate}"
    for name, value in _facts(plan):
        yield f"  {name}: {value}"
    yield "candidates:"
    for verdict in plan.verdicts:
        fix = f" Fix: {verdict.fix}" if verdict.fix else ""
        yield f"  {verdict.candidate}: {verdict.code}: {verdict.reason}{fix}"
    if plan.controls:
        yield "policy keys:"
        for control in plan.controls:
            fix = f" Fix: {control.fix}" if control.fix else ""
            yield (
                f"  {control.key}: {control.requested} -> {control.resolved}: "
                f"{control.enforceability}: {control.reason}{fix}"
            )
    if plan.settings:
        yield "settings:"
        for name, value in _flat(plan.settings):
            yield f"  {name}: {value}"
    for line in plan.warnings:
        yield f"warning: {line}"
    for line in plan.notes:
        yield f"note: {line}"


def _tensor(tensor: InputFacts) -> str:
    sizes = "..." if tensor.shape is None else ", ".join("?" if size is None else str(size) for size in tensor.shape)
    return f"{tensor.name}: {tensor.dtype}[{sizes}]"


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif value not in (None, (), [], False):
            yield name, str(value)
