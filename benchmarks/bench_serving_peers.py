# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Servers of other projects beside ours: the same models on the same ONNX Runtime, on one core, with the same load.

    pip install mlcommons-loadgen==6.0.17
    python benchmarks/bench_serving_peers.py --prepare ~/peers
    python benchmarks/bench_serving_peers.py ~/peers

Each server has a virtual environment of its own in that folder, and the request format that suits it best. A tiny
model without batches shows what a server adds; a wide one, in batches of up to 16 rows where the server has any, what
those gain. Clients are on another core than the server: 1, 16 and 256 of them in a closed loop, and one rate for all
servers in an open one, which is MLPerf LoadGen's. Each answer is compared with the right one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

import xpuruntime as xrt
from harness import write
from loadgen_client import loadgen_module, server_scenario
from serving_load import Requests, ask, closed_loop
from xpuruntime.serving.messages import InferRequest, InferTensor
from xpuruntime.serving.protocol.rest import write_request
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent / "serving_peers"
WIDTH, ROWS, BATCH, WAIT_MS = 64, 64, 16, 1.0
CLIENTS = (1, 16, 256)
#: Requests a second of the open loop, by case.
RATES = {"alone": 400.0, "batched": 200.0}
_START = 90.0
#: Pins a process to a core, and then becomes the command.
_PINNED = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); os.execvp(sys.argv[2], sys.argv[2:])"
)


def oip_binary(x: np.ndarray) -> tuple[bytes, dict[str, Any]]:
    body, length = write_request(InferRequest("m", [InferTensor("x", "FP32", x.shape, x)]), binary=True)
    return body, {"Inference-Header-Content-Length": length, "Content-Type": "application/octet-stream"}


def oip_json(x: np.ndarray) -> tuple[bytes, dict[str, Any]]:
    return write_request(InferRequest("m", [InferTensor("x", "FP32", x.shape, x)]))[0], {
        "Content-Type": "application/json"
    }


def raw(x: np.ndarray) -> tuple[bytes, dict[str, Any]]:
    return x.tobytes(), {"Content-Type": "application/octet-stream"}


def plain_json(x: np.ndarray) -> tuple[bytes, dict[str, Any]]:
    return json.dumps({"x": x.tolist()}).encode(), {"Content-Type": "application/json"}


def read_oip(head: bytes, body: bytes) -> np.ndarray:
    stated = head.partition(b"inference-header-content-length: ")[2].partition(b"\r\n")[0]
    length = int(stated) if stated else len(body)
    (output,) = json.loads(body[:length])["outputs"]
    return np.array(output["data"], np.float32) if "data" in output else np.frombuffer(body[length:], np.float32)


def read_raw(head: bytes, body: bytes) -> np.ndarray:
    del head
    return np.frombuffer(body, np.float32)


def read_json(head: bytes, body: bytes) -> np.ndarray:
    del head
    return np.array(json.loads(body), np.float32)


class Peer(NamedTuple):
    """A server: what its environment needs, how it is asked, and whether it has batches of its own."""

    environment: str
    packages: tuple[str, ...]
    script: str
    path: str
    form: str
    write: Callable[[np.ndarray], tuple[bytes, dict[str, Any]]]
    read: Callable[[bytes, bytes], np.ndarray]
    batches: bool = True


OIP = "/v2/models/m/infer"
PEERS = {
    "xpuruntime": Peer("", (), "ours.py", OIP, "binary", oip_binary, read_oip),
    "xpuruntime, JSON": Peer("", (), "ours.py", OIP, "JSON", oip_json, read_oip),
    "FastAPI": Peer(
        "fastapi", ("fastapi==0.163.2", "uvicorn==0.54.0", "uvloop", "httptools"), "fastapi_server.py", "/infer",
        "raw bytes", raw, read_raw, False,
    ),
    "LitServe": Peer(
        "litserve", ("litserve==0.2.19",), "litserve_server.py", "/predict", "JSON", plain_json, read_json
    ),
    "BentoML": Peer("bentoml", ("bentoml==1.4.40",), "bentoml_service.py", "/infer", "JSON", plain_json, read_json),
    "MLServer": Peer("mlserver", ("mlserver==1.7.1",), "mlserver_model.py", OIP, "JSON", oip_json, read_oip),
    "KServe": Peer("kserve", ("kserve==0.21.0",), "kserve_server.py", OIP, "binary", oip_binary, read_oip, False),
    "Ray Serve": Peer("ray", ("ray[serve]==2.60.0",), "ray_server.py", "/", "raw bytes", raw, read_raw),
}  # fmt: skip


