# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""All-reduce between the GPUs of one machine, beside `torch.distributed` over the same NCCL, in one run.

python benchmarks/bench_collectives.py [--ranks 2] [--seconds 280] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 23, 1 << 26, 1 << 28)
ROUNDS = 11
IN_A_GRAPH = 20
CASES = (
    "torch",
    "xpuruntime",
    "xpuruntime, blocking",
    "torch, graph",
    "xpuruntime, graph",
    "xpuruntime, blocking, graph",
)


def calls_for(size: int) -> int:
    """Return how many calls make one round of a few milliseconds."""
    return max(5, min(100, (1 << 28) // size))


def worker(rank: int, ranks: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from xpuruntime import distributed

    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, device_id=torch.device(device))
    make = distributed.Communicator.init
    ours = {
        blocking: make(
            rank, ranks, init_method=store, device=rank, config=distributed.CollectivePolicy(blocking=blocking)
        )
        for blocking in (False, True)
    }

    def check() -> None:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(100_003, device=device, generator=torch.Generator(device).manual_seed(rank)).to(dtype)
            wanted = x.clone()
            dist.all_reduce(wanted)
            for comm in ours.values():
                torch.testing.assert_close(comm.all_reduce(x), wanted)

    def captured(call: Callable[[Any], Any], x: torch.Tensor) -> torch.cuda.CUDAGraph:
        for _ in range(3):
            call(x)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # PyTorch has a thread that asks events
            for _ in range(IN_A_GRAPH):
                call(x)
        return graph

    check()
    plain: dict[str, Callable[[Any], Any]] = {
        "torch": lambda x: dist.all_reduce(x),
        "xpuruntime": lambda x: ours[False].all_reduce(x, out=x),
        "xpuruntime, blocking": lambda x: ours[True].all_reduce(x, out=x),
    }
    rows = []
    for size in SIZES:
        # Sums of zeros stay what they are, however often they are added up.
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        calls = calls_for(size)
        graphs = {name: captured(call, x) for name, call in plain.items()}
        cases: dict[str, tuple[Callable[[], Any], int, int]] = {
            name: (lambda call=call, x=x: call(x), calls, 1) for name, call in plain.items()
        }
        replays = max(1, calls // IN_A_GRAPH)
        cases |= {f"{name}, graph": (graph.replay, replays, IN_A_GRAPH) for name, graph in graphs.items()}
        device_us: dict[str, list[float]] = {name: [] for name in cases}
        host_us: dict[str, list[float]] = {name: [] for name in cases}
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for number in range(ROUNDS + 2):
            for name, (run, count, each) in cases.items():
                torch.cuda.synchronize()
                dist.barrier()
                torch.cuda.synchronize()
                begun = time.perf_counter()
                start.record()
                for _ in range(count):
                    run()
                end.record()
                enqueued = time.perf_counter() - begun
                end.synchronize()
                if number >= 2:  # the first two are warm-up
                    device_us[name].append(start.elapsed_time(end) * 1e3 / (count * each))
                    host_us[name].append(enqueued * 1e6 / (count * each))
        rows.append({"bytes": size, "calls": calls, "samples_us": device_us, "host_us": host_us})
        del run, graphs, cases  # a communicator waits for the graphs of its calls
    if rank == 0:
        body = {
            "ranks": ranks,
            "dtype": "bfloat16",
            "nccl": ".".join(map(str, ours[False].nccl_version)),
            "device": torch.cuda.get_device_name(),
            "nvls": os.environ.get("NCCL_NVLS_ENABLE", "not stated"),
            "in_a_graph": IN_A_GRAPH,
            "cases": rows,
        }
        (folder / "rows.json").write_text(json.dumps(body))
    for comm in ours.values():
        comm.close()
    dist.destroy_process_group()


def table(body: dict[str, Any]) -> list[str]:
    """Return the lines of a table: microseconds a call, and the bus bandwidth of the largest sizes."""
    ranks = body["ranks"]
    lines = ["bytes        " + "".join(f"{name:>24}" for name in CASES)]
    for row in body["cases"]:
        cells = ""
        for name in CASES:
            median = statistics.median(row["samples_us"][name])
            bandwidth = 2 * (ranks - 1) / ranks * row["bytes"] / median / 1e3
            cells += f"{median:>11.1f} us {bandwidth:>6.1f} GB/s"[-24:].rjust(24)
        lines.append(f"{row['bytes']:<13}{cells}")
    lines.append("host, microseconds to enqueue one call, at the smallest size:")
    lines.append(
        "             " + "".join(f"{statistics.median(body['cases'][0]['host_us'][name]):>21.1f} us" for name in CASES)
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=280, help="after which all ranks are killed")
    parser.add_argument("--out", help="folder of the JSON file; default: benchmarks/results")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        worker(options.rank, options.ranks, Path(options.folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ranks", str(options.ranks), "--folder", folder, "--rank"]
        processes = [subprocess.Popen([*command, str(rank)], start_new_session=True) for rank in range(options.ranks)]
        deadline = time.monotonic() + options.seconds
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if any(process.poll() not in (None, 0) for process in processes):
                    break
                time.sleep(0.1)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        rows = Path(folder, "rows.json")
        if any(process.returncode for process in processes) or not rows.exists():
            codes = [process.returncode for process in processes]
            sys.exit(f"the ranks ended with {codes}; -9 is one that was killed for the time")
        body = json.loads(rows.read_text())
    print("\n".join(table(body)))
    from harness import write

    write("collectives", body, options.out)


if __name__ == "__main__":
    main()
