# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The record types of the loop: what was requested, what was resolved, what was observed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from xpuruntime.codes import Code

__all__ = [
    "BESIDE",
    "Boundary",
    "Control",
    "Conversion",
    "DeviceKernel",
    "Enforceability",
    "KeySeen",
    "Latency",
    "Observation",
    "SourceNode",
    "Span",
    "Status",
    "Time",
    "Timeline",
    "Unit",
    "UnitStatus",
    "Verdict",
    "VerdictCode",
    "check_detail",
]

Enforceability = Literal["enforced", "advisory", "unsupported"]
Status = Literal["honoured", "fallback", "substituted", "unsupported", "inconclusive", "unobservable"]
UnitStatus = Literal["honoured", "substituted", "unsupported", "unobservable"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate, accepted or rejected."""

    candidate: str
    accepted: bool
    code: VerdictCode
    reason: str
    fix: str | None = None


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """One policy key and what an engine can do with it, known before anything is loaded."""

    key: str
    requested: str
    resolved: str
    enforceability: Enforceability
    reason: str
    fix: str | None = None


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One policy key after a run: requested, resolved, observed.

    ``status`` is `honoured`, `fallback` (a candidate of ``execution.fallback`` ran, which the policy permits),
    `substituted` (something else ran), `unsupported` (the plan said so), `inconclusive` (it was tested, and the test
    compared nothing) or `unobservable`.
    """

    key: str
    requested: str
    resolved: str
    observed: str
    status: Status
    reason: str


class KeySeen(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine itself found out about one policy key, where it knows more than its units tell.

    `status` is meant as in `Observation`.
    """

    observed: str
    status: Status
    reason: str


class Time(msgspec.Struct, frozen=True, kw_only=True):
    """A time and what kind of time it is.

    Attributes
    ----------
    value : float
        Median over `runs`.
    unit : str
        ``"us"`` or ``"cycles"``.
    kind : {"wall", "device", "cycles", "simulated"}
    runs : int
    """

    value: float
    unit: str
    kind: Literal["wall", "device", "cycles", "simulated"]
    runs: int


class DeviceKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel, copy or fill that a device ran for one unit, as a profiler of devices saw it.

    Attributes
    ----------
    name : str
        Demangled.
    kind : {"kernel", "copy", "fill"}
    count : float
        In one run.
    us : float
        Microseconds on the device in one run, median over `runs`.
    runs : int
    bytes : int
        Of a copy or fill, in one run.
    tensor_cores : bool or None
        Whether it multiplies with tensor cores, as far as its name says; ``None``: it does not say.
    precision : str or None
        In which it multiplies, such as ``"tf32"``, as far as its name says.
    """

    name: str
    kind: Literal["kernel", "copy", "fill"]
    count: float
    us: float
    runs: int
    bytes: int = 0
    tensor_cores: bool | None = None
    precision: str | None = None


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One thing the engine executed, joined to the source nodes it stands for.

    Attributes
    ----------
    id : str
        The engine's own name of the unit.
    op : str
        The engine's operator type, such as ``"FusedConv"``.
    relation : {"exact", "fused", "inserted", "folded", "opaque"}
        To the source graph: one node, several, none of its own (a copy, cast, layout change, or a step of a node that
        the engine expanded: see `serves`), computed or removed at load time, or a partition whose inside cannot be
        seen.
    source_nodes : tuple of str
        Names of the source nodes (unique: unnamed nodes get a name before the engine sees them).
    outputs : tuple of str
        Names of the source tensors it produces; joining is keyed on these.
    serves : tuple of str
        Names of source nodes on whose behalf it runs, but which are accounted for at another unit: set for a second
        copy of a node and for the steps of a node that the engine expanded into several units.
    engine, device : str
        ``device`` includes the provider where the engine has several, such as ``"cuda:0"``.
    provider : str or None
        The engine's own execution provider or plugin.
    kernel : str or None
        The kernel that ran, where the engine or a profiler says so.
    kernel_source : {"reported", "inferred", "unknown"}
    precision_requested, precision_run : str or None
        Such as ``"fp32"``. ``precision_run`` is the dtype of the tensors the unit read and wrote.
    layout : str or None
    time : Time or None
    placement_reason : str or None
    placement_source : {"log", "rule", "policy", "none"}
    status : {"honoured", "substituted", "unsupported", "unobservable"}
    device_kernels : tuple of DeviceKernel
        What a device ran for it, longest first; empty where no profiler of devices watched.
    phase : str
        ``"prefill"`` or ``"decode"`` where an engine that generates ran the node in both, each a unit of its own.
    """

    id: str
    op: str
    relation: Literal["exact", "fused", "inserted", "folded", "opaque"]
    source_nodes: tuple[str, ...]
    outputs: tuple[str, ...]
    serves: tuple[str, ...] = ()
    engine: str
    device: str
    provider: str | None = None
    kernel: str | None = None
    kernel_source: Literal["reported", "inferred", "unknown"] = "unknown"
    precision_requested: str | None = None
    precision_run: str | None = None
    layout: str | None = None
    time: Time | None = None
    placement_reason: str | None = None
    placement_source: Literal["log", "rule", "policy", "none"] = "none"
    status: UnitStatus = "honoured"
    device_kernels: tuple[DeviceKernel, ...] = ()
    phase: str = ""

    @property
    def computes(self) -> bool:
        """Whether it ran and computes something of the model: it is no inserted copy, cast or layout change."""
        ran = self.relation != "folded" and (self.time is not None or self.status != "unobservable")
        return ran and bool(self.source_nodes or self.serves or self.relation == "opaque")


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time in one instrumented run, on a thread of the host or a stream of a device.

    Attributes
    ----------
    name : str
        The engine's name of the unit, or the kernel's.
    unit : str
        ``id`` of the unit that it belongs to; empty: of none, or not known.
    kind : {"unit", "kernel", "copy", "fill"}
    lane : str
        Such as ``"thread 1"`` or ``"cuda:0 stream 7"``.
    start_us : float
        After the start of the run, microseconds.
    us : float
        Microseconds.
    """

    name: str
    unit: str = ""
    kind: Literal["unit", "kernel", "copy", "fill"]
    lane: str
    start_us: float
    us: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """When what ran, in the last instrumented run.

    Attributes
    ----------
    run_us : float
        Wall time of that run, from its start to its end, microseconds.
    spans : tuple of Span
        By start. Those of a lane may hold each other (control flow).
    """

    #: Loops run nodes without end: a run of more spans has no timeline.
    MOST_SPANS: ClassVar = 20_000

    run_us: float
    spans: tuple[Span, ...]


class SourceNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the source model, as units name it. `inputs` are the tensors that it reads, without weights."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


#: Ends `Boundary.where` of copies and fills that no node started: those of a run's own inputs and outputs.
BESIDE = "outside of nodes"


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """Work at the border between devices, dtypes or layouts: a copy, cast, layout change, CPU island or a sync."""

    kind: Literal["copy", "cast", "layout", "cpu_island", "sync"]
    where: str
    count: int
    bytes: int | None = None
    time: Time | None = None


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """What the session did to the caller's arrays or to the model, each said once with a count.

    Attributes
    ----------
    what : str
        Such as ``"input 'x' was not C-contiguous: copied"``.
    reason : str
    count : int
    """

    what: str
    reason: str
    count: int


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Wall time of whole runs, in microseconds."""

    median_us: float
    p90_us: float
    min_us: float
    runs: int
    detail: dict[str, Any] = {}


class VerdictCode(Code):
    """Why a candidate of a plan is accepted or rejected."""

    ACCEPTED = "accepted", "It runs the model."
    NOT_TRIED = "not_tried", "One before it was accepted."
    NOT_NAMED = "not_named", "An engine or device that runs only when a policy names it: null, a simulator."
    ENGINE_UNKNOWN = "engine_unknown", "No engine has that name; the nearest is named."
    ENGINE_MISSING = "engine_missing", "The engine is not installed; the fix is the command."
    ENGINE_BROKEN = "engine_broken", "It is installed and cannot be loaded, or is too old for the request."
    LIBRARY_MISSING = (
        "library_missing",
        "A library that it needs is not here, or was built without what the request needs.",
    )
    DEVICE_MISSING = "device_missing", "The device is not in this machine."
    DEVICE_UNSUPPORTED = "device_unsupported", "The engine has no such device, or no kernels for it."
    FORMAT_UNSUPPORTED = "format_unsupported", "The engine does not read models of that format."
    OP_UNSUPPORTED = "op_unsupported", "An operator, type or construct of the model is not supported."
    PRECISION_UNSUPPORTED = "precision_unsupported", "The precision asked for is not supported."
    CALIBRATION_MISSING = "calibration_missing", "Int8 of a model in floats, without inputs to quantize with."
    CALIBRATION_UNUSED = "calibration_unused", "Inputs to quantize with that nothing would use."
    SHAPE_UNSUPPORTED = "shape_unsupported", "A shape that the engine cannot run, such as one without elements on QNN."
    SHAPES_OPEN = "shapes_open", "Sizes that the engine has to know are not stated."
    TARGET_MISSING = "target_missing", "The chip to compile for is not stated."
    OPTION_INVALID = "option_invalid", "A provider option is unknown or out of range."
    NOT_ENFORCEABLE = "not_enforceable", "Under mode strict, a key that the engine does not enforce."
    COMPILE_UNSUPPORTED = "compile_unsupported", "The engine compiles nothing, or not this."
    ARTIFACT_STALE = "artifact_stale", "The artifact was made for another version, chip, policy or calibration."
    ARTIFACT_FOREIGN = "artifact_foreign", "The artifact was made by another engine or for another kind of device."


class _Instrumented(msgspec.Struct, kw_only=True):
    run_us: float
    runs: int
    statistic: str
    units_us: float = 0.0
    units: int = 0
    coverage: float = 0.0
    outside_us: float = 0.0
    outside: dict[str, float] = {}
    cut_us: float = 0.0


class _Detail(msgspec.Struct):
    instrumented: dict[str, Any] = {}
    inputs: dict[str, Any] | None = None


def check_detail(detail: Mapping[str, Any]) -> None:
    """Check the keys that are read; others may be there."""
    checked = msgspec.convert(detail, _Detail)
    if checked.instrumented:
        msgspec.convert(checked.instrumented, _Instrumented)
