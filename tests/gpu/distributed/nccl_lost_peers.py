# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
# ruff: noqa: PT017 - assertions of a program that pytest does not run
"""What ranks do when one ends, hangs, never comes or differs, and FSDP2 with one lock; run by nccl_work.py."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import xpuruntime as xrt
from xpuruntime.distributed.nccl import open_nccl
from xpuruntime.distributed.rendezvous import Member, meet, meeting_place

if TYPE_CHECKING:
    from nccl_rank import Rank


def goes_on(here: Rank) -> None:
    """The GPU and the process are of use after a communicator was aborted."""
    assert float((torch.ones(1000, device=here.device) * 2).sum()) == 2000
    torch.cuda.synchronize()


def expect_error(work: object, within: float) -> str:
    start = time.monotonic()
    try:
        work()  # type: ignore[operator]
    except xrt.EngineError as error:
        took = time.monotonic() - start
        assert took < within, f"the error came after {took:.1f} s: {error}"
        assert "rank 0" in str(error), error
        print(f"after {took:.1f} s: {error}")
        return str(error)
    raise AssertionError("no error came")


def peer_killed(here: Rank) -> None:
    comm = here.communicator(timeout=20)
    x = torch.ones(1 << 20, device=here.device)
    comm.all_reduce(x)
    comm.barrier()
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)

    def go_on() -> None:
        comm.all_reduce(x)
        comm.synchronize(timeout=4)

    text = expect_error(go_on, within=30)
    assert "Fix:" in text
    again = expect_error(lambda: comm.all_reduce(x), within=1)
    assert "this communicator failed before" in again
    comm.close()
    goes_on(here)


def peer_stuck(here: Rank) -> None:
    """A peer that lives and makes no call; the communicator of the other ends, and both processes go on."""
    comm = here.communicator(timeout=20)
    x = torch.ones(1 << 20, device=here.device)
    comm.all_reduce(x)
    comm.barrier()
    if here.rank == 1:
        time.sleep(12)
        comm.abort()
        goes_on(here)
        return

    def wait() -> None:
        comm.all_reduce(x)
        comm.barrier(timeout=3)

    assert "barrier on rank 0 of 2" in expect_error(wait, within=25)
    goes_on(here)


def peer_absent(here: Rank) -> None:
    if here.rank == 1:
        return
    text = expect_error(lambda: here.communicator(timeout=3), within=10)
    assert "rank 1 did not come" in text


def peer_lost_on_the_way(here: Rank) -> None:
    """The ranks meet, and one ends before NCCL connects them."""
    if here.rank == 1:
        version = ".".join(map(str, open_nccl().version))
        member = Member(rank=1, world_size=2, library=version, policy="CollectivePolicy()")
        meet(meeting_place(here.method), member, lambda: b"", 60)
        os._exit(0)
    text = expect_error(lambda: here.communicator(timeout=6), within=30)
    assert "init on rank 0 of 2" in text
    goes_on(here)


def error_in_the_block(here: Rank) -> None:
    """A rank that fails leaves at once; the other is told by its own timeout."""
    if here.rank == 1:
        try:
            with here.communicator() as comm:
                comm.barrier()
                raise RuntimeError("a bug of the user")
        except RuntimeError:
            return
    comm = here.communicator(timeout=5)
    comm.barrier()

    def go_on() -> None:
        comm.all_reduce(torch.ones(10, device=here.device))
        comm.synchronize()

    expect_error(go_on, within=25)
    goes_on(here)


def sharded(here: Rank) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """Return a model of FSDP2, its optimizer and a batch, in a process group over NCCL."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    store = dist.TCPStore("127.0.0.1", here.port, here.ranks, here.rank == 0)
    dist.init_process_group(
        "nccl", store=store, rank=here.rank, world_size=here.ranks, device_id=torch.device(here.device)
    )
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to(here.device)
    for part in (*(layer for layer in model if isinstance(layer, torch.nn.Linear)), model):
        fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), torch.ones(64, 512, device=here.device)


def sharded_lock(here: Rank) -> None:
    """FSDP2 under `auto` runs the same kernels on both ranks, and both train under the lock that rank 0 has made."""
    import torch.distributed as dist

    from xpuruntime.integrations.training import TrainingPolicy

    model, optimizer, x = sharded(here)

    def train(policy: Any, lock: Any) -> TrainingPolicy:
        with TrainingPolicy(policy, model, resume=lock, rank_timeout=90) as run:
            for _ in range(3):
                optimizer.zero_grad()
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(x).float().square().mean()
                loss.backward()
                optimizer.step()
        return run

    first = train({"kernels": {"matmul": "auto"}, "auto_strategy": "best_performance"}, None)
    assert not first.rank_differences, first.rank_differences
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    if here.rank == 0:
        assert first.save(folder[0]) is not None
    dist.barrier()
    again = train(None, Path(folder[0]))
    digests: list[Any] = [None] * here.ranks
    dist.all_gather_object(digests, again.lock.digest if again.lock else "")
    assert digests == [digests[0]] * here.ranks, digests
    assert again.rank_report is not None
    assert again.rank_report["odd"] == [], again.rank_report
    dist.destroy_process_group()
    print("sharded lock ok")


def captured_peer_lost(here: Rank) -> None:
    """Rank 1 is killed, or hangs, between captured steps: rank 0 ends with its name within the timeout."""
    import xpuruntime.pytorch as xrt_torch

    model, optimizer, x = sharded(here)
    with xrt_torch.RankAgreement(rank_timeout=20):
        step = xrt_torch.capture_graph(
            lambda x: model(x).square().mean(), (x,), optimizer=optimizer, make_capturable=True, strict=True
        )
        for number in range(6):
            if here.rank == 1 and number == 3:
                if here.arguments[0] == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            float(step(x))
    raise AssertionError("no error came")
