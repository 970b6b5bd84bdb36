# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`build_report`: a `Report`, assembled from a plan and what was observed."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from xpuruntime.evidence.report import Report
from xpuruntime.evidence.report_builder.environment import environment_facts
from xpuruntime.evidence.report_builder.observations import observations
from xpuruntime.files.paths import json_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from xpuruntime.evidence.records import Boundary, Control, Conversion, Latency, SourceNode, Unit
    from xpuruntime.evidence.sections.determinism import DeterminismTests
    from xpuruntime.evidence.sections.graph_status import GraphStatus
    from xpuruntime.evidence.sections.memory_over_time import MemorySample
    from xpuruntime.evidence.sections.shape_coverage import ShapeCoverage
    from xpuruntime.runtime.machine import Library

__all__ = ["Seen", "build_report"]


class Seen(Protocol):
    """What an engine's instrumented run returns; `xpuruntime.engines.base.Observed` is one."""

    @property
    def units(self) -> tuple[Unit, ...]: ...  # noqa: D102
    @property
    def boundaries(self) -> tuple[Boundary, ...]: ...  # noqa: D102
    @property
    def effective(self) -> dict[str, str]: ...  # noqa: D102
    @property
    def notes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def partial(self) -> bool: ...  # noqa: D102


def build_report(
    plan: Mapping[str, Any],
    controls: Sequence[Control],
    observed: Seen,
    *,
    engine: str | None = None,
    device: str | None = None,
    precision: str | None = None,
    allow_cpu_ops: Collection[str] = (),
    conversions: Iterable[Conversion] = (),
    latency: Latency | None = None,
    memory: Mapping[str, int] | None = None,
    libraries: Iterable[Library] = (),
    notes: Iterable[str] = (),
    command: str | None = None,
    environment: Mapping[str, Any] | None = None,
    graph: Iterable[SourceNode] = (),
    memory_over_time: Iterable[MemorySample] = (),
    cuda_graph: GraphStatus | None = None,
    shapes: ShapeCoverage | None = None,
    determinism: DeterminismTests | None = None,
) -> Report:
    """Compare the plan with what was observed, and gather the rest."""

    def resolved(given: str | None, name: str) -> str | None:
        value = plan.get(name)
        return given if given is not None else value if isinstance(value, str) and value else None

    return Report(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(sys.orig_argv) if command is None else command,
        plan=_plain(dict(plan)),
        observations=observations(
            controls,
            observed.effective,
            observed.units,
            engine=resolved(engine, "engine"),
            device=resolved(device, "device"),
            precision=resolved(precision, "precision"),
            allow_cpu_ops=allow_cpu_ops,
            keys=getattr(observed, "keys", None),
        ),
        units=observed.units,
        boundaries=observed.boundaries,
        conversions=tuple(conversions),
        latency=msgspec.structs.replace(latency, detail=_plain(latency.detail)) if latency is not None else None,
        memory=dict(memory or {}),
        environment=_plain(dict(environment) if environment is not None else environment_facts()),
        libraries=tuple(libraries),
        notes=(*observed.notes, *notes),
        partial=observed.partial,
        graph=tuple(graph),
        decisions=getattr(observed, "decisions", ()),
        memory_over_time=tuple(memory_over_time),
        live=getattr(observed, "live", ()),
        cuda_graph=cuda_graph,
        shapes=shapes,
        determinism=determinism,
    )


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """Return `value` as JSON would give it back, so that a saved report equals the one in memory."""
    found: dict[str, Any] = msgspec.json.decode(json_bytes(value))
    return found
