# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RayExecutor`: candidates on one node of a Ray cluster; another node like it takes over where the node is lost."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.tuning.devices import TrialDevice, hardware_difference
from xpuruntime.tuning.executors.base import Executor
from xpuruntime.tuning.trial import CandidateFailed, DeviceLost, OutOfTime, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xpuruntime.tuning.executors.ray_cluster import RayCluster, RayNode, ShippedFiles
    from xpuruntime.tuning.executors.runner import RunnerJob
    from xpuruntime.tuning.spec.parts import Constraints
    from xpuruntime.tuning.trial import Candidate

__all__ = ["RayExecutor"]


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
        found: dict[str, Any] = self._call("count_slow_runs", [candidate], candidate, limit, runs, seconds)
        return found

    def determinism(self, candidate: Candidate, grade: str) -> dict[str, Any]:
        """Test a grade."""
        found: dict[str, Any] = self._call("determinism", [candidate], candidate, grade)
        return found

    def op_time_shares(self, candidate: Candidate) -> dict[str, float]:
        """Return the share of time of each operator type."""
        found: dict[str, float] = self._call("op_time_shares", [candidate], candidate)
        return found

    def measure_fresh(self, candidates: Sequence[Candidate]) -> list[float]:
        """Open candidates anew and time them one after the other and back."""
        found: list[float] = self._call("measure_fresh", candidates, list(candidates))
        return found

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
        jobs = {one.id: self._job_of(one) for one in candidates}
        found = self._cluster.get(self._node, "call", method, jobs, self.time_left(), *arguments)
        if "out_of_time" in found:
            raise OutOfTime
        if "failed" in found:
            raise CandidateFailed(*found["failed"])
        return found["value"]
