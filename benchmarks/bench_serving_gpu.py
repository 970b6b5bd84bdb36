# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Served throughput of ResNet-50 and an encoder on CUDA, beside what a raw session of ONNX Runtime reaches.

    python benchmarks/bench_serving_gpu.py --out results
    python benchmarks/bench_serving_gpu.py --device cpu --small --seconds 1
    python benchmarks/bench_serving_gpu.py --devices cuda:0,cuda:1 --models resnet
    python benchmarks/bench_serving_gpu.py --devices cuda:0,cuda:1 --engine torch --graph off --concurrency 64 256

With `--devices` the models are served on the first of them, the first two, and so on, with one session each, and
nothing else is measured: the rate of requests of this process, which device has run how many rows, and what the
evidence of each session says. `--engine torch` does so with an exported program of an encoder of BERT's form.

Raw is the best of all batch sizes, each run by one thread and by two: `run` on NumPy arrays. On CUDA the replayed graph
of a session on arrays that stay on the device is timed, too. The best `run` is timed again before and after the served
requests, for as long as those, and their share is of the mean of both. So is the best `run` with no more rows at a time
than there are requests, for each number of them: two threads with 64 rows each have 128. Served are requests of one
row, so many at a time: handed to the models by a thread of this process, as those of a server do it (from the main
thread, which signals reach, they go by way of another one), and over HTTP with binary tensors from client processes.
Answers are compared with those of the raw session when all have come. At the end two models share one memory budget,
with room for both, and for one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

with contextlib.suppress(ImportError):  # its CUDA libraries are those that ONNX Runtime finds
    import torch

import onnxruntime as ort

import xpuruntime as xrt
from harness import rate, write
from http_load import load
from onnx_models import encoder, resnet, rows_of
from xpuruntime.serving.messages import InferRequest, InferTensor, ServingError
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.serving.protocol.rest import write_request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TARGET = 0.9
CONCURRENCY = (1, 16, 64)
KEPT = 256


class Case:
    """A model file, its requests, and the right answers."""

    def __init__(
        self, name: str, made: tuple[bytes, dict[str, tuple[int, ...]]], folder: Path, words: int, requests: int,
        suffix: str,
    ) -> None:  # fmt: skip
        data, rows = made
        self.name, self.path = name, str(folder / f"{name}{suffix}")
        Path(self.path).write_bytes(data)
        ((self.input, row),) = rows.items()
        self.rows = rows_of(self.input, row, requests, words)
        self.datatype = "INT64" if self.rows.dtype == np.int64 else "FP32"
        self.answers: np.ndarray[Any, Any] = np.empty(0)

    def request(self, index: int) -> InferRequest:
        row = self.rows[index : index + 1]
        return InferRequest(self.name, [InferTensor(self.input, self.datatype, row.shape, row)])

    def check(self, index: int, found: np.ndarray) -> None:
        want = self.answers[index]
        worst = float(np.abs(found.reshape(-1) - want).max() / want.std())
        assert worst < 0.02, f"{self.name}, request {index}: differs by {worst:.4f} of the answers' deviation"


def provider(device: str, **options: str) -> list[Any]:
    return ["CPUExecutionProvider"] if device == "cpu" else [("CUDAExecutionProvider", options)]


def program(*, small: bool) -> tuple[bytes, dict[str, tuple[int, ...]]]:
    """Return an exported program of BERT's form, `tokens` int64 [N, length] to [N, length, 2], and a row's shape."""
    from training_models import BERT, Encoder, Size

    size, length = (Size(2, 256, 4, 100, 16), 16) if small else (BERT, 128)
    torch.manual_seed(0)
    model = Encoder(size)
    model.head = torch.nn.Linear(size.width, 2)
    rows = {"tokens": (torch.export.Dim("rows", max=64), torch.export.Dim.STATIC)}
    exported = torch.export.export(
        model.eval(), (torch.zeros(2, length, dtype=torch.int64),), dynamic_shapes=rows, strict=False
    )
    file = io.BytesIO()
    torch.export.save(exported, file)
    return file.getvalue(), {"tokens": (length,)}


def right_answers(case: Case, device: str) -> np.ndarray:
    """Return the answers of PyTorch, or of ONNX Runtime."""
    if case.path.endswith(".onnx"):
        return Raw(case, device).case.answers
    from torch.export.passes import move_to_device_pass

    module = move_to_device_pass(torch.export.load(case.path), device).module()
    with torch.no_grad():
        return np.concatenate([module(torch.from_numpy(row[None]).to(device)).cpu().numpy() for row in case.rows])


