# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Causes and pins: which differences of an environment can change what an engine does, and what undoes them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from xpuruntime.locks.diff.result import DiffRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xpuruntime.evidence.report_comparison import ReportComparison, SurroundingChange

__all__ = ["environment_rows", "plan_rows", "possible_causes", "restoring"]

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


def environment_rows(comparison: ReportComparison) -> tuple[DiffRow, ...]:
    """Return what differs in the environment, without paths that differ by the folder of the environment alone."""
    rows = []
    for one in comparison.surroundings:
        if one.name.startswith("settings.") or one.name in ("plan.policy_source",):
            continue
        before, after = (None if value is None else _DISTRIBUTION.sub("", value) for value in (one.before, one.after))
        if before != after:
            rows.append(DiffRow(id=one.name, before=before or "-", after=after or "-", restore=_pin(one)))
    versions = {(row.before, row.after) for row in rows if row.id.startswith("packages.")}
    return tuple(row for row in rows if row.id != "plan.engine_version" or (row.before, row.after) not in versions)


def plan_rows(
    comparison: ReportComparison, defaults: Sequence[dict[str, str]], environment: Iterable[DiffRow]
) -> tuple[DiffRow, ...]:
    """Return what differs in the plan: candidate, settings, status of policy keys, defaults of the engine."""
    engine = comparison.after.engine
    causes = possible_causes(environment, engine, comparison.after.device)
    restore = restoring(causes, environment)
    rows = [
        DiffRow(id=f"plan.{name}", what="chosen", before=before, after=after, restore=f"execution.{name}: {before}")
        for name in ("engine", "device", "precision")
        if (before := getattr(comparison.before, name)) != (after := getattr(comparison.after, name))
    ]
    rows += [
        DiffRow(id=one.name, what="setting", before=one.before or "-", after=one.after or "-", causes=causes,
                restore=restore)
        for one in comparison.surroundings
        if one.name.startswith("settings.") and one.name != "settings.computes"
    ]  # fmt: skip
    rows += [
        DiffRow(
            id=one.key,
            what="policy key",
            before=f"{one.requested_before or '-'}, {one.status_before or 'not stated'}",
            after=f"{one.requested_after or '-'}, {one.status_after or 'not stated'}",
            causes=causes,
            restore=restore,
        )
        for one in comparison.keys
    ]
    before, after = defaults
    names = dict.fromkeys((*before, *after)) if before and after else {}
    rows += [
        DiffRow(id=f"default {name}", what="default", before=before.get(name, "-"), after=after.get(name, "-"),
                causes=causes, restore=restore)
        for name in names
        if before.get(name) != after.get(name)
    ]  # fmt: skip
    return tuple(rows)


def possible_causes(environment: Iterable[DiffRow], engine: str, device: str) -> tuple[str, ...]:
    """Return the rows of the environment that can change what an engine does on a device."""
    packages, libraries = _PACKAGES.get(engine, (engine,)), _LIBRARIES.get(engine, (f"lib{engine}",))
    cuda = device.startswith("cuda")
    found = []
    for row in environment:
        kind, _, name = row.id.partition(".")
        if (
            row.id in (*_ALWAYS, "plan.engine_version")
            or (kind == "packages" and name.startswith((*packages, *(("nvidia",) if cuda else ()))))
            or (kind == "libraries" and name.startswith((*libraries, *(_CUDA if cuda else ()))))
            or kind == "variables"
            or (kind == "devices" and name == device)
        ):
            found.append(row.id)
    return tuple(found)


def restoring(causes: Iterable[str], environment: Iterable[DiffRow]) -> str:
    """Return the pins of several rows as one text."""
    wanted = set(causes)
    return "; ".join(dict.fromkeys(row.restore for row in environment if row.id in wanted and row.restore))


def _pin(change: SurroundingChange) -> str:
    kind, _, name = change.name.partition(".")
    if kind == "packages":
        return f"pip install {name}=={change.before}" if change.before else f"pip uninstall {name}"
    if kind == "variables":
        return f"export {name}={change.before}" if change.before is not None else f"unset {name}"
    if kind == "driver":
        return f"install the driver of {change.before}" if change.before else ""
    return ""
