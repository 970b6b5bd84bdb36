# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What each of several processes does in the tests of rank agreement, and how they are started; over gloo or NCCL."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD_SECONDS = 60.0
#: Ways in which a rank can fail.
KINDS = ("killed", "hangs", "out_of_memory")
#: What takes seconds to import, in the process that others are forked from.
PRELOADED = [
    "torch._dynamo", "torch.nn.parallel.distributed", "xpuruntime.pytorch.step_tuning.tune",
    "xpuruntime.integrations.training", "xpuruntime.pytorch.dispatch.overrides", "torch.profiler",
]  # fmt: skip


class Device:
    """Where a process of these has its tensors, and a timeout: short for a test, long for a step of a busy machine."""

    kind, rank_timeout = "cpu", 15.0


def run_ranks(program: str, folder: Path, ranks: int, *arguments: Any, backend: str = "gloo") -> list[dict[str, Any]]:
    """Return what a program of this module said on each rank, with its exit code, after all have ended."""
    return start_ranks(program, folder, ranks, *arguments, backend=backend)()


def check_others_end(
    program: str,
    folder: Path,
    ranks: int,
    backend: str = "gloo",
    kinds: tuple[str, ...] = ("killed", "hangs", "out_of_memory"),
) -> None:
    """Have rank 1 fail in each of some ways in a program of this module: the others name it, and nothing is stored.

    A rank 1 that hangs is killed once the others have ended.
    """
    reasons = {"killed": ("has ended", "was silent"), "hangs": ("was silent",), "out_of_memory": ("OutOfMemoryError",)}
    if program == "measured_kernel":  # an error of who watches it only ends the measuring
        kinds = tuple(kind for kind in kinds if kind != "out_of_memory")
    started = {kind: start_ranks(program, folder / kind, ranks, kind, backend=backend) for kind in kinds}
    for kind, ended in started.items():
        found = ended(failing=1)
        for number in {*range(ranks)} - {1}:
            assert "saved" not in found[number]
            assert "rank 1" in found[number]["error"], found
            assert any(reason in found[number]["error"] for reason in reasons[kind]), found
            assert program != "measured_kernel" or _measured(folder / kind, number) == [], found
        assert not (folder / kind / "stored").exists()


