# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Diff`: what differs between two environments, level by level, with causes and pins."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from xpuruntime.evidence.difference import Difference
from xpuruntime.evidence.documents import Document
from xpuruntime.evidence.render_text.tables import difference_table
from xpuruntime.evidence.report_comparison import ReportComparison
from xpuruntime.measuring.conditions import Conditions
from xpuruntime.measuring.statistics import RatioComparison
from xpuruntime.tables import ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType


__all__ = [
    "LEVELS",
    "SCHEMA",
    "Diff",
    "Level",
    "environment_rows",
    "plan_rows",
    "possible_causes",
    "render",
    "restoring",
]

SCHEMA = "xpuruntime.diff/2"
#: The levels in the order in which a cause comes before its effect.
LEVELS = ("environment", "plan", "placement", "kernels", "numerics", "time")


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One level of a difference.

    Attributes
    ----------
    name : str
        One of `LEVELS`.
    verdict : {"same", "differs", "undecided", "unobservable", "not compared"}
    reason : str
        What the verdict does not cover, or why nothing was compared.
    rows : tuple of Difference
    """

    name: str
    verdict: Literal["same", "differs", "undecided", "unobservable", "not compared"]
    reason: str = ""
    rows: tuple[Difference, ...] = ()


class Diff(Document, frozen=True, kw_only=True):
    """What differs between two environments for one model.

    Attributes
    ----------
    schema : str
    before, after : str
        The sides as they were given.
    model : str
    levels : tuple of Level
        In the order of `LEVELS`.
    comparison : ReportComparison or None
        Of the two reports, with everything that they have; ``None`` where a side is a lock.
    speed : RatioComparison or None
        Of interleaved rounds, where both sides are interpreters.
    conditions : Conditions or None
        Of the machine during these.
    notes : tuple of str
    """

    NOUN: ClassVar = "the difference"
    STATED: ClassVar = ("headline", "exit_code")

    schema: str = SCHEMA
    before: str
    after: str
    model: str
    levels: tuple[Level, ...]
    comparison: ReportComparison | None = None
    speed: RatioComparison | None = None
    conditions: Conditions | None = None
    notes: tuple[str, ...] = ()

    def level(self, name: str) -> Level:
        """Return one level."""
        return next(level for level in self.levels if level.name == name)

    @property
    def exit_code(self) -> int:
        """0 the same, 1 a difference from plan to numerics, 4 only time differs or could not be decided.

        Differences of the environment alone, which are why one compares, do not count.
        """
        if any(level.verdict == "differs" for level in self.levels if level.name not in ("environment", "time")):
            return 1
        return 4 if self.level("time").verdict in ("differs", "undecided") else 0

    @property
    def headline(self) -> str:
        """One sentence: which levels differ."""
        differ = [level.name for level in self.levels if level.verdict == "differs"]
        open_ = [level.name for level in self.levels if level.verdict in ("undecided", "unobservable", "not compared")]
        said = f"{', '.join(differ)} {'differs' if len(differ) == 1 else 'differ'}" if differ else "nothing differs"
        return said + (f"; not known: {', '.join(open_)}" if open_ else "")

    def __rich__(self) -> RenderableType:

        return render(self)


_STYLE = {
    "same": "green",
    "differs": "bold yellow",
    "undecided": "yellow",
    "unobservable": "yellow",
    "not compared": "",
}
_HEAD = {0: "bold green", 1: "bold yellow", 4: "bold yellow"}


def render(diff: Diff) -> RenderableType:
    """Return the headline, and the levels with their rows, causes and pins."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        Text(diff.headline, style=_HEAD[diff.exit_code]),
        Text(f"before: {diff.before}, after: {diff.after}, model: {diff.model}"),
    ]
    for number, level in enumerate(diff.levels):
        reason = f": {level.reason}" if level.reason else ""
        parts.append(Text(f"L{number} {level.name}: {level.verdict}{reason}", style=_STYLE[level.verdict]))
        if level.rows:
            parts += _rows(level)
    parts += [Text(f"note: {note}") for note in diff.notes]
    return Group(*parts)


def _rows(level: Level) -> list[RenderableType]:
    from rich.text import Text

    if level.name == "environment":
        return difference_table(level.name, level.rows, "restore", most=ROWS)
    shown = difference_table(level.name, level.rows, most=ROWS)
    for causes, restore in dict.fromkeys((row.causes, row.restore) for row in level.rows):
        cause = f"may be caused by {', '.join(causes)}" if causes else "no difference of the environment explains it"
        shown.append(Text(f"{cause}{f'; restored by {restore}' if restore else ''}"))
    return shown


