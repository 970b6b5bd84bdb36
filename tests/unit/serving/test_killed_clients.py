# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Clients that are killed and models that are reloaded while others ask: each of these gets its own answers, once."""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
from typing import TYPE_CHECKING

import numpy as np
from serving_clients import kill_a_client, until
from serving_models import WAIT

import xpuruntime as xrt
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

#: A few; `make test-killed-clients` has 50 and 20.
KILLS = int(os.environ.get("XPURUNTIME_CLIENT_KILLS", "3"))
RELOADS = int(os.environ.get("XPURUNTIME_SERVE_RELOADS", "2"))
ROWS = np.random.default_rng(0).standard_normal((8, 1, 64)).astype(np.float32)


def body_of(row: int, id: str) -> bytes:
    tensor = {"name": "x", "shape": [1, 64], "datatype": "FP32", "data": ROWS[row].ravel().tolist()}
    return json.dumps({"id": id, "inputs": [tensor]}).encode()


class Asking:
    """A thread that asks one row after the other over one connection, and keeps its answers or what went wrong."""

    def __init__(self, port: int, seed: int) -> None:
        self.answers: list[tuple[int, list[float]]] = []
        self.error: Exception | None = None
        self._port, self._draw, self._stop = port, random.Random(seed), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT)
        try:
            while not self._stop.is_set():
                row, id = self._draw.randrange(len(ROWS)), str(len(self.answers))
                connection.request("POST", "/v2/models/m/infer", body_of(row, id))
                response = connection.getresponse()
                document = json.loads(response.read())
                assert (response.status, document.get("id")) == (200, id), document
                self.answers.append((row, document["outputs"][0]["data"]))
        except Exception as error:  # which the test raises
            self.error = error
        finally:
            connection.close()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT)


def test_nothing_is_lost_where_clients_are_killed_and_models_are_reloaded(tmp_path: Path) -> None:
    draw, body = random.Random(7), body_of(0, "killed")
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    paths = [models.save(models.mlp(seed=seed), tmp_path, f"{seed}.onnx") for seed in range(RELOADS + 1)]
    expected = []
    for path in paths:
        with xrt.InferenceSession(path) as session:
            (name,) = (output.name for output in session.outputs)
            expected.append([np.asarray(session.run({"x": row})[name]).ravel() for row in ROWS])
    served = tmp_path / "m.onnx"
    served.write_bytes(paths[0].read_bytes())
    model = {"source": str(served), "batching": {"max_batch_size": 8}}
    settings = ServeSettings.coerce({"schema": "xpuruntime.serve/1", "models": {"m": model}})
    events = ["kill"] * KILLS + ["reload"] * RELOADS
    draw.shuffle(events)
    with Models(settings) as service, xrt.serving.Server(service, http="127.0.0.1:0") as server:
        port = int(server.url.rpartition(":")[2])
        clients = [Asking(port, seed) for seed in range(4)]
        try:
            version = 0
            for event in events:
                if event == "kill":
                    kill_a_client(port, head + body, draw.uniform(0, 0.05))
                    continue
                version += 1
                new = tmp_path / "new.onnx"
                new.write_bytes(paths[version].read_bytes())
                new.replace(served)
                service.load("m", {})
            counts = [len(client.answers) for client in clients]
            assert until(lambda: all(len(client.answers) > n + 2 for client, n in zip(clients, counts, strict=True)))
        finally:
            for client in clients:
                client.stop()
        assert [client.error for client in clients] == [None] * len(clients)
        assert until(lambda: server._gate.active == 0)  # nothing of the killed is left
    for client in clients:
        at = 0
        for row, found in client.answers:  # of the same version as the one before, or of a later one
            while not np.allclose(found, expected[at][row], rtol=1e-4, atol=1e-5):
                at += 1
                assert at <= RELOADS, "an answer of no version, or of one that was replaced"
        assert at == RELOADS
    print(f"{sum(len(client.answers) for client in clients)} answers, {KILLS} killed clients, {RELOADS} reloads")
