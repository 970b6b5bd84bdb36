# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Trials of a search: candidates, devices, and what came of opening and measuring them, recalled from the journal."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from xpuruntime import _core
from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeError
from xpuruntime.measuring.statistics import CandidateCode
from xpuruntime.policies.device_spec import DeviceSpec
from xpuruntime.policies.document import Refused, quote
from xpuruntime.runtime.cpu_and_memory import CpuCores, cpu_cores
from xpuruntime.runtime.interruptible_waits import BackgroundCall, ConditionVariable

if TYPE_CHECKING:
    from xpuruntime.files.journal import Journal
    from xpuruntime.runtime.machine import Machine
    from xpuruntime.tuning.trial_executors import Executor

#: The id of the user's own policy.
CONTROL = "c0"
#: Why something was not measured, or not to its end.
USED_UP = "the budget of time was used up"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that is tried."""

    id: str
    engine: str
    device: str
    changes: dict[str, Any]
    policy: dict[str, Any]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What came of opening a candidate and comparing its outputs."""

    code: CandidateCode | None = None
    reason: str = ""
    start: float | None = None
    memory: int | None = None
    error: float | None = None
    cosine: float | None = None
    run: float | None = None
    graph: str | None = None
    seconds: float = 0.0


class CandidateFailed(XpuRuntimeError):  # noqa: N818  read as a sentence
    """A candidate failed while it was measured. Private to this package: it becomes the candidate's code and reason."""

    def __init__(self, code: CandidateCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = CandidateCode(code), reason


class DeviceLost(XpuRuntimeError):  # noqa: N818  read as a sentence
    """The device that candidates were measured on went away: no fault of theirs."""


class OutOfTime(XpuRuntimeError):  # noqa: N818  read as a sentence
    """The budget ended while something was measured. It is no fault of the candidate's, and no line of the journal."""

    def __init__(self) -> None:
        super().__init__(USED_UP)


#: What names a device in a specification.
DEVICE_NAMES = "a device such as 'cuda:1', or a set of cores such as 'cpu:0-3' or 'cpu:0-3+8-11'"
_SET = "cpu:"
_RANGE = re.compile(r"(0|[1-9][0-9]{0,4})(?:-(0|[1-9][0-9]{0,4}))?")


class TrialDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that candidates are measured on, one at a time."""

    name: str
    device: str
    cores: tuple[int, ...] = ()
    hardware: dict[str, Any] = {}


def check_trial_device(text: str) -> str:
    """Return the name of a device in its canonical form. Raises `Refused`."""
    if text.startswith(_SET):
        return f"{_SET}{_cores_text(_cores(text))}"
    spec = DeviceSpec._parse(text)
    if spec.kind == "auto":
        raise Refused(f"'auto' is not a device. Fix: name {DEVICE_NAMES}")
    return f"{spec.kind}:0" if spec.index is None and spec.kind in ("cuda", "rocm") else str(spec)


def check_devices(names: Sequence[str]) -> None:
    """Check devices against each other. Raises `Refused`."""
    kinds = {name.partition(":")[0] for name in names}
    if len(kinds) > 1:
        raise Refused(f"{' and '.join(sorted(kinds))} are unlike devices, and a search ranks what it measures on all")
    if "cpu" in names and len(names) > 1:
        raise Refused("'cpu' is all cores, and shares them with the others. Fix: name disjoint sets, such as 'cpu:0-3'")
    owners: dict[int, str] = {}
    for name in names:
        for core in _cores(name) if name.startswith(_SET) else ():
            if core in owners:
                raise Refused(f"{owners[core]} and {name} share core {core}; a device has one candidate at a time")
            owners[core] = name


def trial_devices(names: Sequence[str], planned: str, machine: Machine) -> tuple[TrialDevice, ...]:
    """Return the devices of a search."""
    devices = tuple(_device(name, machine) for name in names or [planned])
    kind = planned.partition(":")[0]
    first = _device(planned, machine) if kind != "cpu" else devices[0]
    for device in devices:
        if device.device.partition(":")[0] != kind:
            raise UnsupportedOperationError(
                f"devices: {device.name} is asked for, and the policy runs on {planned}. Fix: state execution.device: "
                f"{device.device} in the policy, or leave devices out"
            )
        if difference := hardware_difference(first.hardware, device.hardware):
            raise UnsupportedOperationError(
                f"devices: {device.name} is unlike {first.name} ({difference}), and gains on the two cannot be ranked. "
                "Fix: leave one of them out"
            )
    return devices


def policy_device(name: str) -> str:
    """Return a device as a policy has it: ``"cpu"`` for a set of cores."""
    return "cpu" if name.startswith(_SET) else name


def hardware_difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Say how the hardware of two devices differs; ``""`` where it does not."""
    differs = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    return "; ".join(f"{name}: {first.get(name)} and {other.get(name)}" for name in differs)


def _device(name: str, machine: Machine) -> TrialDevice:
    kind, _, index = name.partition(":")
    if kind == "cpu":
        cores = _cores(name) if index else ()
        return TrialDevice(name=name, device="cpu", cores=cores, hardware=_processor(name, cores, machine))
    if kind != "cuda":
        return TrialDevice(name=name, device=name)
    gpu = next((device for device in machine.cuda if device.index == int(index or 0)), None)
    if gpu is None:
        there = ", ".join(f"cuda:{device.index}" for device in machine.cuda) or machine.cuda_reason or "none"
        raise UnsupportedOperationError(f"devices: {name} was not found; CUDA devices: {there}. Fix: leave it out")
    hardware = {"name": gpu.name, "memory": gpu.total_memory, "multiprocessors": gpu.sm_count}
    return TrialDevice(name=name, device=f"cuda:{gpu.index}", hardware=hardware)


def _processor(name: str, cores: tuple[int, ...], machine: Machine) -> dict[str, Any]:
    """Return what a set of cores is of. Raises where this process may not use them."""
    if cores:
        try:
            allowed = os.sched_getaffinity(0)
        except AttributeError:
            raise UnsupportedOperationError(
                f"devices: {name} is a set of cores, which needs Linux. Fix: leave devices out"
            ) from None
        if missing := sorted(set(cores) - allowed):
            raise UnsupportedOperationError(
                f"devices: {name} has core {missing[0]}, and this process may use {_cores_text(sorted(allowed))}. Fix: "
                "name cores of these"
            )
    count: CpuCores = cpu_cores(cores or None)
    clocks = {_clock(core) for core in cores} - {None}
    facts = {"name": machine.cpu.name, "cores": count.physical, "threads": count.logical}
    return {**facts, "khz": sorted(clocks)} if clocks else facts


def _clock(core: int) -> int | None:
    """Return the highest clock of a core, where the system reports it: cores of one processor may be unlike."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq").read_text(encoding="ascii"))
    return None


def _cores(name: str) -> tuple[int, ...]:
    cores: list[int] = []
    for part in name.removeprefix(_SET).split("+"):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
        if first > last:
            raise Refused(f"{quote(name)} is not a set of cores. Fix: write {_SET}0-3, or {_SET}0-3+8-11")
        cores += range(first, last + 1)
    if len(set(cores)) < len(cores):
        raise Refused(f"{quote(name)} has a core twice")
    return tuple(sorted(cores))


def _cores_text(cores: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for core in cores:
        if parts and parts[-1][-1] == core - 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return "+".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


T = TypeVar("T")


class _Stopped(Exception):  # noqa: N818  of threads, whose cause is raised elsewhere
    """Another thread failed, or the user ended the search."""


class Measurements:
    """The executors of a search and its journal: what is in the journal is not measured again."""

    def __init__(
        self,
        journal: Journal,
        executors: Sequence[Executor],
        clock: Callable[[], float],
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        self.clock = clock
        self._journal, self._executors, self._cancel = journal, list(executors), cancel
        self._gone: list[Executor] = []
        #: What was measured once more, and why.
        self.notes: list[str] = []
        self._stopped = False
        self._losing = threading.Lock()

    @property
    def executors(self) -> list[Executor]:
        """The executors whose device is there, in order."""
        return [executor for executor in self._executors if executor not in self._gone]

    @property
    def main_executor(self) -> Executor:
        """The first of them, where everything is measured that is not spread."""
        return self.executors[0]

    @property
    def cancelled(self) -> bool:
        """Whether the search is to end."""
        return self._cancel is not None and self._cancel()

    def due(self, key: str, deadline: float) -> bool:
        """Whether something may be measured: it was before, or there is time left."""
        return self._journal.has(key) or (self.clock() < deadline and not self.cancelled)

    def device(self, key: str) -> str | None:
        """Return the name of the device that something was measured on at last."""
        return self._journal.device(_retry_key(key)) or self._journal.device(key)

    def measure(self, executor: Executor, key: str, measure: Callable[[], Any]) -> Any:
        """Recall a measurement, or make it. One whose device goes away is made once more, on another device."""
        measurement = self._recall_or_measure(executor, key, measure)
        if isinstance(measurement, dict) and measurement.get("another"):
            self.notes.append(f"{measurement['lost']}; {key} was measured once more, on another one")
            measurement = self._recall_or_measure(executor, _retry_key(key), measure)
        if isinstance(measurement, dict) and "lost" in measurement:
            raise CandidateFailed(CandidateCode.NODE_LOST, measurement["lost"])
        if isinstance(measurement, dict) and "failed" in measurement:
            raise CandidateFailed(*measurement["failed"])
        return measurement

    def run_in_parallel(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Do jobs at the same time, one for each executor, and return what they do. One that raises ends the others."""
        if len(jobs) == 1:
            return [jobs[0]()]
        doing: list[BackgroundCall[T]] = []
        try:
            results: list[T] = self._run_all(jobs, doing)
        except BaseException:
            for call in doing:
                call.done.wait()
            raise
        return results

    def _in_parallel(self, jobs: Sequence[Callable[[], T]], doing: list[BackgroundCall[T]]) -> list[T]:
        lock = threading.Lock()
        changed = ConditionVariable(lock)
        ended = 0
        failed: list[BaseException] = []

        def watched(job: Callable[[], T]) -> T:
            nonlocal ended
            try:
                return job()
            except BaseException as error:
                failed.append(error)
                raise
            finally:
                with lock:
                    ended += 1
                    changed.notify_all()

        for number, job in enumerate(jobs):
            doing.append(BackgroundCall(functools.partial(watched, job), f"xpuruntime-tune_{number}"))
        changed.wait_for(lambda: bool(failed) or ended == len(jobs))
        if failed:
            raise failed[0]
        return [future.result() for future in doing]

    def _stop(self) -> None:
        self._stopped = True
        for executor in self._executors:
            executor.kill()

    _run_all = _core.guarded(_in_parallel, _stop)

    def _recall_or_measure(self, executor: Executor, key: str, measure: Callable[[], Any]) -> Any:
        result = self._journal.recall(key) if self._journal.has(key) else self._measure_now(executor, key, measure)
        if isinstance(result, dict) and "lost" in result and not result["another"] and executor not in self._gone:
            self._gone.append(executor)
        return result

    def _measure_now(self, executor: Executor, key: str, measure: Callable[[], Any]) -> Any:
        device = executor.device.name
        try:
            measurement = measure()
        except CandidateFailed as failed:
            measurement = {"failed": [failed.code, failed.reason]}
        except DeviceLost as lost:
            if self._stopped:
                raise _Stopped from lost
            measurement = self._replace_device(executor, str(lost))
        if self._stopped:
            raise _Stopped
        return self._journal.record(key, measurement, self.clock(), device)

    def _replace_device(self, executor: Executor, reason: str) -> dict[str, Any]:
        why_not = executor.replace_device()
        with self._losing:
            if why_not and len(self.executors) == 1:
                raise DeviceLost(f"{reason}; {why_not}. Fix: go on with --resume when there is a device again")
            if why_not:
                self._gone.append(executor)
        return {"lost": f"{reason}; {why_not}" if why_not else reason, "another": not why_not}


def _retry_key(key: str) -> str:
    return f"{key}/again"