class Raw:
    """A session of ONNX Runtime alone, and the batch size and threads that it is fastest with."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self.session: Any = ort.InferenceSession(case.path, providers=provider(device))
        assert device == "cpu" or self.session.get_providers()[0] == "CUDAExecutionProvider"
        case.answers = np.concatenate([self.session.run(None, {case.input: row[None]})[0] for row in case.rows])
        self.best = (1, 1)
        self.peaks: list[float] = []
        #: The best with no more rows at a time than a number of requests, by that number.
        self.best_within: dict[int, tuple[int, int]] = {}
        self.peaks_within: dict[int, list[float]] = {}

    def rate(self, size: int, threads: int, seconds: float) -> float:
        feeds = {self.case.input: np.resize(self.case.rows, (size, *self.case.rows.shape[1:]))}
        for _ in range(3):
            self.session.run(None, feeds)
        return rate([lambda: self.session.run(None, feeds)] * threads, size, seconds)

    def rates(self, sizes: list[int], requests: Sequence[int], seconds: float) -> dict[str, float]:
        """Return rows a second by batch size and threads."""
        found = {(size, threads): self.rate(size, threads, seconds) for size in sizes for threads in (1, 2)}
        self.best = max(found, key=found.__getitem__)
        for many in requests:
            within = [one for one in found if one[0] * one[1] <= many]
            self.best_within[many] = max(within, key=found.__getitem__)
            self.peaks_within[many] = []
        return {f"{size} rows, {threads} threads": value for (size, threads), value in found.items()}

    def measure_peak(self, seconds: float) -> None:
        self.peaks.append(self.rate(*self.best, seconds))
        for many, best in self.best_within.items():
            self.peaks_within[many].append(self.rate(*best, seconds))


def graph_rates(case: Case, device: str, sizes: list[int], seconds: float) -> dict[str, float]:
    """Return rows a second of replayed graphs by batch size, on arrays that stay on the device."""
    if device == "cpu":
        return {}
    graphs = ort.InferenceSession(case.path, providers=provider(device, enable_cuda_graph="1"))
    return {
        str(size): rate([graph_run(case, graphs, number, size)], size, seconds) for number, size in enumerate(sizes, 1)
    }


def graph_run(case: Case, session: Any, number: int, size: int) -> Callable[[], Any]:
    """Return what replays the graph of a batch size."""
    given = np.resize(case.rows, (size, *case.rows.shape[1:]))
    binding, options = session.io_binding(), ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    binding.bind_ortvalue_input(case.input, ort.OrtValue.ortvalue_from_numpy(given, "cuda", 0))
    output = ort.OrtValue.ortvalue_from_shape_and_type([size, *case.answers.shape[1:]], np.float32, "cuda", 0)
    binding.bind_ortvalue_output(session.get_outputs()[0].name, output)
    for _ in range(3):
        session.run_with_iobinding(binding, options)
    return partial(session.run_with_iobinding, binding, options)


def settings_of(cases: list[Case], args: argparse.Namespace, policy: Path, **more: Any) -> ServeSettings:
    batching = {"max_batch_size": args.batch, "max_queue_delay_us": args.delay}
    shared = {"policy": str(policy), "batching": batching, "instances": args.instances, **more.pop("model", {})}
    models = {case.name: {"source": case.path, **shared} for case in cases}
    return ServeSettings.coerce({"schema": "xpuruntime.serve/1", "models": models, **more})


def summary(seconds: list[float], rows: float) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"rows_per_second": rows, "p50_ms": 1e3 * p50, "p99_ms": 1e3 * p99, "answers": len(seconds)}


def served_here(models: Models, case: Case, concurrency: int, seconds: float) -> dict[str, float]:
    """Return the rate and the latency of requests in this process, so many at a time."""
    taken: list[float] = []
    kept: list[tuple[int, Any]] = []
    waiting: deque[Any] = deque()
    number = 0

    def send() -> None:
        nonlocal number
        index, number = number % len(case.rows), number + 1
        began = time.perf_counter()
        future = models.infer(case.request(index))
        future.add_done_callback(lambda _: taken.append(time.perf_counter() - began))
        waiting.append((index, future))

    start = time.perf_counter()
    for _ in range(concurrency):
        send()
    while time.perf_counter() - start < seconds:
        index, future = waiting.popleft()
        answer = future.result(60)
        if len(kept) < KEPT:
            kept.append((index, answer.outputs[0].data))
        send()
    for index, future in waiting:
        kept.append((index, future.result(60).outputs[0].data))
    took = time.perf_counter() - start
    for index, data in kept:
        case.check(index, data)
    return summary(taken, len(taken) / took)


def served_http(address: str, case: Case, concurrency: int, seconds: float, folder: Path) -> dict[str, float]:
    """Return the rate and the latency of requests over HTTP."""
    requests = []
    for index in range(len(case.rows)):
        body, length = write_request(case.request(index), binary=True)
        head = f"POST /v2/models/{case.name}/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        requests.append(f"{head}Inference-Header-Content-Length: {length}\r\n\r\n".encode() + body)
    taken, answers = load(address, requests, folder / case.name, concurrency=concurrency, seconds=seconds)
    for index, answer in answers:
        case.check(index, answer)
    return summary(taken, len(taken) / seconds)


def shared_budget(cases: list[Case], args: argparse.Namespace, policy: Path) -> dict[str, Any]:
    """Serve both models under one budget: with room for both, and for the larger one alone."""
    args = argparse.Namespace(**{**vars(args), "batch": min(args.batch, 4), "instances": 1})  # loads are what is timed
    found: dict[str, Any] = {}
    for _ in range(2):  # the first time, the device's context and its kernels are counted, too
        with Models(settings_of(cases, args, policy, memory={"budget": {args.device: 1 << 50}})) as models:
            sizes = {one.name: models.slots[one.name].version().memory for one in cases}
    found["sizes"] = sizes
    small, large = sorted(size["bytes"] for size in sizes.values())
    for name, limit in (("both", 3 * (small + large)), ("one", large + small // 2)):
        budget = {"budget": {args.device: limit}}
        settings = settings_of(cases, args, policy, memory=budget, model={"load": "on_demand"})
        taken: list[float] = []
        refused = ""
        with Models(settings) as models:
            for number in range(6):
                case = cases[number % 2]
                began = time.perf_counter()
                try:
                    futures = [models.infer(case.request(index)) for index in range(16)]
                    answers = [future.result(240).outputs[0].data for future in futures]
                except ServingError as error:  # it took more than when it was measured
                    refused = str(error)
                    break
                taken.append(time.perf_counter() - began)
                for index, answer in enumerate(answers):
                    case.check(index, answer)
                assert sum(models.budget.used().values()) <= limit
            evictions = models.budget.evictions
        found[name] = {"limit": limit, "evictions": evictions, "seconds": taken, "refused": refused}
    return found


def by_devices(cases: list[Case], args: argparse.Namespace, policy: Path) -> dict[str, Any]:
    """Return rates on the first device, the first two, and so on, and the rows of each device."""
    devices, body = args.devices.split(","), {}
    for case in cases:
        case.answers = right_answers(case, devices[0]).reshape(len(case.rows), -1)
    counts = range(1, len(devices) + 1)
    with contextlib.ExitStack() as stack:
        served: dict[int, Models] = {}
        for count in counts:
            model = {"devices": devices[:count], "evidence": True}
            served[count] = stack.enter_context(Models(settings_of(cases, args, policy, model=model), gc_freeze=True))
            assert served[count].ready()[0], served[count].ready()[1]
        for case, many, count in itertools.product(cases, args.concurrency, counts):
            models = served[count]
            before = [device["rows"] for device in models.evidence(case.name, "evidence")["devices"]]
            with ThreadPoolExecutor(1) as client:
                row: dict[str, Any] = client.submit(served_here, models, case, many, args.seconds).result()
            after = models.evidence(case.name, "evidence")["devices"]
            row["rows"] = [now["rows"] - then for now, then in zip(after, before, strict=True)]
            row["evidence"] = [f"{now['device']}: {now['report']['headline']}" for now in after]
            body[f"{case.name}, {count} devices, {many} at a time"] = row
            rates = f"{row['rows_per_second']:9.0f} rows/s {row['p50_ms']:8.2f} ms {row['p99_ms']:8.2f} ms"
            print(f"{case.name:<8} {count} devices, {many:>3} at a time {rates}, by device {row['rows']}", flush=True)
    return body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--devices", help="serve on 1 to all of these, one session each, and measure nothing else")
    parser.add_argument("--engine", default="onnxruntime", choices=("onnxruntime", "torch"), help="with --devices")
    parser.add_argument("--small", action="store_true", help="models of a few layers, for a trial of this script")
    parser.add_argument("--graph", default="require", help="execution.cuda_graph of the policy")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--delay", type=int, default=2000, help="max_queue_delay_us: with 0, batches are not filled")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--body-threads", type=int, help="threads that receive large bodies; by default the server's")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCY, help="requests at a time")
    parser.add_argument("--models", nargs="+", default=["resnet", "encoder"], choices=("resnet", "encoder"))
    parser.add_argument("--out")
    args = parser.parse_args()
    options = xrt.serving.TransportOptions(body_threads=args.body_threads)
    if args.engine == "torch":
        args.models = ["encoder"]
        if not args.devices:
            parser.error("--engine torch measures models on several devices: add --devices cuda:0,cuda:1")
    execution = {"engine": args.engine} | ({} if args.devices else {"device": args.device})
    execution |= {"cuda_graph": args.graph} if args.device != "cpu" else {}
    most = max(args.concurrency)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= 2 * args.batch]
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    body: dict[str, Any] = {"settings": {**settings, "policy": execution}, "target": TARGET, "models": {}}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        policy = folder / "policy.yaml"
        policy.write_text(json.dumps({"schema": "xpuruntime.policy/1", "execution": execution}))
        words = 100 if args.small else 30522
        raws: dict[str, Raw] = {}
        if args.engine == "torch":
            cases = [Case("encoder", program(small=args.small), folder, words, most, ".pt2")]
        else:
            made = (resnet((1, 1, 1), 32, 32, 10), encoder(2, 256, 4, 100, 16)) if args.small else (resnet(), encoder())
            named = zip(("resnet", "encoder"), made, strict=True)
            cases = [Case(name, one, folder, words, most, ".onnx") for name, one in named if name in args.models]
        if args.devices:
            write("serving_devices", {**body, "models": by_devices(cases, args, policy)}, args.out)
            return
        for case in cases:
            raws[case.name] = raw = Raw(case, args.device)
            rates = {"run": raw.rates(sizes, args.concurrency, args.seconds / 8)}
            rates["graph"] = graph_rates(case, args.device, sizes, args.seconds / 8)
            body["models"][case.name] = {"raw": rates, "served": {}, "http": {}}
        with Models(settings_of(cases, args, policy), gc_freeze=True) as models, ThreadPoolExecutor(1) as client:
            assert models.ready()[0], models.ready()[1]
            with xrt.serving.Server(models, http="127.0.0.1:0", options=options) as server:
                for case in cases:
                    row = body["models"][case.name]
                    row["memory"] = models.evidence(case.name, "evidence")["host_memory"]
                    raws[case.name].measure_peak(args.seconds)
                    for many in args.concurrency:
                        row["served"][many] = client.submit(served_here, models, case, many, args.seconds).result()
                    raws[case.name].measure_peak(args.seconds)
                    for many in args.concurrency:
                        row["http"][many] = served_http(server.http_address, case, many, args.seconds, folder)
                    row["raw"]["peaks"] = raws[case.name].peaks
                    row["raw"]["peaks_within"] = raws[case.name].peaks_within
                    row["dispatches"] = models.evidence(case.name, "evidence")["dispatches"]
        body["budget"] = shared_budget(cases, args, policy) if len(cases) == 2 else {}
    print(f"{'model':<8} {'what':<22} {'rows/s':>9} {'p50 ms':>8} {'p99 ms':>8} {'of raw':>7} {'within':>7}")
    for name, row in body["models"].items():
        peak = mean(row["raw"]["peaks"])
        within = {many: mean(rates) for many, rates in row["raw"]["peaks_within"].items()}
        print(f"{name:<8} {'raw run, peak':<22} {peak:9.0f}")
        for many, one in within.items():
            print(f"{name:<8} {f'raw run, {many} rows':<22} {one:9.0f} {'':>8} {'':>8} {one / peak:7.2f}")
        if row["raw"]["graph"]:
            print(f"{name:<8} {'raw graph, no copies':<22} {max(row['raw']['graph'].values()):9.0f}")
        for way in ("served", "http"):
            for many, one in row[way].items():
                share = one["share"] = one["rows_per_second"] / peak
                part = one["share_within"] = one["rows_per_second"] / within[many]
                print(f"{name:<8} {f'{way}, {many} at a time':<22} {one['rows_per_second']:9.0f} {one['p50_ms']:8.2f} "
                      f"{one['p99_ms']:8.2f} {share:7.2f} {part:7.2f}")  # fmt: skip
        row["met"] = max(one["share"] for way in ("served", "http") for one in row[way].values()) >= TARGET
        print(f"{name:<8} {'target':<22} {'met' if row['met'] else 'missed'}: {TARGET} of the raw peak")
    for name, row in list(body["budget"].items())[1:]:
        exchanged = f"{row['evictions']} evictions, {max(row['seconds'], default=0.0):.2f} s for an exchange at most"
        print(f"budget   room for {name:<13} {exchanged} {row['refused']}")
    write("serving_gpu", body, args.out)


if __name__ == "__main__":
    main()
