# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RayCluster`: trials on the nodes of a Ray cluster. Ray places them; the journal and all decisions stay here.

Ray is imported when a cluster is opened, and not by this module.
"""

from __future__ import annotations

import contextlib
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.errors import EngineUnavailable, InputError, UnsupportedOperationError
from xpuruntime.files.digests import file_digest
from xpuruntime.runtime.extras import install_command
from xpuruntime.tuning.bench import Bench
from xpuruntime.tuning.devices import TrialDevice, unlike
from xpuruntime.tuning.node_bench import FileSent, NodeBench
from xpuruntime.tuning.records import CandidateFailed, DeviceLost, OutOfTime, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xpuruntime.runtime.machine import Machine
    from xpuruntime.tuning.records import Candidate
    from xpuruntime.tuning.runner import Job
    from xpuruntime.tuning.spec_parts import Constraints, RayPlacement

__all__ = ["RayBench", "RayCluster", "Shipped"]

#: Seconds until another placement is asked for.
_AGAIN = 0.5


class Shipped(msgspec.Struct, frozen=True, kw_only=True):
    """What nodes get: files, and references in the object store to the contents of those that they have not."""

    files: tuple[FileSent, ...]
    contents: tuple[Any, ...]


class _Node(msgspec.Struct, frozen=True, kw_only=True):
    """An actor with a `NodeBench`, and what its node is."""

    actor: Any
    name: str
    hardware: dict[str, Any]
    machine: Any
    version: str


class RayCluster:
    """A connection to a Ray cluster, with one actor for each trial at once.

    Parameters
    ----------
    placement : RayPlacement
    cuda : bool
        Whether a trial needs a GPU where no resources are stated.

    Raises
    ------
    EngineUnavailable
        Ray is not installed.
    UnsupportedOperationError
        There is no cluster, it has no room for a trial, or its nodes are unlike.
    """

    def __init__(self, placement: RayPlacement, *, cuda: bool) -> None:
        try:
            import ray
        except ImportError:
            raise EngineUnavailable(f"Ray is not installed. Fix: {install_command('ray')}") from None
        self._ray, self._placement = ray, placement
        self._mine = not ray.is_initialized()
        self._nodes: list[_Node] = []
        if self._mine:
            try:
                ray.init(address=placement.address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UnsupportedOperationError(
                    f"ray: there is no cluster at {placement.address!r}: {error}. Fix: start one with 'ray start', or "
                    "name its address"
                ) from error
        try:
            self.resources = self._settled(cuda=cuda)
            self._nodes = self._started(placement.trials or self._room())
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
        return tuple(TrialDevice(name=one.name, device=device, hardware=one.hardware) for one in self._nodes)

    @property
    def threads(self) -> int | None:
        """The threads of a trial, where its processors are stated."""
        return self._placement.resources.get("num_cpus")

    def ship(self, files: Mapping[str, Path], shared: Sequence[str] = ()) -> Shipped:
        """Put files into the object store, but those that nodes have at their path; with their digests."""
        sent, contents = [], []
        for name, path in files.items():
            sent.append(FileSent(name=str(path) if name in shared else name, sha256=file_digest(path)))
            if name not in shared:
                contents.append(self._ray.put(np.fromfile(path, np.uint8)))
        return Shipped(files=tuple(sent), contents=tuple(contents))

    def benches(
        self, job_of: Callable[[Candidate], Job], constraints: Constraints, device: str, shipped: Shipped
    ) -> list[Bench]:
        """Return a bench for each trial at once.

        Raises
        ------
        InputError
            A node has not the file that it should share.
        """
        return [RayBench(self, one, job_of, constraints, device, shipped) for one in self._nodes]

    def place(self) -> _Node:
        """Have Ray place another trial, once more where the node that it gave is gone.

        Raises
        ------
        UnsupportedOperationError
            There was none in time, or it has another version.
        """
        until, why = time.monotonic() + self._placement.wait, ""
        while (left := until - time.monotonic()) > 0:
            actor = self._actor()
            try:
                asking = [actor.facts.remote(), actor.__ray_call__.remote(_node_name)]
                facts, node = self._ray.get(asking, timeout=left)
            except self._ray.exceptions.GetTimeoutError:
                self._ray.kill(actor)
            except self._ray.exceptions.RayError as error:
                why = f" ({_first(error)})"
                time.sleep(_AGAIN)
            else:
                return _checked(_Node(actor=actor, name=node, **facts))
        wanted = ", ".join(f"{name} {value:g}" for name, value in self.resources.items())
        raise UnsupportedOperationError(
            f"ray: no node with {wanted} free began a trial within {self._placement.wait:g} s{why}. Fix: state fewer "
            "ray.resources or ray.trials, wait longer (ray.wait), or install xpuruntime on the nodes"
        )

    def _actor(self) -> Any:
        asked = dict(self.resources)
        options = {name: asked.pop(name) for name in ("num_cpus", "num_gpus") if name in asked}
        made = self._ray.remote(NodeBench).options(
            **options, resources=asked, scheduling_strategy="SPREAD", max_restarts=0
        )
        return made.remote()

    def get(self, node: _Node, method: str, *arguments: Any) -> Any:
        """Call a method of a node's bench. Raises `DeviceLost` where the node, or the actor on it, is gone."""
        try:
            return self._ray.get(getattr(node.actor, method).remote(*arguments))
        except self._ray.exceptions.RayTaskError as error:  # it raised there
            raise error.as_instanceof_cause() from None
        except self._ray.exceptions.RayError as error:
            raise DeviceLost(f"the node {node.name} was lost: {_first(error)}") from error

    def fetch(self, shipped: Shipped, node: _Node, constraints: Constraints, device: TrialDevice) -> None:
        """Give a node the files of the search."""
        self.get(node, "receive", shipped.files, constraints, device, *shipped.contents)

    def unmeasurable(self, objective: str, device: str) -> str:
        """Say why an objective cannot be measured on the nodes; ``""`` where it can."""
        return str(self.get(self._nodes[0], "unmeasurable", objective, device))

    def drop(self, node: _Node) -> None:
        """Kill an actor, and with it the processes of its candidates."""
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(node.actor)

    def close(self) -> None:
        """Kill the actors, and leave the cluster where it was joined here."""
        for node in self._nodes:
            self.drop(node)
        self._nodes = []
        if self._mine and self._ray.is_initialized():
            self._ray.shutdown()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _settled(self, *, cuda: bool) -> dict[str, Any]:
        """Return what a trial needs: as stated; else a GPU, or all processors of the smallest node."""
        stated = dict(self._placement.resources)
        if "num_cpus" in stated:
            return stated
        if cuda or "num_gpus" in stated:
            return {"num_cpus": 1, "num_gpus": 1, **stated}
        sizes = [int(one.get("CPU", 0)) for one in self._alive() if all(one.get(name) for name in stated)]
        return {"num_cpus": min((one for one in sizes if one), default=1), **stated}

    def _room(self) -> int:
        """Return how many trials the cluster has room for at once."""
        names = {"num_cpus": "CPU", "num_gpus": "GPU"}
        wanted = {names.get(name, name): value for name, value in self.resources.items()}
        count = sum(min(int(one.get(name, 0) // value) for name, value in wanted.items()) for one in self._alive())
        if not count:
            shown = ", ".join(f"{name} {value:g}" for name, value in self.resources.items())
            raise UnsupportedOperationError(f"ray: no node of the cluster has {shown}. Fix: state other ray.resources")
        return count

    def _alive(self) -> list[dict[str, float]]:
        """Return the resources of each node."""
        return [one["Resources"] for one in self._ray.nodes() if one["Alive"]]

    def _started(self, count: int) -> list[_Node]:
        for _ in range(count):
            node = self.place()
            self._nodes.append(node)
            if difference := unlike(self._nodes[0].hardware, node.hardware):
                raise UnsupportedOperationError(
                    f"ray: the nodes {self._nodes[0].name} and {node.name} are unlike ({difference}), and gains on the "
                    "two cannot be ranked. Fix: name in ray.resources a custom resource that only nodes of one kind "
                    "have, or state ray.trials: 1"
                )
        return self._nodes


class RayBench(Bench):
    """Measures candidates on a node of a cluster, and on another one like it where the node is lost."""

    def __init__(
        self,
        cluster: RayCluster,
        node: _Node,
        job_of: Callable[[Candidate], Job],
        constraints: Constraints,
        device: str,
        shipped: Shipped,
    ) -> None:
        self._cluster, self._node, self._job_of = cluster, node, job_of
        self._constraints, self._policy_device, self._shipped = constraints, device, shipped
        self._run: float | None = None
        self._take(node)

    def pace(self, run: float | None) -> None:
        """Settle how many inputs a turn goes through."""
        self._run = run
        with contextlib.suppress(DeviceLost):  # which the next measurement finds, too
            self._cluster.get(self._node, "pace", run)

    def trial(self, candidate: Candidate) -> Trial:
        """Open a candidate on the node and compare its outputs."""
        return msgspec.convert(self._call("trial", [candidate], candidate), Trial)

    def turn(self, candidate: Candidate) -> float:
        """Return the figure of a turn."""
        return float(self._call("turn", [candidate], candidate))

    def tail(self, candidate: Candidate, limit: float, runs: int, seconds: float) -> dict[str, Any]:
        """Count runs over a limit."""
        found: dict[str, Any] = self._call("tail", [candidate], candidate, limit, runs, seconds)
        return found

    def determinism(self, candidate: Candidate, grade: str) -> dict[str, Any]:
        """Test a grade."""
        found: dict[str, Any] = self._call("determinism", [candidate], candidate, grade)
        return found

    def shares(self, candidate: Candidate) -> dict[str, float]:
        """Return the share of time of each operator type."""
        found: dict[str, float] = self._call("shares", [candidate], candidate)
        return found

    def fresh(self, candidates: Sequence[Candidate]) -> list[float]:
        """Open candidates anew and time them one after the other and back."""
        found: list[float] = self._call("fresh", candidates, list(candidates))
        return found

    def close(self, candidate: Candidate | None = None) -> None:
        """Close a candidate, or all."""
        with contextlib.suppress(DeviceLost):
            if candidate is not None:
                self._cluster.get(self._node, "close", candidate)
            else:
                self._cluster.drop(self._node)

    def kill(self) -> None:
        """End what is measured, from any thread."""
        self._cluster.drop(self._node)

    def renew(self) -> str:
        """Go on on another node that is like the one that was lost."""
        self._cluster.drop(self._node)  # it may be there and out of reach
        try:
            node = self._cluster.place()
        except UnsupportedOperationError as error:
            return str(error)
        if difference := unlike(self.device.hardware, node.hardware):
            self._cluster.drop(node)
            return f"the node {node.name} is unlike it ({difference})"
        try:
            self._take(node)
            self._cluster.get(node, "pace", self._run)
        except (DeviceLost, InputError) as error:
            return str(error)
        return ""

    def _take(self, node: _Node) -> None:
        self._node = node
        self.device = TrialDevice(name=node.name, device=self._policy_device, hardware=node.hardware)
        self._cluster.fetch(self._shipped, node, self._constraints, self.device)

    def _call(self, method: str, candidates: Sequence[Candidate], *arguments: Any) -> Any:
        jobs = {one.id: self._job_of(one) for one in candidates}
        found = self._cluster.get(self._node, "call", method, jobs, self.left(), *arguments)
        if "out_of_time" in found:
            raise OutOfTime
        if "failed" in found:
            raise CandidateFailed(*found["failed"])
        return found["value"]


def _checked(node: _Node) -> _Node:
    """Refuse a node with another version of this package."""
    if node.version != (mine := version("xpuruntime")):
        raise UnsupportedOperationError(
            f"ray: the node {node.name} has xpuruntime {node.version}, and here is {mine}. Fix: install one version"
        )
    return node


def _node_name(_: object) -> str:
    """Return the address and the first digits of the id of the node that this runs on."""
    import ray

    return f"{ray.util.get_node_ip_address()}/{ray.get_runtime_context().get_node_id()[:8]}"


def _first(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
