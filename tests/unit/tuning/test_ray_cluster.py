# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Searches on a Ray cluster of several nodes of this machine; skipped where there is no Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import xpuruntime as xrt
from xpuruntime.errors import EngineUnavailable, InputError, PolicyError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.tuning.ray_cluster import FileSent, NodeExecutor, RayCluster
from xpuruntime.tuning.spec.parts import Constraints, RayPlacement
from xpuruntime.tuning.spec.tune_spec import TuneSpec
from xpuruntime.tuning.trial import TrialDevice

pytest.importorskip("onnxruntime")
#: Ray's own use of other packages warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.timeout(600),
]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[serve,data]")
CPU = {"execution": {"engine": "onnxruntime", "device": "cpu"}}


def spec(**ray: Any) -> dict[str, Any]:
    options = {"onnxruntime": {"session.intra_op.allow_spinning": ["0", "1"]}}
    return {
        "space": {"engine": ["onnxruntime"], "threads": ["engine", 64], "options": options, "kernels": "off"},
        "decide": {"min_effect": "20%", "confidence": 0.6, "rounds": [3, 5]},
        "ray": {"resources": {"num_cpus": 1, "trial": 1}, "wait": "60s", **ray},
    }


def children(pid: int) -> list[int]:
    numbers = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                numbers.append(int(stat.parent.name))
    return numbers


class Nodes:
    """A cluster of nodes, each with room for one trial."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.nodes: list[Any] = []
        ray.init(address=self.cluster.address, log_to_driver=False)

    def add(self, count: int = 1) -> None:
        self.nodes += [self.cluster.add_node(num_cpus=1, resources={"trial": 1}) for _ in range(count)]
        self.cluster.wait_for_nodes()

    def kill(self, name: str) -> None:
        """Kill all processes of a node, as a machine does that fails."""
        node = next(node for node in self.nodes if node.node_id.startswith(name.rpartition("/")[2]))
        self.nodes.remove(node)
        workers = children(node.all_processes["raylet"][0].process.pid)
        self.cluster.remove_node(node, allow_graceful=False)
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class KillOnce:
    """Progress that kills the node of a candidate once, in the second round of its race."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.killed: str | None = None

    def __call__(self, progress: Any) -> None:
        if self.killed is None and progress.stage == "race" and progress.round >= 1:
            self.killed = next(
                candidate.device
                for candidate in progress.candidates
                if candidate.id in progress.live and candidate.id != "c0"
            )
            self.nodes.kill(self.killed)


