# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RayCluster`: connection to a Ray cluster, which places trials, and `NodeExecutor`, which measures on a node.

The journal and all decisions stay here. Ray is imported when a cluster is opened, and not by this module.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.engines.registry import default_registry
from xpuruntime.errors import EngineUnavailable, InputError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.files.digests import file_digest
from xpuruntime.files.paths import reason_of
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.measuring.conditions import open_meter
from xpuruntime.printable import bytes_text
from xpuruntime.runtime.cpu_and_memory import cpu_cores
from xpuruntime.runtime.packages import install_command
from xpuruntime.runtime.snapshot import machine_snapshot
from xpuruntime.tuning.trial import (
    Candidate,
    CandidateFailed,
    DeviceLost,
    OutOfTime,
    Trial,
    TrialDevice,
    hardware_difference,
)
from xpuruntime.tuning.trial_executors import Executor, ProcessExecutor

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.runtime.machine import Machine
    from xpuruntime.tuning.runner import RunnerJob
    from xpuruntime.tuning.spec.parts import Constraints, RayPlacement


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


#: Seconds until another placement is asked for.
_RETRY_SECONDS = 0.5
_CONNECT_SECONDS = 10.0
_HOST_AND_PORT = re.compile(r"(?:ray://)?(?P<host>[^/\s]+):(?P<port>\d{1,5})/?")


class ShippedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What nodes get: files, and references in the object store to the contents of those that they have not."""

    files: tuple[FileSent, ...]
    contents: tuple[Any, ...]


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """An actor with a `NodeExecutor`, and what its node is."""

    actor: Any
    name: str
    hardware: dict[str, Any]
    machine: Any
    version: str


class RayCluster:
    """A connection to a Ray cluster, with one actor for each trial at once."""

    def __init__(self, placement: RayPlacement, *, cuda: bool) -> None:
        try:
            import ray
        except ImportError:
            raise EngineUnavailable(f"Ray is not installed. Fix: {install_command('ray')}") from None
        self._ray, self._placement = ray, placement
        self._owns_connection = not ray.is_initialized()
        self._nodes: list[RayNode] = []
        if self._owns_connection:
            try:
                _find_server(placement.address)
                ray.init(address=placement.address, log_to_driver=False, configure_logging=False)
            except (OSError, OverflowError, RuntimeError, ValueError) as error:
                raise UnsupportedOperationError(
                    f"ray: there is no cluster at {placement.address!r}: {str(error).rstrip('.')}. Fix: start one with "
                    "'ray start', or name its address"
                ) from error
        try:
            self.resources = self._trial_resources(cuda=cuda)
            self._nodes = self._start_nodes(placement.trials or self._capacity())
        except BaseException:
            self.close()
            raise

    @property
    def machine(self) -> Machine:
        """The first node, for planning."""
        machine: Machine = self._nodes[0].machine
        return machine

    def devices(self, device: str) -> tuple[TrialDevice, ...]:
        """Return the nodes of the trials, each of which has the device of the policy."""
        return tuple(TrialDevice(name=node.name, device=device, hardware=node.hardware) for node in self._nodes)

    @property
    def threads(self) -> int | None:
        """The threads of a trial, where its processors are stated."""
        return self._placement.resources.get("num_cpus")

    def put_files(self, files: Mapping[str, Path], shared: Sequence[str]) -> ShippedFiles:
        """Put files into the object store, but those that nodes have at their path; with their digests."""
        sent, contents = [], []
        for name, path in files.items():
            sent.append(FileSent(name=str(path) if name in shared else name, sha256=file_digest(path)))
            if name not in shared:
                contents.append(self._ray.put(np.fromfile(path, np.uint8)))
        return ShippedFiles(files=tuple(sent), contents=tuple(contents))

    def executors(
        self, job_of: Callable[[Candidate], RunnerJob], constraints: Constraints, device: str, shipped: ShippedFiles
    ) -> list[Executor]:
        """Return an executor for each trial at once."""
        return [RayExecutor(self, node, job_of, constraints, device, shipped) for node in self._nodes]

    def place(self) -> RayNode:
        """Have Ray place another trial, once more where the node that it gave is gone."""
        until, why = time.monotonic() + self._placement.wait, ""
        while (left := until - time.monotonic()) > 0:
            actor = self._actor()
            try:
                asking = [actor.facts.remote(), actor.__ray_call__.remote(_node_name)]
                facts, node = self._ray.get(asking, timeout=left)
            except self._ray.exceptions.GetTimeoutError:
                self._ray.kill(actor)
            except self._ray.exceptions.RayError as error:
                why = f" ({_one_line(error)})"
                time.sleep(_RETRY_SECONDS)
            else:
                return _check_version(RayNode(actor=actor, name=node, **facts))
        wanted = ", ".join(f"{name} {value:g}" for name, value in self.resources.items())
        raise UnsupportedOperationError(
            f"ray: no node with {wanted} free began a trial within {self._placement.wait:g} s{why}. Fix: state fewer "
            "ray.resources or ray.trials, wait longer (ray.wait), or install xpuruntime on the nodes"
        )

    def _actor(self) -> Any:
        resources = dict(self.resources)
        options = {name: resources.pop(name) for name in ("num_cpus", "num_gpus") if name in resources}
        actor = self._ray.remote(NodeExecutor).options(
            **options, resources=resources, scheduling_strategy="SPREAD", max_restarts=0
        )
        return actor.remote()

    def get(self, node: RayNode, method: str, *arguments: Any) -> Any:
        """Call a method of a node's executor. Raises `DeviceLost` where the node, or the actor on it, is gone.

        Errors of this package name the node, and have its message alone; others have the stack that Ray shows.
        """
        try:
            return self._ray.get(getattr(node.actor, method).remote(*arguments))
        except self._ray.exceptions.RayTaskError as error:  # it raised there
            if isinstance(error.cause, XpuRuntimeError):
                raise type(error.cause)(f"on the node {node.name}: {error.cause}") from None
            raise error.as_instanceof_cause() from None
        except self._ray.exceptions.RayError as error:
            raise DeviceLost(f"the node {node.name} was lost: {_one_line(error)}") from error

    def send_files(self, shipped: ShippedFiles, node: RayNode, constraints: Constraints, device: TrialDevice) -> None:
        """Give a node the files of the search."""
        self.get(node, "receive", shipped.files, constraints, device, *shipped.contents)

    def unmeasurable(self, objective: str, device: str) -> str:
        """Say why an objective cannot be measured on the nodes; ``""`` where it can."""
        return str(self.get(self._nodes[0], "unmeasurable", objective, device))

    def kill(self, node: RayNode) -> None:
        """Kill an actor, and with it the processes of its candidates."""
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(node.actor)

    def close(self) -> None:
        """Kill the actors, and leave the cluster where it was joined here."""
        for node in self._nodes:
            self.kill(node)
        self._nodes = []
        if self._owns_connection and self._ray.is_initialized():
            self._ray.shutdown()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _trial_resources(self, *, cuda: bool) -> dict[str, Any]:
        stated = dict(self._placement.resources)
        if "num_cpus" in stated:
            return stated
        if cuda or "num_gpus" in stated:
            return {"num_cpus": 1, "num_gpus": 1, **stated}
        sizes = [int(node.get("CPU", 0)) for node in self._alive() if all(node.get(name) for name in stated)]
        return {"num_cpus": min((size for size in sizes if size), default=1), **stated}

    def _capacity(self) -> int:
        names = {"num_cpus": "CPU", "num_gpus": "GPU"}
        wanted = {names.get(name, name): value for name, value in self.resources.items()}
        count = sum(min(int(node.get(name, 0) // value) for name, value in wanted.items()) for node in self._alive())
        if not count:
            shown = ", ".join(f"{name} {value:g}" for name, value in self.resources.items())
            raise UnsupportedOperationError(f"ray: no node of the cluster has {shown}. Fix: state other ray.resources")
        return count

    def _alive(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _start_nodes(self, count: int) -> list[RayNode]:
        for _ in range(count):
            node = self.place()
            self._nodes.append(node)
            if difference := hardware_difference(self._nodes[0].hardware, node.hardware):
                raise UnsupportedOperationError(
                    f"ray: the nodes {self._nodes[0].name} and {node.name} are unlike ({difference}), and gains on the "
                    "two cannot be ranked. Fix: name in ray.resources a custom resource that only nodes of one kind "
                    "have, or state ray.trials: 1"
                )
        return self._nodes


def _find_server(address: str) -> None:
    """Raise OSError where nothing listens at an address: Ray itself tries again for minutes."""
    stated = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    match = _HOST_AND_PORT.fullmatch(stated)
    if match is not None:
        socket.create_connection((match["host"].strip("[]"), int(match["port"])), timeout=_CONNECT_SECONDS).close()


def _check_version(node: RayNode) -> RayNode:
    if node.version != (mine := version("xpuruntime")):
        raise UnsupportedOperationError(
            f"ray: the node {node.name} has xpuruntime {node.version}, and here is {mine}. Fix: install one version"
        )
    return node


def _node_name(_: object) -> str:
    import ray

    return f"{ray.util.get_node_ip_address()}/{ray.get_runtime_context().get_node_id()[:8]}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


class RayExecutor(Executor):
    """Measures candidates on a node of a cluster, and on another one like it where the node is lost."""

    def __init__(
        self,
        cluster: RayCluster,
        node: RayNode,
        job_of: Callable[[Candidate], RunnerJob],
        constraints: Constraints,
        device: str,
        shipped: ShippedFiles,
    ) -> None:
        self._cluster, self._node, self._job_of = cluster, node, job_of
        self._constraints, self._policy_device, self._shipped = constraints, device, shipped
        self._run: float | None = None
        self._use_node(node)

    def calibrate(self, run: float | None) -> None:
        """Settle how many inputs a turn goes through."""
        self._run = run
        with contextlib.suppress(DeviceLost):  # which the next measurement finds, too
            self._cluster.get(self._node, "calibrate", run)

    def trial(self, candidate: Candidate) -> Trial:
        """Open a candidate on the node and compare its outputs."""
        return msgspec.convert(self._call("trial", [candidate], candidate), Trial)

    def turn(self, candidate: Candidate) -> float:
        """Return the figure of a turn."""
        return float(self._call("turn", [candidate], candidate))

    def count_slow_runs(self, candidate: Candidate, limit: float, runs: int, seconds: float) -> dict[str, Any]:
        """Count runs over a limit."""
        slow_runs: dict[str, Any] = self._call("count_slow_runs", [candidate], candidate, limit, runs, seconds)
        return slow_runs

    def determinism(self, candidate: Candidate, grade: str) -> dict[str, Any]:
        """Test a grade."""
        results: dict[str, Any] = self._call("determinism", [candidate], candidate, grade)
        return results

    def op_time_shares(self, candidate: Candidate) -> dict[str, float]:
        """Return the share of time of each operator type."""
        shares: dict[str, float] = self._call("op_time_shares", [candidate], candidate)
        return shares

    def measure_fresh(self, candidates: Sequence[Candidate]) -> list[float]:
        """Open candidates anew and time them one after the other and back."""
        results: list[float] = self._call("measure_fresh", candidates, list(candidates))
        return results

    def close(self, candidate: Candidate | None = None) -> None:
        """Close a candidate, or all."""
        with contextlib.suppress(DeviceLost):
            if candidate is not None:
                self._cluster.get(self._node, "close", candidate)
            else:
                self._cluster.kill(self._node)

    def kill(self) -> None:
        """End what is measured, from any thread."""
        self._cluster.kill(self._node)

    def replace_device(self) -> str:
        """Go on on another node that is like the one that was lost."""
        self._cluster.kill(self._node)  # it may be there and out of reach
        try:
            node = self._cluster.place()
        except UnsupportedOperationError as error:
            return str(error)
        if difference := hardware_difference(self.device.hardware, node.hardware):
            self._cluster.kill(node)
            return f"the node {node.name} is unlike it ({difference})"
        try:
            self._use_node(node)
            self._cluster.get(node, "calibrate", self._run)
        except (DeviceLost, InputError) as error:
            return str(error)
        return ""

    def _use_node(self, node: RayNode) -> None:
        self._node = node
        self.device = TrialDevice(name=node.name, device=self._policy_device, hardware=node.hardware)
        self._cluster.send_files(self._shipped, node, self._constraints, self.device)

    def _call(self, method: str, candidates: Sequence[Candidate], *arguments: Any) -> Any:
        jobs = {candidate.id: self._job_of(candidate) for candidate in candidates}
        answer = self._cluster.get(self._node, "call", method, jobs, self.time_left(), *arguments)
        if "out_of_time" in answer:
            raise OutOfTime
        if "failed" in answer:
            raise CandidateFailed(*answer["failed"])
        return answer["value"]
