# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Load over HTTP: requests in a closed loop from several client processes, with all latencies and the answers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from bench_serving import Connection, output_of

CLIENTS = 4


def load(
    address: str, requests: list[bytes], folder: Path, *, concurrency: int, seconds: float
) -> tuple[list[float], list[tuple[int, np.ndarray]]]:
    """Return the seconds that each answered request took, and answers by the index of their request.

    Parameters
    ----------
    address : str
    requests : list of bytes
        Whole HTTP requests, which the clients send in turns.
    folder : Path
        For files that the clients read.
    concurrency : int
        Connections of all clients, with one request at a time on each.
    seconds : float
    """
    folder.mkdir(exist_ok=True)
    for index, request in enumerate(requests):
        (folder / f"{index:04}").write_bytes(request)
    count = min(CLIENTS, concurrency)
    command = [sys.executable, __file__, address, str(folder), str(concurrency // count), str(seconds)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    found = [json.loads(process.communicate(timeout=seconds + 120)[0]) for process in processes]
    taken = [one for client in found for one in client["taken"]]
    answers = [(int(at), np.array(one, np.float32)) for client in found for at, one in client["answers"].items()]
    return taken, answers


def _client(address: str, folder: Path, connections: int, seconds: float) -> None:
    requests = [one.read_bytes() for one in sorted(folder.iterdir())]
    taken: list[float] = []
    answers: dict[int, list[float]] = {}
    stop = time.perf_counter() + seconds

    def work(at: int) -> None:
        connection = Connection(address, b"")
        while time.perf_counter() < stop:
            connection.request = requests[at]
            began = time.perf_counter()
            answer = connection.ask()
            taken.append(time.perf_counter() - began)
            assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]
            if at not in answers:
                answers[at] = output_of(answer).reshape(-1).tolist()
            at = (at + connections) % len(requests)
        connection.socket.close()

    workers = [threading.Thread(target=work, args=(place,)) for place in range(connections)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(json.dumps({"taken": taken, "answers": answers}))


if __name__ == "__main__":
    _client(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