def start_ranks(
    program: str, folder: Path, ranks: int, *arguments: Any, backend: str = "gloo"
) -> Callable[..., list[dict[str, Any]]]:
    """Start a program of this module on each rank; returns a function that waits for them, as `run_ranks`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    folder.mkdir(exist_ok=True)
    processes = [
        context.Process(target=_run, args=(program, str(folder), rank, ranks, arguments, backend))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()

    def ended(failing: int | None = None) -> list[dict[str, Any]]:
        for rank, process in sorted(enumerate(processes), key=lambda item: item[0] == failing):
            process.join(0 if rank == failing else WORLD_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        results = []
        for rank, process in enumerate(processes):
            text = folder / f"{rank}.json"
            said = json.loads(text.read_text()) if text.exists() else {}
            results.append({"error": (folder / f"{rank}.err").read_text(), **said, "code": process.exitcode})
        return results

    return ended


def _run(program: str, folder: str, rank: int, ranks: int, arguments: tuple[Any, ...], backend: str) -> None:
    import torch

    path = Path(folder)
    errors = os.open(path / f"{rank}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.environ["XPURUNTIME_TUNING_CACHE"] = str(path / f"tuning-{rank}" / "tuning.json")  # each on a host of its own
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        Device.kind = "cuda"
    torch.distributed.init_process_group(backend, init_method=f"file://{path}/store", rank=rank, world_size=ranks)
    try:
        said: dict[str, Any] = globals()[program](path, rank, *arguments) or {}
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    (path / f"{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # where another rank is gone, its process group has no orderly end


def _products(count: int = 2) -> dict[str, str]:
    """Return the kernels of products of several sizes, which a policy leaves to measured times."""
    import torch

    import xpuruntime.pytorch as xrt_torch

    with xrt_torch.explain() as report:
        for size in range(1, count + 1):
            left = torch.ones(16 * size, 32, device=Device.kind)
            torch.mm(left, torch.ones(32, 8, device=Device.kind, requires_grad=True)).sum().backward()
    return {f"{row.shapes} {row.phase}": row.resolved for row in report.rows if row.op == "matmul"}


def _measured(place: Path, rank: int) -> list[str]:
    file = place / f"tuning-{rank}" / "tuning.json"
    return sorted(json.loads(file.read_text())["entries"]) if file.exists() else []


def _auto() -> Any:
    import xpuruntime.pytorch as xrt_torch

    return xrt_torch.kernel_policy(matmul="auto", auto_strategy="best_performance")


def auto(place: Path, rank: int) -> dict[str, Any]:
    """Measure kernels under `auto`, each rank with a cache of its own."""
    import xpuruntime.pytorch as xrt_torch

    with xrt_torch.RankAgreement(WORLD_SECONDS), _auto():
        kernels = _products()
    return {"kernels": kernels, "measured": _measured(place, rank)}


def cancelled(place: Path, rank: int) -> dict[str, Any]:
    """Run under `auto` where nobody may measure: no rank waits for another."""
    import xpuruntime as xrt
    import xpuruntime.pytorch as xrt_torch

    with xrt_torch.RankAgreement(WORLD_SECONDS), _auto(), xrt.watch_tuning(cancel=lambda: True):
        kernels = _products()
    return {"kernels": kernels, "measured": _measured(place, rank)}


def _load_as(planted: Path) -> None:
    """Load some library under a name that kernels are in."""
    import _json

    planted.write_bytes(Path(_json.__file__).read_bytes())
    ctypes.CDLL(str(planted))


def other_library(place: Path, rank: int) -> dict[str, Any]:
    """Measure where rank 1 has loaded another library of kernels than the others."""
    import xpuruntime.pytorch as xrt_torch

    if rank == 1:
        _load_as(place / "libcudnn.so.77")
    with xrt_torch.RankAgreement(Device.rank_timeout), _auto():
        kernels = _products(1)
        time.sleep(WORLD_SECONDS)  # until another rank is found to differ
    return {"kernels": kernels}


def other_version(place: Path, rank: int) -> dict[str, Any]:
    """Enter with another version of a package on rank 2."""
    import xpuruntime
    import xpuruntime.pytorch as xrt_torch

    if rank == 2:
        xpuruntime.__version__ = "9.9"
    with xrt_torch.RankAgreement(WORLD_SECONDS):
        return {"entered": True}


def _of_all_ranks(net: Any) -> Any:
    """Return the model that ranks train together; on a GPU, it sums gradients on a stream that a capture can have."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream()) if Device.kind == "cuda" else contextlib.nullcontext():
        return torch.nn.parallel.DistributedDataParallel(net.to(Device.kind))


def _train(lock: Path | None, fault: Callable[[int], None], rank_timeout: float) -> Any:
    import torch

    from xpuruntime.integrations.training import TrainingPolicy

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    model = _of_all_ranks(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    policy = {"kernels": {"matmul": "torch.mm" if Device.kind == "cuda" else "cpu.blas"}}
    with TrainingPolicy(policy, net, resume=lock, rank_timeout=rank_timeout) as run:
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8, device=Device.kind)).square().mean()
            fault(step)
            loss.backward()
            optimizer.step()
    return run


def lock_for_all(place: Path, rank: int) -> dict[str, Any]:
    """Lock a training on rank 0, and train under that lock on all."""
    import torch

    first = _train(None, lambda _: None, WORLD_SECONDS)
    if rank == 0:
        (place / "checkpoint").mkdir()
        first.save(place / "checkpoint")
    torch.distributed.barrier()
    again = _train(place / "checkpoint", lambda _: None, WORLD_SECONDS)
    return {"digest": again.lock.digest, "first": first.lock.digest, "report": again.rank_report}


