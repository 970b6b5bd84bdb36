# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Report`: what was asked, what was resolved and what was observed, as one value that can be saved and read back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from xpuruntime.errors import InputError
from xpuruntime.evidence.cuda_graphs import GraphStatus
from xpuruntime.evidence.determinism import DeterminismTests
from xpuruntime.evidence.documents import Page
from xpuruntime.evidence.kernel_records import KernelDecision
from xpuruntime.evidence.memory_over_time import LiveBytes, MemorySample
from xpuruntime.evidence.records import (
    Boundary,
    Conversion,
    Latency,
    Observation,
    SourceNode,
    Timeline,
    Unit,
    check_detail,
)
from xpuruntime.evidence.shape_coverage import ShapeCoverage
from xpuruntime.files.paths import reason_of, user_path
from xpuruntime.files.reading import decode_json, read_regular
from xpuruntime.runtime.machine import Library

if TYPE_CHECKING:
    import os

    from rich.console import RenderableType

SCHEMA = "xpuruntime.report/1"
#: Bytes that a file of a report may have.
MAX_REPORT = 1 << 30

_GIVE = "give a file that `Report.save` or `xrt explain --json` wrote, whole and unedited"

#: Keys that every report of this schema has had from the first.
_ALWAYS = frozenset({"plan", "observations", "units"})