def requests_of(peer: Peer, x: np.ndarray, expected: np.ndarray) -> Requests:
    """Return a request for each row, to a port that is free."""
    requests = Requests(free_port(), [], expected, peer.read)
    for at in range(len(x)):
        body, headers = peer.write(x[at : at + 1])
        lines = [f"POST {peer.path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}"]
        lines += [f"{key}: {value}" for key, value in headers.items()]
        requests.sent.append("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    return requests


def python_of(folder: Path, peer: Peer) -> Path:
    return folder / peer.environment / "bin" / "python" if peer.environment else Path(sys.executable)


def engine_version() -> str:
    for name in ("onnxruntime", "onnxruntime-gpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    raise SystemExit("this takes ONNX Runtime. Fix: pip install onnxruntime")


def prepare(folder: Path) -> None:
    """Make the environments; why one cannot be installed is kept for the results."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, peer in PEERS.items():
        if not peer.environment:
            continue
        python, failed = python_of(folder, peer), folder / f"{peer.environment}.failed"
        failed.unlink(missing_ok=True)
        print(f"== {name}", flush=True)
        if not python.is_file():
            subprocess.run([sys.executable, "-m", "venv", str(folder / peer.environment)], check=True)
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "-q",
            *peer.packages,
            f"onnxruntime=={engine_version()}",
            "numpy",
        ]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            failed.write_text(lines[-1] if lines else f"pip ended with {done.returncode}")
            print(failed.read_text())


def versions(folder: Path, peer: Peer) -> dict[str, str]:
    names = [package.partition("==")[0].partition("[")[0] for package in peer.packages] or ["xpuruntime", "uvicorn"]
    ask_for = (
        "import importlib.metadata as m, json, sys\n"
        "f = {}\n"
        "for n in sys.argv[1:]:\n"
        "    try: f[n] = m.version(n)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(f))"
    )
    engines = ("onnxruntime",) if peer.environment else ("onnxruntime", "onnxruntime-gpu")
    command = [str(python_of(folder, peer)), "-c", ask_for, *names, *engines, "numpy"]
    found: dict[str, str] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return found


def wide_model() -> Any:
    """Return a model of 64 inputs and outputs with 2048 x 2048 weights between: rows share what reading them costs."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    sizes = (WIDTH, 2048, 2048, WIDTH)
    weights = [
        numpy_helper.from_array((rng.standard_normal(s) / np.sqrt(s[0])).astype(np.float32), f"w{at}")
        for at, s in enumerate(itertools.pairwise(sizes))
    ]
    nodes, last = [], "x"
    for at in range(3):
        nodes.append(helper.make_node("MatMul", [last, f"w{at}"], [f"h{at}" if at < 2 else "y"]))
        if at < 2:
            nodes.append(helper.make_node("Relu", [f"h{at}"], [f"r{at}"]))
            last = f"r{at}"
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "wide", tensors[:1], tensors[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def command_of(name: str, peer: Peer, folder: Path, model: Path, port: int, batch: int) -> tuple[list[str], dict]:
    """Return the command of a server, and variables of its environment."""
    python, work = python_of(folder, peer), model.parent / name.replace(" ", "_")
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "MODEL": str(model), "BATCH": str(batch)}
    if not peer.environment:
        variables["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    if name == "BentoML":
        variables["BENTOML_HOME"] = str(work)
        where = ["--working-dir", str(HERE), "--host", "127.0.0.1", "--port", str(port)]
        return [str(python), "-m", "bentoml", "serve", "bentoml_service:Served", *where], variables
    if name == "MLServer":
        work.mkdir(exist_ok=True)
        ports = {"http_port": port, "grpc_port": free_port(), "metrics_port": free_port()}
        server = {"host": "127.0.0.1", "parallel_workers": 0, "debug": False, "metrics_endpoint": None, **ports}
        batching = {"max_batch_size": batch, "max_batch_time": WAIT_MS / 1000} if batch else {}
        own = {"name": "m", "implementation": "mlserver_model.Served", **batching}
        own["parameters"] = {"extra": {"path": str(model)}}
        (work / "settings.json").write_text(json.dumps(server))
        (work / "model-settings.json").write_text(json.dumps(own))
        return [str(python.parent / "mlserver"), "start", str(work)], variables
    return [str(python), str(HERE / peer.script), str(model), str(port), str(batch), str(WAIT_MS)], variables


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def served(
    command: list[str], variables: dict[str, str], requests: Requests, cores: int | str, log: Path
) -> Iterator[int]:
    """Start a server on cores, such as 1 or "0,1"; yield its process once it answers rightly, and end all of them."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _PINNED, str(cores), *command],
            env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent,
        )  # fmt: skip
    try:
        end = time.monotonic() + _START
        while True:
            if process.poll() is not None or time.monotonic() > end:
                lines = log.read_text(errors="replace").splitlines() or ["it did not answer"]
                raise RuntimeError(f"it did not start: {lines[-1][:200]}")
            with contextlib.suppress(OSError, ValueError, KeyError):
                if ask(requests):
                    break
            time.sleep(0.3)
        yield process.pid
    finally:
        own = tree(process.pid)
        process.terminate()
        _, left = psutil.wait_procs(own, 20)
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def tree(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        one = psutil.Process(pid)
        return [one, *one.children(recursive=True)]
    return []


def cpu_seconds(pid: int) -> float:
    total = 0.0
    for one in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def measure(requests: Requests, pid: int, case: str, seconds: float) -> list[dict[str, Any]]:
    """Return what each load gave."""
    closed_loop(requests, 16, seconds / 3)  # settle
    loads: dict[str, Callable[[], Any]] = {
        f"{clients} client{'s' * (clients > 1)}": lambda clients=clients: closed_loop(requests, clients, seconds)  # type: ignore[misc]
        for clients in CLIENTS
    }
    loads[f"{RATES[case]:.0f} a second"] = lambda: server_scenario(requests, RATES[case], 1.5 * seconds)
    found = []
    for name, run in loads.items():
        theirs, own, start = cpu_seconds(pid), time.process_time(), time.perf_counter()
        load = run()
        took = time.perf_counter() - start
        one = {"load": name, "generator": "`serving_load.py`", **load.to_plain()}
        theirs = cpu_seconds(pid) - theirs
        one["server_busy"] = theirs / took
        one["server_cpu_us"] = theirs * 1e6 / max(one["answered"], 1)
        one.setdefault("client_busy", (time.process_time() - own) / took)
        found.append(one)
        print(
            f"    {name:<14} {one.get('per_second', 0):8.0f} a second   p50 {one.get('p50_ms', 0):8.2f} ms   "
            f"p99 {one.get('p99_ms', 0):8.2f} ms   lost {one['lost']}   wrong {one['wrong']}   "
            f"server {one['server_busy']:.0%}, {one['server_cpu_us']:.0f} us each, client {one['client_busy']:.0%}",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the virtual environments")
    parser.add_argument("--prepare", action="store_true", help="make the virtual environments, and measure nothing")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each closed loop")
    parser.add_argument("--only", nargs="+", choices=sorted(PEERS), default=list(PEERS))
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.prepare:
        prepare(folder)
        return
    loadgen_module()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("this takes two cores: one for the server, one for its clients")
    os.sched_setaffinity(0, {cores[1]})
    load_before = os.getloadavg()[0]
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    peers: dict[str, Any] = {}
    cases: dict[str, Any] = {"alone": {}, "batched": {}}
    with tempfile.TemporaryDirectory() as made:
        for case, model, batch in (("alone", models.mlp(WIDTH), 0), ("batched", wide_model(), BATCH)):
            path = models.save(model, Path(made), f"{case}.onnx")
            with xrt.InferenceSession(str(path), policy={"execution": {"device": "cpu", "threads": 1}}) as session:
                expected = np.concatenate([session.run({"x": x[at : at + 1]})["y"] for at in range(ROWS)])
            for name in options.only:
                peer = PEERS[name]
                print(f"{case}: {name}", flush=True)
                failed = folder / f"{peer.environment}.failed"
                try:
                    if peer.environment and failed.is_file():
                        raise RuntimeError(f"not installed: {failed.read_text()}")
                    peers[name] = {
                        "format": peer.form, "batches": peer.batches, "versions": versions(folder, peer)
                    }  # fmt: skip
                    requests = requests_of(peer, x, expected)
                    rows = batch if peer.batches else 0
                    command, variables = command_of(name, peer, folder, path, requests.port, rows)
                    log = Path(made) / f"{case}_{name.replace(' ', '_')}.log"
                    with served(command, variables, requests, cores[0], log) as pid:
                        cases[case][name] = {"loads": measure(requests, pid, case, options.seconds)}
                except (OSError, RuntimeError) as error:
                    cases[case][name] = {"problem": str(error)}
                    print(f"    {error}", flush=True)
    body = {
        "peers": peers, "cases": cases, "seconds": options.seconds, "rates": RATES,
        "batching": {"max_batch_size": BATCH, "wait_ms": WAIT_MS}, "load_average": [load_before, os.getloadavg()[0]],
    }  # fmt: skip
    write("serving_peers_cpu", body, options.out)


if __name__ == "__main__":
    main()
