# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Differences in the surroundings of two reports: packages, libraries, driver, variables, settings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from xpuruntime.evidence.report_comparison import SurroundingChange

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from xpuruntime.evidence.report import Report

__all__ = ["surroundings"]


def surroundings(before: Report, after: Report) -> tuple[SurroundingChange, ...]:
    """Return what differs in the environment, the loaded libraries, the engine's version and its settings.

    Names have dots: ``packages.numpy``, ``variables.OMP_NUM_THREADS``, ``libraries.libcudart.so.13``,
    ``plan.engine_version``, ``settings.threads``. Settings are compared where the engine is the same.
    """
    alike = before.plan.get("engine") == after.plan.get("engine")  # else each has settings of its own
    sides = [dict(_facts(one, settings=alike)) for one in (before, after)]
    return tuple(
        SurroundingChange(name=name, before=sides[0].get(name), after=sides[1].get(name))
        for name in dict.fromkeys((*sides[0], *sides[1]))
        if sides[0].get(name) != sides[1].get(name)
    )


def _facts(report: Report, *, settings: bool) -> Iterator[tuple[str, str]]:
    yield from _flat(report.environment, "")
    libraries: dict[str, list[str]] = {}
    for one in report.libraries:
        libraries.setdefault(one.name, []).append(f"{one.version} in {one.path}" if one.version else one.path)
    for name, places in libraries.items():
        yield f"libraries.{name}", ", ".join(sorted(places))
    for key in ("engine_version", "policy_source"):
        if report.plan.get(key) is not None:
            yield f"plan.{key}", str(report.plan[key])
    stated = report.plan.get("settings")
    if settings and isinstance(stated, dict):
        yield from _flat(stated, "settings.")


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)
