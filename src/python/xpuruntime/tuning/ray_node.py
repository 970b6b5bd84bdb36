# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`NodeExecutor`: a Ray actor that measures candidates on its node. It does not import Ray."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.registry import default_registry
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.files.digests import file_digest
from xpuruntime.files.paths import reason_of
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.measuring.conditions import open_meter
from xpuruntime.printable import bytes_text
from xpuruntime.runtime.cpu_and_memory import cpu_cores
from xpuruntime.runtime.snapshot import machine_snapshot
from xpuruntime.tuning.trial import CandidateFailed, OutOfTime, TrialDevice
from xpuruntime.tuning.trial_executors import ProcessExecutor

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.tuning.runner import RunnerJob
    from xpuruntime.tuning.spec.parts import Constraints
    from xpuruntime.tuning.trial import Candidate


class FileSent(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a node needs."""

    name: str
    sha256: str


class NodeExecutor:
    """Measures candidates on the node that it is on, with `ProcessExecutor`."""

    def __init__(self) -> None:
        self._folder = ScratchFolder("tune")
        self._jobs: dict[str, RunnerJob] = {}
        self._executor: ProcessExecutor | None = None

    def facts(self) -> dict[str, Any]:
        """Return what the node is: its `Machine`, hardware, and version of this package."""
        machine = machine_snapshot(default_registry().engines())
        return {"machine": machine, "hardware": hardware_of(machine), "version": version("xpuruntime")}

    def receive(self, sent: Sequence[FileSent], constraints: Constraints, device: TrialDevice, *contents: Any) -> None:
        """Take the files of a search: the contents of those whose name is no absolute path."""
        left = iter(contents)
        for file in sent:
            path = Path(self._folder.name, file.name)
            if not Path(file.name).is_absolute():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(memoryview(next(left)))
            try:
                digest = file_digest(path)
            except OSError as error:
                raise InputError(
                    f"{file.name} cannot be read there: {reason_of(error)}. Fix: state ray.model: store"
                ) from None
            if digest != file.sha256:
                raise InputError(
                    f"{file.name} is another file there (SHA-256 {digest[:16]}…, and {file.sha256[:16]}… is "
                    "tuned). Fix: state ray.model: store, or copy it"
                )
        self._executor = ProcessExecutor(lambda candidate: self._jobs[candidate.id], constraints, device)

    def unmeasurable(self, objective: str, device: str) -> str:
        """Say why an objective cannot be measured on this node; ``""`` where it can."""
        if objective == "energy":
            try:
                open_meter(device)
            except UnsupportedOperationError as error:
                return str(error)
        return ""

    def calibrate(self, run: float | None) -> None:
        """As `Executor.calibrate`."""
        assert self._executor is not None
        self._executor.calibrate(run)

    def call(self, method: str, jobs: Mapping[str, RunnerJob], left: float, *arguments: Any) -> dict[str, Any]:
        """Call a method within the time left: ``value``, ``failed`` (code, reason) or ``out_of_time``."""
        assert self._executor is not None
        until = time.monotonic() + left
        self._executor.time_left = lambda: until - time.monotonic()
        for name, job in jobs.items():
            self._jobs[name] = self._localised(job)
        try:
            return {"value": msgspec.to_builtins(getattr(self._executor, method)(*arguments))}
        except CandidateFailed as failed:
            return {"failed": [failed.code, failed.reason]}
        except OutOfTime:
            return {"out_of_time": True}

    def close(self, candidate: Candidate | None = None) -> None:
        """Close a candidate, or all with the files."""
        if self._executor is not None:
            self._executor.close(candidate)
        if candidate is None:
            self._folder.cleanup()

    def _localised(self, job: RunnerJob) -> RunnerJob:
        folder = Path(self._folder.name)
        changes = {
            name: str(folder / value) for name in ("model", "calibration", "samples") if (value := getattr(job, name))
        }
        return msgspec.structs.replace(job, **changes)


def hardware_of(machine: Any) -> dict[str, Any]:
    """Return what distinguishes nodes: the processor, the cores that may be used, GPUs, and the engines."""
    cores = cpu_cores()
    gpus = [f"{gpu.name}, {bytes_text(gpu.total_memory)}" for gpu in machine.cuda]
    engines = {name: engine.version for name, engine in sorted(machine.engines.items()) if engine.version is not None}
    return {
        "name": machine.cpu.name,
        "cores": cores.physical,
        "threads": cores.logical,
        "gpus": gpus,
        "engines": engines,
    }


SAMPLES = "samples"
_MODEL, _CALIBRATION = "model", "calibration"


def search_files(
    model: Path, info: ModelInfo, calibration: str | None, samples: Path
) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Return the files by their names on a node, and which of these are the model's."""
    paths = _within(_MODEL, model)
    for file in info.external_files:
        paths[f"{_MODEL}/{PurePosixPath(file.location)}"] = Path(info.base_dir or model.parent) / file.location
    mine = tuple(paths)
    if calibration is not None:
        paths |= _within(_CALIBRATION, Path(calibration))
    paths |= {f"{SAMPLES}/{path.relative_to(samples).as_posix()}": path for path in _files(samples)}
    return paths, mine


def job_on_node(job: RunnerJob, *, shared: bool) -> RunnerJob:
    """Return a job with paths on a node: relative to its folder, but for a model that it has at the same path."""
    return msgspec.structs.replace(
        job,
        model=job.model if shared else f"{_MODEL}/{Path(job.model).name}",
        calibration=None if job.calibration is None else f"{_CALIBRATION}/{Path(job.calibration).name}",
        samples=SAMPLES,
    )


def _within(folder: str, path: Path) -> dict[str, Path]:
    if not path.is_dir():
        return {f"{folder}/{path.name}": path}
    return {f"{folder}/{path.name}/{file.relative_to(path).as_posix()}": file for file in _files(path)}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
