# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Start of a communicator: check this rank, meet the others, and have NCCL start to connect them."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xpuruntime._core import DeviceManager, DeviceScope
from xpuruntime.distributed.environment import outer_environment
from xpuruntime.distributed.init_methods import local_rank, rendezvous
from xpuruntime.distributed.nccl import UniqueId, nccl_library, version_text
from xpuruntime.distributed.rendezvous.member import Member, machine_identity
from xpuruntime.distributed.waiting import run_within
from xpuruntime.errors import EngineError, InputError

if TYPE_CHECKING:
    from xpuruntime.distributed.nccl import NcclConfig, NcclLibrary
    from xpuruntime.distributed.policy import CollectivePolicy

__all__ = ["FIXES", "Meeting", "meet"]

#: What to do, by NCCL's result code.
FIXES = {
    1: "look for an earlier CUDA error in this process, and whether the GPU still answers",
    2: "see whether shared memory, file handles and the network suffice; NCCL_DEBUG=INFO shows where it failed",
    3: "NCCL_DEBUG=INFO shows where it failed",
    4: "make the same call with the same shapes and dtypes on every rank; NCCL_DEBUG=WARN names the argument",
    5: "make the same call with the same policy on every rank, and state no algorithm that this machine lacks",
    6: "a peer ended or cannot be reached: make a new communicator with the ranks that live",
}


@dataclass(frozen=True)
class Meeting:
    """What the ranks agreed on, and what NCCL needs to connect them."""

    rank: int
    world_size: int
    device: str
    unique_id: bytes
    library: NcclLibrary
    config: NcclConfig
    variables: dict[str, str]
    timeout: float
    deadline: float

    def left(self) -> float:
        """Return the seconds that are left for NCCL to connect the ranks."""
        return max(0.0, self.deadline - time.monotonic())

    def start(self) -> tuple[int, int]:
        """Have NCCL connect the ranks. Returns its handle, and its result, which may be that it is in progress."""
        where = f"rank {self.rank} of {self.world_size} on {self.device}"
        handle = ctypes.c_void_p()
        unique = UniqueId.from_buffer_copy(self.unique_id)

        def run() -> int:
            with DeviceScope(self.device):
                result: int = self.library.ncclCommInitRankConfig(
                    ctypes.byref(handle), self.world_size, unique, self.rank, ctypes.byref(self.config)
                )
                return result

        # It answers within microseconds, unless it is asked to block.
        done, result = run_within(run, self.left(), "xpuruntime-nccl-init")
        if not done:
            raise EngineError(
                f"{where}: NCCL did not connect the ranks within {self.timeout:g} s, and goes on trying in the "
                "background, as it is set to block. Fix: see whether every rank is alive, and end the process",
                device=self.device,
                engine="nccl",
            )
        if not handle.value:
            raise EngineError(
                f"{where}: NCCL cannot begin: {self.library.explain(result)}. Fix: {FIXES.get(result, FIXES[3])}",
                device=self.device,
                engine="nccl",
                status=int(result),
            )
        return handle.value, int(result)


def meet(
    rank: int, world_size: int, *, init_method: Any, device: Any, timeout: float, policy: CollectivePolicy
) -> Meeting:
    """Check this rank, open NCCL, and meet the other ranks. Arguments and errors are those of `Communicator.init`."""
    _check_ranks(rank, world_size, timeout)
    name = _device_name(device, init_method)
    facts = DeviceManager.instance().get_device_info(name)
    library = nccl_library()
    outer = outer_environment()
    variables, config = policy.variables(library, outer), policy.config(library, outer)
    if world_size == 1:
        unique_id = library.make_id()
    else:
        member = Member(
            rank=rank,
            world_size=world_size,
            gpu=f"{machine_identity()}/{facts.pci_id}",
            library=version_text(library.version),
            policy=repr(policy),
        )
        unique_id = rendezvous(init_method, timeout).exchange(member, library.make_id, timeout)
    deadline = time.monotonic() + timeout  # its own time, however late the last rank came
    return Meeting(rank, world_size, name, unique_id, library, config, variables, timeout, deadline)


def _check_ranks(rank: Any, world_size: Any, timeout: Any) -> None:
    for name, value, least in (("rank", rank, 0), ("world_size", world_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name} is {value!r}; expected a whole number from {least}")
    if rank >= world_size:
        raise InputError(f"rank is {rank}, and world_size {world_size}; expected a rank from 0 to {world_size - 1}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise InputError(f"timeout is {timeout!r}; expected seconds, more than 0")


def _device_name(device: Any, init_method: Any) -> str:
    manager = DeviceManager.instance()
    if device is None:
        index = local_rank() if isinstance(init_method, str) and init_method == "env://" else None
        device = f"cuda:{index}" if index is not None else manager.get_current_device()
        if device == "cpu":
            device = "cuda:0"  # which says why there is none
    name = manager.get_device_info(device).device
    if not name.startswith("cuda:"):
        raise InputError(f"device is {name}, and NCCL works on GPUs only. Fix: pass device='cuda:0', or another GPU")
    return name
