# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
# ruff: noqa: PT017 - assertions of a program that pytest does not run
"""What rank 0 does when rank 1 ends, hangs or never comes; run by nccl_work.py."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

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
