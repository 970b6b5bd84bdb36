# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Collectives over NCCL: all-reduce and others between GPUs, on arrays of any library.

One process, or thread, is one rank with one GPU::

    from xpuruntime import distributed

    with distributed.Communicator.init(rank, 2, init_method="tcp://127.0.0.1:29400", device=rank) as comm:
        total = comm.all_reduce(x)          # any DLPack array on that GPU
        comm.synchronize()

NCCL is opened, by nccl4py, when the first communicator is made. Importing this needs neither of them nor a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xpuruntime.distributed.communicator import Communicator, init_from_env
from xpuruntime.distributed.policy import CollectiveChoice, CollectivePolicy, group, read_choices
from xpuruntime.lazy_names import lazy as _lazy

__all__ = ["CollectiveChoice", "CollectivePolicy", "Communicator", "group", "init_from_env", "read_choices"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = _lazy(__name__, {})