class Report(Page, frozen=True, kw_only=True):
    """The evidence of one session.

    Attributes
    ----------
    schema : str
        ``"xpuruntime.report/1"``.
    created : str
        When it was made: ISO 8601, UTC.
    command : str
        What reproduces it.
    plan : dict
        The plan, as its `to_dict` gives it.
    observations : tuple of Observation
        One for each policy key: requested, resolved, observed.
    units : tuple of Unit
        What the engine executed, joined to the source model; every source node is in exactly one.
    boundaries : tuple of Boundary
        Copies, casts, layout changes and CPU islands of one run.
    conversions : tuple of Conversion
        What the session did to the caller's arrays or to the model.
    latency : Latency or None
        Of whole runs without instruments.
    memory : dict of str to int
        Bytes by owner.
    environment : dict
        Python, platform, packages, and the environment variables that steer engines.
    libraries : tuple of Library
        Vendor libraries loaded in the process.
    notes : tuple of str
        What could not be observed, and why.
    partial : bool
        Whether the pass broke off or a source of records was missing.
    graph : tuple of SourceNode
        The nodes of the source model and what they read and make, in the order of the model; empty where that is not
        known.
    decisions : tuple of KernelDecision
        Which xpuruntime kernels were considered for the calls of the instrumented pass, and which served; empty where
        none was asked for.
    memory_over_time : tuple of MemorySample
        Who held how much at the checkpoints of the pass, in their order; empty in reports that were saved before it was
        there.
    live : tuple of LiveBytes
        What the tensors between units occupy around each unit, in the order of execution; empty where the engine does
        not report their sizes.
    timeline : Timeline or None
        When what ran in the last instrumented run; ``None`` where the engine reports durations alone.
    cuda_graph : GraphStatus or None
        Whether the session runs as a CUDA graph, or can, and which nodes prevent it; ``None`` where it was not
        looked into.
    shapes : ShapeCoverage or None
        Which input shapes the session takes, and of which of them this report speaks; ``None`` where that is not known.
    determinism : DeterminismTests or None
        The grades of determinism that were tested on the session, and the highest that passed; ``None`` where no test
        ran.
    """

    NOUN: ClassVar = "the report"
    TABLE: ClassVar = "units"
    STATED: ClassVar = ("headline", "honoured", "fallback")

    schema: str = SCHEMA
    created: str = ""
    command: str = ""
    plan: dict[str, Any] = msgspec.field(default_factory=dict)
    observations: tuple[Observation, ...] = ()
    units: tuple[Unit, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    latency: Latency | None = None
    memory: dict[str, int] = msgspec.field(default_factory=dict)
    environment: dict[str, Any] = msgspec.field(default_factory=dict)
    libraries: tuple[Library, ...] = ()
    notes: tuple[str, ...] = ()
    partial: bool = False
    graph: tuple[SourceNode, ...] = ()
    decisions: tuple[KernelDecision, ...] = ()
    memory_over_time: tuple[MemorySample, ...] = ()
    live: tuple[LiveBytes, ...] = ()
    timeline: Timeline | None = None
    cuda_graph: GraphStatus | None = None
    shapes: ShapeCoverage | None = None
    determinism: DeterminismTests | None = None

    @property
    def model(self) -> str:
        """The model as the plan names it; empty in a report without a plan."""
        return str(self.plan.get("model", {}).get("path", ""))

    @property
    def deviations(self) -> tuple[Observation, ...]:
        """The policy keys that were not honoured: something else ran, or the engine does not support them."""
        return tuple(o for o in self.observations if o.status in ("substituted", "unsupported"))

    @property
    def unobservable(self) -> tuple[Observation, ...]:
        """The policy keys of which nothing could be seen: neither honoured nor deviating."""
        return tuple(o for o in self.observations if o.status == "unobservable")

    @property
    def honoured(self) -> bool:
        """Whether no key deviates and none is inconclusive.

        Single keys that could not be observed do not count against it, all of them do. A fallback that the policy
        permits does not, either: see `fallback`.
        """
        return not (self.deviations or self.inconclusive or self._blind)

    @property
    def inconclusive(self) -> tuple[Observation, ...]:
        """The policy keys that were tested without a value to compare: neither honoured nor deviating."""
        return tuple(o for o in self.observations if o.status == "inconclusive")

    @property
    def fallback(self) -> str | None:
        """The candidate of ``execution.fallback`` that ran, such as ``"openvino@cpu"``, or ``None``."""
        used = (o for o in self.observations if o.key == "execution.fallback" and o.status == "fallback")
        return next((o.resolved.removeprefix("used: ") for o in used), None)

    @property
    def _blind(self) -> bool:
        return bool(self.observations) and len(self.unobservable) == len(self.observations)

    @property
    def headline(self) -> str:
        """The verdict in a few words: ``"policy honoured"`` or ``"N deviations"``.

        A fallback that ran adds ``"by fallback openvino@cpu"``, and a pass that broke off ``"as far as observed"``.
        Where nothing deviates and a key is inconclusive, the headline is ``"N keys inconclusive"``; where no key could
        be observed, ``"nothing observed"``.
        """
        if self._blind:
            return "nothing observed"
        count, open_ = len(self.deviations), len(self.inconclusive)
        if count:
            text = "1 deviation" if count == 1 else f"{count} deviations"
        elif open_:
            text = "1 key inconclusive" if open_ == 1 else f"{open_} keys inconclusive"
        else:
            text = "policy honoured"
        if self.fallback is not None:
            text += f"{'' if text == 'policy honoured' else ','} by fallback {self.fallback}"
        return f"{text} as far as observed" if self.partial and not count else text

    def to_html(self) -> str:
        """Return one page for a browser, which loads nothing from elsewhere: style, script and data are in it."""
        from xpuruntime.evidence.page import render_page

        return render_page(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read what `save` wrote; the result equals the report that was saved.

        Raises
        ------
        InputError
            The file is missing, no JSON, or no report of this schema.
        """
        source = user_path(path, "the report")
        try:
            raw = read_regular(source, MAX_REPORT)
        except OSError as error:
            raise InputError(f"cannot read the report '{source}': {reason_of(error)}. Fix: {_GIVE}") from error
        try:
            schema = decode_json(raw, _Header).schema
            if schema.partition("/")[0] != SCHEMA.partition("/")[0]:
                raise InputError(f"'{source}' is not a report: it has the schema '{schema}'. Fix: {_GIVE}")
            if schema != SCHEMA:
                raise InputError(
                    f"'{source}' has the schema '{schema}', this version reads '{SCHEMA}'",
                    fix="read it with the version of xpuruntime that wrote it",
                )
            report = decode_json(raw, cls)
            if report.latency is not None:
                check_detail(report.latency.detail)
            missing = sorted(_ALWAYS.difference(decode_json(raw, dict[str, msgspec.Raw])))
            if missing:
                raise InputError(f"'{source}' is not a whole report: it has no {', '.join(missing)}. Fix: {_GIVE}")
            return report
        except msgspec.MsgspecError as error:
            raise InputError(f"'{source}' is not a report: {error}. Fix: {_GIVE}") from error

    def __str__(self) -> str:
        from xpuruntime.evidence.render_text.terminal import plain_text

        return plain_text(self)

    def _repr_html_(self) -> str:
        from xpuruntime.evidence.page import render_fragment

        return render_fragment(self)

    def __rich__(self) -> RenderableType:
        from xpuruntime.evidence.render_text.terminal import render

        return render(self)


class _Header(msgspec.Struct):
    """What distinguishes a report from other JSON."""

    schema: str
