# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Observation by an engine: what devices do, units that no kernel ran for, unique names of units."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from xpuruntime.engines.precision.types import FLOATS
from xpuruntime.engines.registry import default_registry
from xpuruntime.errors import InputError
from xpuruntime.evidence.records import Unit
from xpuruntime.runtime import profiler

if TYPE_CHECKING:
    from xpuruntime.engines.base import WorkRecorder
    from xpuruntime.runtime.profiler import DeviceRecording


class DeviceRecorder:
    """Records ranges of the host and the work of CUDA devices.

    While an engine says that its package has to be asked for the work of devices, that is the source; otherwise the
    core has CUPTI itself, and gives it back at the end.
    """

    def __init__(self, *, devices: bool = True, limit: int = profiler.LIMIT) -> None:
        self._devices, self._limit = devices, limit
        self._recorder: WorkRecorder | None = None
        self._started = False
        self._notes: tuple[str, ...] = ()

    def start(self) -> None:
        """Start. Where this is interrupted, `abandon` it."""
        self._notes = ()
        if not self._devices:
            self._start(devices=False)
            self._notes = ("ranges of the host only: the work of devices was not asked for",)
            return
        try:
            recorders = (engine.device_recorder(self._limit) for engine in default_registry())
            recorder = next((recorder for recorder in recorders if recorder is not None), None)
        except InputError as error:
            self._start(devices=True)
            self._notes = (f"PyTorch's profiler cannot be asked for the work of devices: {error}",)
            return
        if recorder is None:
            self._start(devices=True)
            return
        self._start(devices=False)
        self._recorder = recorder
        try:
            recorder.start()
        except BaseException:
            self.abandon()
            raise

    def _start(self, *, devices: bool) -> None:
        self._started = True  # before it has: whatever interrupts this, `abandon` ends what may go on
        try:
            profiler.start(devices=devices, limit=self._limit)
        except InputError:  # somebody else's goes on
            self._started = False
            raise

    def _stop(self) -> DeviceRecording:
        recording = profiler.stop()
        self._started = False
        return recording

    def abandon(self) -> None:
        """End the recording, at whatever point `start` or `stop` was interrupted. Idempotent."""
        try:
            if self._recorder is not None:
                self._recorder.abandon()
                self._recorder = None
        finally:
            if self._started:
                with contextlib.suppress(InputError):  # it has ended, or had not begun
                    self._stop()
                self._started = False

    def stop(self) -> DeviceRecording:
        """Wait for the devices, and return what was recorded."""
        recorder = self._recorder
        if recorder is None:
            recording = self._stop()
        else:
            try:
                recorder.stop()
                self._recorder = None
            finally:
                recording = self._stop()
            recording = recorder.added_to(recording)
        return msgspec.structs.replace(recording, notes=(*self._notes, *recording.notes))


#: Operators that change types because the model says so: they have no precision of their own to honour.
CONVERSIONS = frozenset({"Cast", "CastLike", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})

_PRODUCTS = ("Conv", "MatMul", "Gemm", "Attention")


def is_product(op: str) -> bool:
    """Whether an operator is one that quantization is for; the others may stay as the model states them."""
    return any(word in op for word in _PRODUCTS)


def check_complete(units: Iterable[Unit], nodes: Iterable[str]) -> None:
    """Hold a join to its promise: every source node is in exactly one unit, and nothing else is."""
    count = Counter(name for unit in units for name in unit.source_nodes)
    wrong = [name for name, times in count.items() if times != 1] + sorted(set(nodes) ^ set(count))
    if wrong:
        raise AssertionError(f"source nodes not accounted for exactly once: {wrong[:5]}")


class UnitIds:
    """Makes ids of names: a name that comes again is numbered, ``"conv#2"``."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def __call__(self, name: str) -> str:
        """Return the id of the next unit of this name."""
        self._seen[name] += 1
        return name if self._seen[name] == 1 else f"{name}#{self._seen[name]}"


class _Node(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def outputs(self) -> Sequence[str]: ...


def folded_unit(node: _Node, engine: str, reason: str, **extra: Any) -> Unit:
    """Return the unit of a source node that does not run."""
    fields: dict[str, Any] = {
        "id": node.name,
        "op": node.op,
        "relation": "folded",
        "source_nodes": (node.name,),
        "outputs": tuple(name for name in node.outputs if name),
        "engine": engine,
        "device": "none",
        "placement_reason": reason,
        "placement_source": "rule",
    }
    return Unit(**{**fields, **extra})


def listed(values: Iterable[str]) -> str:
    """Return the distinct values in one line, the most frequent first; empty where there are none."""
    return ", ".join(value for value, _ in Counter(values).most_common())


def effective_of(units: Iterable[Unit], engine: str) -> dict[str, str]:
    """Return the observations of policy keys that concern all units, by key."""
    ran = [unit for unit in units if unit.time is not None and unit.source_nodes and unit.relation != "folded"]
    if not ran:
        return {}
    precisions = (unit.precision_run for unit in ran if unit.precision_requested in FLOATS)
    effective = {
        "execution.engine": engine,
        "execution.device": listed(unit.device for unit in ran),
        "execution.precision": listed(name for name in precisions if name),
        "execution.layout": listed(unit.layout for unit in ran if unit.layout),
    }
    return {key: value for key, value in effective.items() if value}
