# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ray clusters of several nodes of this machine, one of which dies in the middle; skipped where there is no Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.demo import demo_images, demo_model_path
from xpuruntime.serving.ray import Predictor, deployment

ray = pytest.importorskip("ray", reason="pip install 'ray[serve,data]'")
for part in ("ray.serve", "ray.data"):
    pytest.importorskip(part, reason="pip install 'ray[serve,data]'", exc_type=ImportError)
CPU = {"execution": {"engine": "onnxruntime", "device": "cpu"}}
IMAGES = demo_images()[0]
#: Ray's own use of other packages warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.timeout(600),
]
WAIT = 120.0


class Nodes:
    """A cluster of a head that runs no work and of nodes with room for one replica or actor each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        ray.init(address=self.cluster.address, log_to_driver=False)

    def add(self, **more: Any) -> Any:
        node = self.cluster.add_node(num_cpus=1, resources={"room": 1}, **more)
        self.cluster.wait_for_nodes()
        return node

    def kill(self, node: Any) -> None:
        """Kill all processes of a node at once, as a machine does that fails."""
        raylet = node.all_processes["raylet"][0].process.pid
        workers = [int(one) for one in Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()]
        self.cluster.remove_node(node, allow_graceful=False)
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    yield found
    found.close()


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    with xrt.InferenceSession(demo_model_path(), policy=CPU) as session:
        return np.concatenate([np.asarray(session.run({"image": image[None]})["logits"]) for image in IMAGES[:64]])


def test_a_batch_job_loses_no_row_with_a_node(nodes: Nodes, expected: np.ndarray) -> None:
    kept, lost = nodes.add(), nodes.add()

    class SlowPredictor(Predictor):  # of this function, so that Ray sends its code
        def __call__(self, batch: Any) -> dict[str, Any]:
            time.sleep(0.1)
            found = super().__call__(batch)
            return {**found, "node": np.full(len(batch["id"]), ray.get_runtime_context().get_node_id())}

    rows = [{"id": index, "image": IMAGES[index]} for index in range(64)]
    batches = ray.data.from_items(rows, override_num_blocks=32).map_batches(
        SlowPredictor,
        fn_constructor_kwargs={"model": str(demo_model_path()), "policy": CPU, "keep": ["id"]},
        compute=ray.data.ActorPoolStrategy(size=2),
        batch_size=2,
        batch_format="numpy",
        num_cpus=0.5,
        resources={"room": 1},
    )
    found: list[dict[str, Any]] = []
    for row in batches.iter_rows():
        found.append(row)
        if lost is not None and row["node"] == lost.node_id:  # both work
            nodes.kill(lost)
            lost = None
    assert lost is None
    assert sorted(row["id"] for row in found) == list(range(64))
    for row in found:
        np.testing.assert_allclose(row["logits"], expected[row["id"]], rtol=1e-4, atol=1e-5)
    nodes.kill(kept)


class Clients:
    """Threads that ask one image after the other, and keep each answer with its image, and the times of failures."""

    def __init__(self, port: int, count: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v2/models/digits/infer"
        self.answers: list[tuple[int, list[float]]] = []
        self.failures: list[float] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(at,)) for at in range(count)]

    def _ask(self, at: int) -> None:
        while not self._stop.is_set():
            at = (at + 1) % 64
            tensor = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": IMAGES[at].ravel().tolist()}
            try:
                with urllib.request.urlopen(self.url, json.dumps({"inputs": [tensor]}).encode(), timeout=WAIT) as sent:
                    self.answers.append((at, json.load(sent)["outputs"][0]["data"]))
            except OSError:
                self.failures.append(time.monotonic())

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def eventually(condition: Any) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_replicas_go_on_when_a_node_dies(nodes: Nodes, expected: np.ndarray) -> None:
    from ray import serve

    first, second = nodes.add(), nodes.add()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    made = deployment(
        demo_model_path(),
        batching={"max_batch_size": 8},
        num_replicas=2,
        health_check_period_s=1,
        ray_actor_options={"num_cpus": 0.5, "resources": {"room": 1}},
    )
    serve.run(made.bind(), route_prefix="/", name="digits")

    def running() -> int:
        return serve.status().applications["digits"].deployments["digits"].replica_states.get("RUNNING", 0)

    eventually(lambda: running() == 2)
    with Clients(port, 4) as clients:
        eventually(lambda: len(clients.answers) > 40)
        nodes.kill(second)
        killed, before = time.monotonic(), len(clients.answers)
        eventually(lambda: len(clients.answers) > before + 100)  # by the replica that is left
        nodes.add()
        eventually(lambda: running() == 2)
        replaced, before = time.monotonic(), len(clients.answers)
        eventually(lambda: len(clients.answers) > before + 100)
    for at, logits in clients.answers:
        np.testing.assert_allclose(logits, expected[at], rtol=1e-4, atol=1e-5)
    assert all(killed - 1 <= when <= replaced for when in clients.failures)
    assert len(clients.failures) < 40, "more than the requests that the node had"
    serve.shutdown()
    nodes.kill(first)


def test_a_node_on_which_the_lock_does_not_hold_is_named(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray tries again there; the replica of the other node is running."""
    from ray import serve

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it in its processes
    path = tmp_path / "digits.lock"
    xrt.lock(demo_model_path(), CPU, path)
    here, other = nodes.add(), nodes.add(env_vars={"ORT_LOAD_CONFIG_FROM_MODEL": "0"})
    options = {"num_cpus": 0.5, "resources": {"room": 1}}
    made = deployment(demo_model_path(), lock=path, num_replicas=2, ray_actor_options=options).bind()

    def wait_for_both() -> None:
        with contextlib.suppress(Exception):  # it ends with the application
            serve.run(made, route_prefix="/", name="locked")

    waiting = threading.Thread(target=wait_for_both, daemon=True)
    waiting.start()

    def deployed() -> Any:
        found = serve.status().applications.get("locked")
        return None if found is None else found.deployments.get("digits")

    eventually(lambda: deployed() and "ORT_LOAD_CONFIG_FROM_MODEL" in deployed().message)
    assert f"/{other.node_id[:8]}: " in deployed().message
    eventually(lambda: deployed().replica_states.get("RUNNING") == 1)
    serve.delete("locked")
    serve.shutdown()
    waiting.join(WAIT)
    nodes.kill(other)
    nodes.kill(here)
