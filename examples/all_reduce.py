# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Add up arrays over all GPUs of this machine: one process for each, started from here.

torchrun --nproc-per-node=2 examples/all_reduce.py does the same with `init_from_env`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import numpy as np

import xpuruntime as xrt
from xpuruntime import distributed


def work(comm: distributed.Communicator) -> None:
    """Do what every rank does."""
    mine = xrt.Tensor.from_numpy(np.full(1_000_000, comm.rank + 1, np.float32)).to(comm.device)
    total = comm.all_reduce(mine)
    comm.synchronize()  # with a timeout, so that a rank that died is an error and no hang
    if comm.rank == 0:
        print(f"{comm.world_size} ranks, sum {total.to('cpu').numpy()[0]:g}")


def main() -> None:
    """Be one rank, or start all of them."""
    if "RANK" in os.environ:
        with distributed.init_from_env() as comm:
            work(comm)
        return
    if len(sys.argv) == 4:
        rank, ranks, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        with distributed.Communicator.init(rank, ranks, init_method=where, device=rank) as comm:
            work(comm)
        return
    ranks = xrt.get_device_count("cuda")
    if ranks == 0:
        print(f"nothing to add up: {xrt.DeviceManager.instance().cuda_reason()}")
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        where = f"tcp://127.0.0.1:{probe.getsockname()[1]}"  # a port that is free again when the block ends
    command = [sys.executable, __file__]
    processes = [subprocess.Popen([*command, str(rank), str(ranks), where]) for rank in range(ranks)]
    codes = [process.wait(timeout=110) for process in processes]
    if any(codes):
        sys.exit(f"the ranks ended with {codes}")


if __name__ == "__main__":
    main()
