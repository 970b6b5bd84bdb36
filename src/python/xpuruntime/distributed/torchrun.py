# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The communicator of the processes that torchrun started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.distributed.communicator import Communicator
from xpuruntime.distributed.init_methods import environment_number

if TYPE_CHECKING:
    from xpuruntime.distributed.policy import CollectivePolicy

__all__ = ["init_from_env"]


def init_from_env(*, device: Any = None, timeout: float = 60.0, config: CollectivePolicy | None = None) -> Communicator:
    """Return the communicator of the processes that torchrun started, or whoever sets its variables.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Under torchrun, ranks meet in its store.

    Parameters
    ----------
    device : str or Device, optional
        Default: the GPU LOCAL_RANK, or the current one where that is not set.
    timeout : float
        Seconds to meet, then to be connected by NCCL, and for each call after that.
    config : CollectivePolicy, optional

    Raises
    ------
    InputError
        A variable is missing or no number; otherwise as `Communicator.init`.
    """
    rank, world_size = environment_number("RANK"), environment_number("WORLD_SIZE")
    return Communicator.init(rank, world_size, device=device, timeout=timeout, config=config)
