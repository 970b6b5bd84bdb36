# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The client under MLPerf LoadGen: what it reads of its logs, and each request of a run against a small server."""

from __future__ import annotations

import importlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
ROWS = 8
LOCK = threading.Lock()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("loadgen_client")


@pytest.fixture
def load(client: Any) -> Any:
    return importlib.import_module("serving_load")


def entry(key: str, value: Any, *, error: bool = False) -> str:
    return ":::MLLOG " + json.dumps({"key": key, "value": value, "metadata": {"is_error": error, "line_no": 1}})


def sample(at: int, due: float, delay: int, latency: int) -> str:
    made = {"sample_seq": at, "query_seq": at, "sample_idx": 3, "issue_start_ns": delay, "complete_ns": latency}
    begin = {"name": "Sample", "cat": "default", "ph": "b", "pid": 1, "id": at, "ts": due, "args": made}
    end = {"name": "Sample", "cat": "default", "ph": "e", "pid": 1, "id": at, "ts": due + latency / 1e3}
    return f"{json.dumps(begin, separators=(',', ':'))},\n{json.dumps(end, separators=(',', ':'))},"


LOG = "\n".join([
    "a line of something else", entry("loadgen_version", "6.0.17 @ d6147c7eb7"), entry("effective_scenario", "Server"),
    entry("result_validity", "VALID"), entry("result_completed_samples_per_sec", 100.0),
    entry("result_50.00_percentile_latency_ns", 8_000_000), entry("result_99.00_percentile_latency_ns", 8_000_000),
])  # fmt: skip
TRACE = "\n".join([
    '{"traceEvents":[', '{"name":"LogDetail","ph":"X","ts":1.0,"args":{"key":""loadgen_version""}},',
    sample(1, 2000.0, 500_000, 2_000_000), sample(0, 1000.0, 200, 8_000_000),
])  # fmt: skip


def test_logs_of_loadgen_are_read_and_counted(client, load):
    samples = client.read_samples(TRACE)
    assert samples == [client.Sample(0.001, 2e-7, 8e-3), client.Sample(0.002, 5e-4, 2e-3)]
    ok, head = np.float32([1.0]).tobytes(), b"http/1.1 200 ok"
    answers = [(0, head, ok), (1, head, ok), (0, b"http/1.1 500 no", b"")]
    requests = load.Requests(0, [b"", b""], np.float32([[1.0], [2.0]]), lambda _, body: np.frombuffer(body, np.float32))
    log = client.read_detail(LOG)
    found = client.Outcome(log, samples, [8e-3, 1.4e-3, 1e-3, 1e-3], answers, requests, 0.25)
    assert (found.lost, found.wrong, found.per_second) == (2, 1, 25.0)
    found = client.Outcome(log, samples, [7.6e-3, 1.4e-3], answers[:1] * 2, requests, 0.25).to_plain()
    assert (found["generator"], found["p50_ms"], found["p99_ms"], found["valid"]) == ("LoadGen 6.0.17", 8.0, 8.0, True)
    assert found["recorded_p99_ms"] == pytest.approx(7.6, rel=1e-3)
    assert found["issued_late_p99_ms"] == pytest.approx(0.5)
    row = {"max_batch_size": 8, "max_queue_delay_us": 0, "batch_ms": 4.0, "batch_ms_after": 4.0, "peak_per_second": 9.0,
           "requests": 2, "p99_to_batch": 2.0, "ideal_p99_to_batch": 1.5, "server_busy": 0.9, **found}  # fmt: skip
    environment = {"processor": "Some", "cores": 2, "architecture": "x86_64", "system": "Linux", "python": "3.12.1",
                   "cuda": [], "packages": {}}  # fmt: skip
    record = {"rows": [row], "load": 0.7, "target": 2.2, "seconds": 1.0, "method": "So it was.", "note": "",
              "load_average": [0.0, 0.0], "environment": environment}  # fmt: skip
    text = importlib.import_module("report_serving").batches(record).text
    assert "differ from them by at most 5.0% (p50) and 5.0% (p99)" in text
    assert "issued requests at most 0.500 ms late" in text
    assert "| 8.00 | 2.00 | 1.50 | 90% | 25% |" in text
    with pytest.raises(RuntimeError, match="LoadGen: it ran out of queries"):
        client.read_detail(entry("error_runtime", "it ran out of queries", error=True))


def answer(connection: socket.socket, seen: list[int]) -> None:
    """Answer with the number of a request; of 50, one is an error, one wrong, and for one the connection is closed."""
    with connection, connection.makefile("rwb") as stream:
        while stream.readline():
            while (line := stream.readline()) != b"\r\n":
                assert line
            number = int.from_bytes(stream.read(4), "little")
            with LOCK:
                seen.append(number)
                what = len(seen) % 50
            if what == 22:
                return
            body = np.float32([number + (what == 21)]).tobytes()
            status = b"500 No" if what == 20 else b"200 OK"
            stream.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
            stream.flush()


@pytest.fixture
def requests(load: Any) -> Iterator[tuple[Any, list[int]]]:
    """Requests to a small server, and what it received."""
    seen: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection, seen), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        sent = [b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\n" + at.to_bytes(4, "little") for at in range(ROWS)]
        expected = np.arange(ROWS, dtype=np.float32)[:, None]
        read = lambda _, body: np.frombuffer(body, np.float32)  # noqa: E731
        yield load.Requests(listener.getsockname()[1], sent, expected, read), seen
        listener.shutdown(socket.SHUT_RDWR)


def test_each_request_of_loadgen_has_one_answer_or_is_lost(client, requests):
    pytest.importorskip("mlperf_loadgen", reason="requires mlcommons-loadgen, the group `benchmarks`")
    made, seen = requests
    scenario = client.server_scenario(made, 400.0, 0.5, connections=4, seed=7)
    count = len(scenario.own)
    assert 100 < count == len(scenario.samples) == len(scenario.answers) == len(seen)
    assert scenario.wrong == sum(at % 50 == 21 for at in range(1, count + 1))
    assert scenario.lost == sum(at % 50 in (20, 22) for at in range(1, count + 1))
    plain = scenario.to_plain()
    ordered = sorted(measured.latency for measured in scenario.samples)
    assert plain["p99_ms"] == pytest.approx(1e3 * ordered[int(0.99 * count)])
    assert abs(plain["recorded_p50_ms"] - plain["p50_ms"]) < 5.0
    seen.clear()
    scenario = client.offline_scenario(made, 1000.0, 0.1, connections=4)
    assert len(scenario.own) == len(seen) == 110
    assert scenario.to_plain()["per_second"] > 0
    assert (scenario.lost, scenario.wrong) == (4, 2)


def test_a_server_that_is_gone_ends_the_run(client, load):
    pytest.importorskip("mlperf_loadgen", reason="requires mlcommons-loadgen, the group `benchmarks`")
    listener = socket.create_server(("127.0.0.1", 0))
    sent = [b"GET / HTTP/1.1\r\n\r\n"]
    made = load.Requests(listener.getsockname()[1], sent, np.zeros((1, 1)), lambda *_: np.zeros(1))

    def leave() -> None:
        connections = [listener.accept()[0] for _ in range(2)]
        connections[0].recv(100)
        listener.close()
        for connection in connections:
            connection.close()

    threading.Thread(target=leave, daemon=True).start()
    with pytest.raises(RuntimeError, match="the server was gone in the middle of a run"):
        client.server_scenario(made, 200.0, 0.2, connections=2)
