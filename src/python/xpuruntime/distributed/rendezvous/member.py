# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Member`: what a rank says of itself when it joins, and whether the members fit together."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from xpuruntime.errors import EngineError
from xpuruntime.runtime.packages import install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Member", "Rendezvous", "late", "machine_identity", "misfit", "refused"]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of itself."""

    rank: int
    world_size: int
    pid: int = msgspec.field(default_factory=os.getpid)
    host: str = msgspec.field(default_factory=socket.gethostname)
    gpu: str = ""
    library: str = ""
    policy: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    def to_plain(self) -> dict[str, Any]:
        """Return plain values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


class Rendezvous(Protocol):
    """One way in which ranks meet."""

    def exchange(self, member: Member, make_id: Callable[[], bytes], timeout: float) -> bytes:
        """Return the id that rank 0 made with `make_id` once all ranks had joined."""


def machine_identity() -> str:
    """Return text that identifies this running machine, as far as that can be known: host name and boot ID."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def misfit(members: Iterable[Member], new: Member) -> str | None:
    """Say why `new` cannot join `members`, the first of which is rank 0; ``None`` when it can."""
    known = list(members)
    first = known[0]
    if new.world_size != first.world_size:
        return (
            f"{new} says world_size {new.world_size}, and {first} says {first.world_size}. Fix: start all with one "
            "world_size, and end what is left of an earlier run"
        )
    if not 0 <= new.rank < first.world_size:
        return f"{new} is outside of world_size {first.world_size}. Fix: number the ranks from 0"
    for other in known:
        if other.rank == new.rank:
            return (
                f"two processes say they are rank {new.rank}: {other.pid} on {other.host} and {new.pid} on {new.host}. "
                "Fix: give each process a rank of its own, and end what is left of an earlier run"
            )
        if new.gpu and other.gpu == new.gpu:
            return f"{other} and {new} use the same GPU, and NCCL needs one for each rank. Fix: pass another device="
    if new.library != first.library:
        return (
            f"{new} has NCCL {new.library}, and {first} has {first.library}. Fix: install one version for all, "
            f"{install_command('nccl')}"
        )
    if new.policy != first.policy:
        return f"{new} asks for {new.policy}, and {first} for {first.policy}. Fix: pass the same config= on every rank"
    return None


def refused(member: Member, reason: str) -> EngineError:
    """Return the error of a rank that met others and cannot go on."""
    return EngineError(f"rank {member.rank} of {member.world_size} cannot make a communicator: {reason}", engine="nccl")


def late(member: Member, timeout: float, reason: str, fix: str) -> EngineError:
    """Return the error of a rank that waited in vain."""
    return refused(member, f"the ranks did not all meet within {timeout:g} s: {reason}. Fix: {fix}")