def odd_rank(place: Path, rank: int) -> dict[str, Any]:
    """Train where the last rank has loaded another BLAS beside the one of the others."""
    import torch

    if rank == torch.distributed.get_world_size() - 1:
        _load_as(place / "libscipy_openblas.so.77")
    return {"report": _train(None, lambda _: None, WORLD_SECONDS).rank_report}


def _fault(kind: str, rank: int, at: int) -> Callable[[int], None]:
    def fault(step: int) -> None:
        import torch

        if rank != 1 or step < at:
            return
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "hangs":
            time.sleep(WORLD_SECONDS)
        elif Device.kind == "cuda":
            torch.empty(1 << 50, dtype=torch.uint8, device=Device.kind)
        else:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    return fault


def locked_step(place: Path, rank: int, kind: str) -> dict[str, Any]:
    """Fail on rank 1 in the middle of a training under the lock of another one; writes its own in the end."""
    import torch

    first = _train(None, lambda _: None, WORLD_SECONDS)
    if rank == 0:
        (place / "checkpoint").mkdir()
        first.save(place / "checkpoint")
    torch.distributed.barrier()
    run = _train(place / "checkpoint", _fault(kind, rank, 2), Device.rank_timeout)
    (place / "stored").mkdir(exist_ok=True)
    run.save(place / "stored")
    return {"saved": True}


def captured_step(place: Path, rank: int, kind: str) -> dict[str, Any]:
    """Fail on rank 1 while a step is captured; on a CPU, which runs it eagerly, in its third step."""
    import torch

    import xpuruntime.pytorch as xrt_torch

    model = _of_all_ranks(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fault, steps = _fault(kind, rank, 2), iter(range(100))

    def loss(x: Any) -> Any:
        step = next(steps)
        if Device.kind == "cpu" or torch.cuda.is_current_stream_capturing():
            fault(step)
        return model(x).square().mean()

    with xrt_torch.RankAgreement(Device.rank_timeout):
        step = xrt_torch.capture_graph(
            loss, optimizer=optimizer, modules=[model], make_capturable=True, strict=Device.kind == "cuda"
        )
        for _ in range(4):
            float(step(torch.ones(4, 8, device=Device.kind)))
        (place / "stored").mkdir(exist_ok=True)
    return {"saved": True}


def measured_kernel(place: Path, rank: int, kind: str) -> dict[str, Any]:
    """Fail on rank 1 while it measures a kernel for all."""
    import xpuruntime as xrt
    import xpuruntime.pytorch as xrt_torch

    begun, fault = place / "measuring", _fault(kind, rank, 0)

    def cancel() -> bool:
        if rank == 1:
            begun.touch()
        fault(0)
        return False

    with xrt_torch.RankAgreement(Device.rank_timeout), _auto(), xrt.watch_tuning(cancel=cancel):
        while rank != 1 and not begun.exists():
            time.sleep(0.01)
        _products(1)
        (place / "stored").mkdir(exist_ok=True)
    return {"saved": True}


def tuned_step(place: Path, rank: int, kind: str) -> dict[str, Any]:
    """Fail on rank 1 in the middle of the tuning of a step, whose winner is written in the end."""
    import torch

    import xpuruntime.pytorch as xrt_torch

    model = _of_all_ranks(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fault, steps = _fault(kind, rank, 12), iter(range(10**9))

    def loss(x: Any) -> Any:
        value = model(x).square().mean()
        fault(next(steps))
        return value

    tuned = xrt_torch.tune(
        loss, (torch.ones(4, 8, device=Device.kind),), optimizer=optimizer, launches=["eager"], rounds=(3, 3),
        budget=2.0, rank_timeout=Device.rank_timeout,
    )  # fmt: skip
    (place / "stored").mkdir(exist_ok=True)
    (place / "stored" / "name").write_text(tuned.name)
    return {"saved": True}