@needs_ray
def test_a_node_that_dies_is_a_result_and_its_trial_is_made_once_more(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add(3)
    journal = tmp_path / "j"
    kill = KillOnce(nodes)
    arguments = {"inputs": "random", "journal": journal, "spec": spec(trials=2)}
    found = xrt.tune(xrt.demo_model_path(), CPU, progress=kill, **arguments)
    assert kill.killed is not None
    lines = entries(journal)
    lost = [line for line in lines if isinstance(line["value"], dict) and "lost" in line["value"]]
    assert len(lost) == 1, "one measurement was under way there"
    assert lost[0]["device"] == kill.killed
    assert f"the node {kill.killed} was lost" in lost[0]["value"]["lost"]
    again = next(line for line in lines if line["key"] == lost[0]["key"] + "/again")
    assert again["device"] != kill.killed
    assert found.verdict in ("winner", "tied", "undecided")
    raced = [candidate for candidate in found.candidates if candidate.figure is not None]
    assert len(raced) == 3
    assert not any(candidate.code == "node_lost" for candidate in found.candidates)
    assert all(one.device != kill.killed for one in raced if one.id != "c0"), "rows have the node of their last round"
    assert found.hardware["threads"] >= 1
    assert any(f"{kill.killed} was lost" in note and "measured once more" in note for note in found.notes)
    wide = next(candidate for candidate in found.candidates if candidate.changes.get("execution.threads") == 64)
    assert "64 are more than the device has, which is 1" in wide.reason
    keys = [line["key"] for line in lines]
    assert len(keys) == len(set(keys))
    size = journal.stat().st_size
    replayed = xrt.tune(xrt.demo_model_path(), CPU, resume=True, **arguments)
    assert journal.stat().st_size == size
    assert (replayed.verdict, replayed.winner, replayed.candidates) == (found.verdict, found.winner, found.candidates)


@needs_ray
def test_without_another_node_the_search_stops_and_resumes_when_there_is_one(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add()
    journal = tmp_path / "j"
    kill = KillOnce(nodes)
    arguments = {"inputs": "random", "journal": journal, "spec": spec(wait="20s")}
    with pytest.raises(XpuRuntimeError, match=r"was lost.*no node with .* began a trial within 20 s.*--resume"):
        xrt.tune(xrt.demo_model_path(), CPU, progress=kill, **arguments)
    before = journal.read_bytes()
    nodes.add()
    found = xrt.tune(xrt.demo_model_path(), CPU, resume=True, **arguments)
    assert journal.read_bytes().startswith(before)
    assert found.verdict in ("winner", "tied", "undecided")
    keys = [entry["key"] for entry in entries(journal)]
    assert len(keys) == len(set(keys))


@needs_ray
def test_candidates_that_no_node_is_left_for_are_open(nodes: Nodes) -> None:
    nodes.add(2)
    kill = KillOnce(nodes)
    found = xrt.tune(xrt.demo_model_path(), CPU, inputs="random", spec=spec(wait="20s"), progress=kill)
    lost = [candidate for candidate in found.candidates if candidate.code == "node_lost"]
    assert len(lost) == 1
    assert f"the node {kill.killed} was lost" in lost[0].reason
    assert "no node with" in lost[0].reason
    if found.verdict != "winner":
        assert found.verdict == "undecided"
        assert lost[0].id in found.reason


@needs_ray
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores that this process may use")
def test_unlike_nodes_are_refused(nodes: Nodes) -> None:
    allowed = os.sched_getaffinity(0)
    nodes.add()
    os.sched_setaffinity(0, {min(allowed)})  # which the processes of the next node inherit
    try:
        nodes.add()
    finally:
        os.sched_setaffinity(0, allowed)
    with pytest.raises(UnsupportedOperationError, match=r"are unlike \(cores: \d+ and \d+.*custom resource"):
        xrt.tune(xrt.demo_model_path(), CPU, inputs="random", spec=spec())


@needs_ray
def test_what_the_cluster_has_not_is_refused(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add()
    with pytest.raises(UnsupportedOperationError, match=r"no node of the cluster has num_cpus 1, nonsense 1"):
        xrt.tune(xrt.demo_model_path(), CPU, inputs="random", spec=spec(resources={"nonsense": 1}))
    with pytest.raises(UnsupportedOperationError, match=r"no node with num_cpus 1, trial 1 free began .* 20 s"):
        xrt.tune(xrt.demo_model_path(), CPU, inputs="random", spec=spec(trials=2, wait="20s"))
    model = tmp_path / "model.onnx"
    shutil.copyfile(xrt.demo_model_path(), model)
    shared = xrt.tune(model, CPU, inputs="random", spec=spec(model="shared"))
    assert shared.verdict in ("winner", "tied", "undecided")


@pytest.mark.parametrize("found", [None, "another", "a folder"])
def test_files_that_a_node_has_not(tmp_path: Path, found: str | None) -> None:
    path = tmp_path / "model.onnx"
    if found == "a folder":
        path.mkdir()
    elif found is not None:
        path.write_text(found)
    words = "is another file there" if found == "another" else "cannot be read there: "
    with pytest.raises(InputError, match=rf"model\.onnx {words}.*Fix: state ray\.model: store"):
        NodeExecutor().receive(
            [FileSent(name=str(path), sha256="0" * 64)],
            Constraints(),
            TrialDevice(name="node", device="cpu", hardware={}),
        )


@needs_ray
def test_a_file_that_a_node_has_not_names_the_node(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add()
    path = tmp_path / "model.onnx"
    path.write_text("model")
    with RayCluster(RayPlacement(resources={"num_cpus": 1, "trial": 1}), cuda=False) as cluster:
        shipped = cluster.put_files({str(path): path}, [str(path)])
        path.unlink()
        with pytest.raises(InputError, match=r"^on the node [\d.]+/[0-9a-f]{8}: .*model\.onnx cannot be read there: "):
            cluster.executors(lambda _: pytest.fail("no job is made"), Constraints(), "cpu", shipped)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineUnavailable, match=r"Ray is not installed\. Fix: `pip install .*ray"):
        xrt.tune(xrt.demo_model_path(), CPU, inputs="random", ray="auto")


@needs_ray
@pytest.mark.parametrize("address", ["auto", "127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999", "head"])
def test_no_cluster_at_the_address(address: str) -> None:
    with pytest.raises(UnsupportedOperationError, match=rf"there is no cluster at '{address}'.*ray start"):
        xrt.tune(xrt.demo_model_path(), CPU, inputs="random", ray=address)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ray: {resources: {num_gpus: 0.5}}", r"resources\.num_gpus: a trial has whole ones"),
        ("ray: {resources: {CPU: 2}}", r"'CPU' is Ray's own. Fix: write num_cpus"),
        ("ray: {resources: {memory: 1}}", r"'memory' cannot be a custom resource"),
        ("ray: {adress: auto}", r"did you mean 'address'\?"),
        ("{ray: {}, isolation: none}", r"isolation: contradicts ray"),
    ],
)
def test_bad_placements_are_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message) as error:
        TuneSpec.loads(text)
    assert str(error.value).startswith("tune:1:")


def test_a_placement_is_written_back() -> None:
    placed = TuneSpec.loads("ray: {address: 'head:6379', resources: {num_cpus: 4, big: 0.5}, trials: 3}")
    assert placed.ray is not None
    assert dict(placed.ray.resources) == {"big": 0.5, "num_cpus": 4}
    assert TuneSpec.coerce(json.loads(json.dumps(placed.to_dict()))) == placed