#: Packages that an engine is made of, by how their names begin; and libraries, by how theirs do.
_PACKAGES = {
    "onnxruntime": ("onnxruntime",),
    "qnn": ("onnxruntime",),
    "openvino": ("openvino",),
    "tensorrt": ("tensorrt", "nvidia"),
    "torch": ("torch", "nvidia"),
}
_LIBRARIES = {
    "onnxruntime": ("libonnxruntime", "onnxruntime"),
    "qnn": ("libonnxruntime", "onnxruntime", "libQnn"),
    "openvino": ("libopenvino", "libtbb"),
    "tensorrt": ("libnvinfer", "libtensorrt"),
    "torch": ("libtorch", "libc10", "libmkl", "libgomp"),
}
_CUDA = ("libcu", "libnv", "libcudnn")
#: What takes part in every run: it makes the plan and prepares the graph.
_ALWAYS = ("packages.xpuruntime", "packages.onnx", "cpu", "machine", "driver")
_DISTRIBUTION = re.compile(r".*?/(?:site|dist)-packages/")


def environment_rows(comparison: ReportComparison) -> tuple[Difference, ...]:
    """Return what differs in the environment, without paths that differ by the folder of the environment alone."""
    rows = []
    for surrounding in comparison.surroundings:
        if surrounding.subject.startswith("settings.") or surrounding.subject in ("plan.policy_source",):
            continue
        before, after = (
            None if value is None else _DISTRIBUTION.sub("", value) for value in (surrounding.before, surrounding.after)
        )
        if before != after:
            rows.append(Difference(subject=surrounding.subject, before=before, after=after, restore=_pin(surrounding)))
    versions = {(row.before, row.after) for row in rows if row.subject.startswith("packages.")}
    return tuple(row for row in rows if row.subject != "plan.engine_version" or (row.before, row.after) not in versions)


def plan_rows(
    comparison: ReportComparison, defaults: Sequence[dict[str, str]], environment: Iterable[Difference]
) -> tuple[Difference, ...]:
    """Return what differs in the plan: candidate, settings, status of policy keys, defaults of the engine."""
    engine = comparison.after.engine
    causes = possible_causes(environment, engine, comparison.after.device)
    restore = restoring(causes, environment)
    rows = [
        Difference(
            subject=f"plan.{name}", code="chosen", before=before, after=after, restore=f"execution.{name}: {before}"
        )
        for name in ("engine", "device", "precision")
        if (before := getattr(comparison.before, name)) != (after := getattr(comparison.after, name))
    ]
    rows += [
        Difference(subject=surrounding.subject, code="setting", before=surrounding.before,
                after=surrounding.after, causes=causes, restore=restore)
        for surrounding in comparison.surroundings
        if surrounding.subject.startswith("settings.") and surrounding.subject != "settings.computes"
    ]  # fmt: skip
    rows += [
        Difference(
            subject=key.key,
            code="policy key",
            before=f"{key.requested_before or '-'}, {key.status_before or 'not stated'}",
            after=f"{key.requested_after or '-'}, {key.status_after or 'not stated'}",
            causes=causes,
            restore=restore,
        )
        for key in comparison.keys
    ]
    before, after = defaults
    names = dict.fromkeys((*before, *after)) if before and after else {}
    rows += [
        Difference(subject=f"default {name}", code="default", before=before.get(name), after=after.get(name),
                causes=causes, restore=restore)
        for name in names
        if before.get(name) != after.get(name)
    ]  # fmt: skip
    return tuple(rows)


def possible_causes(environment: Iterable[Difference], engine: str, device: str) -> tuple[str, ...]:
    """Return the rows of the environment that can change what an engine does on a device."""
    packages, libraries = _PACKAGES.get(engine, (engine,)), _LIBRARIES.get(engine, (f"lib{engine}",))
    cuda = device.startswith("cuda")
    causes = []
    for row in environment:
        kind, _, name = row.subject.partition(".")
        if (
            row.subject in (*_ALWAYS, "plan.engine_version")
            or (kind == "packages" and name.startswith((*packages, *(("nvidia",) if cuda else ()))))
            or (kind == "libraries" and name.startswith((*libraries, *(_CUDA if cuda else ()))))
            or kind == "variables"
            or (kind == "devices" and name == device)
        ):
            causes.append(row.subject)
    return tuple(causes)


def restoring(causes: Iterable[str], environment: Iterable[Difference]) -> str:
    """Return the pins of several rows as one text."""
    wanted = set(causes)
    return "; ".join(dict.fromkeys(row.restore for row in environment if row.subject in wanted and row.restore))


def _pin(change: Difference) -> str:
    kind, _, name = change.subject.partition(".")
    if kind == "packages":
        return f"pip install {name}=={change.before}" if change.before else f"pip uninstall {name}"
    if kind == "variables":
        return f"export {name}={change.before}" if change.before is not None else f"unset {name}"
    if kind == "driver":
        return f"install the driver of {change.before}" if change.before else ""
    return ""
