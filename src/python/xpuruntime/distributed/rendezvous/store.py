# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rendezvous by a store of PyTorch, such as the one that torchrun keeps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.distributed.rendezvous.member import Member, late, misfit, refused

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StoreRendezvous"]

_FIX = "make the same communicators, in the same order, on every rank; raise timeout= if they start slowly"


class StoreRendezvous:
    """Ranks meet through keys of a store; the n-th communicator of a rank meets the n-th of the others."""

    def __init__(self, store: Any, prefix: str = "xpuruntime/nccl") -> None:
        self._store, self._prefix = store, prefix

    def exchange(self, member: Member, make_id: Callable[[], bytes], timeout: float) -> bytes:
        """As `Rendezvous.exchange`."""
        deadline = time.monotonic() + timeout
        number = self._call(member, "add", f"{self._prefix}/turns/{member.rank}", 1)
        turn = f"{self._prefix}/{number}"
        if member.rank == 0:
            return self._gather(turn, member, make_id, timeout, deadline)
        self._call(member, "set", f"{turn}/rank/{member.rank}", msgspec.json.encode(member).decode())
        reply = self._wait(member, f"{turn}/result", deadline)
        if reply is None:
            raise late(member, timeout, f"rank 0 did not answer in communicator {number} of this store", _FIX)
        words = msgspec.json.decode(reply)
        if "error" in words:
            raise refused(member, words["error"])
        return bytes.fromhex(words["id"])

    def _gather(
        self, turn: str, member: Member, make_id: Callable[[], bytes], timeout: float, deadline: float
    ) -> bytes:
        joined = [member]
        try:
            for rank in range(1, member.world_size):
                said = self._wait(member, f"{turn}/rank/{rank}", deadline)
                if said is None:
                    raise late(member, timeout, f"rank {rank} did not come to {turn}", _FIX)
                new = msgspec.json.decode(said, type=Member)
                reason = misfit(joined, new)
                if reason is not None:
                    raise refused(member, reason)
                joined.append(new)
            made = make_id()
        except Exception as error:
            self._call(member, "set", f"{turn}/result", msgspec.json.encode({"error": str(error)}).decode())
            raise
        self._call(member, "set", f"{turn}/result", msgspec.json.encode({"id": made.hex()}).decode())
        return made

    def _wait(self, member: Member, key: str, deadline: float) -> bytes | None:
        pause = 0.002
        while not self._call(member, "check", [key]):
            if time.monotonic() >= deadline:
                return None
            time.sleep(pause)
            pause = min(0.05, pause * 1.3)
        found: bytes = self._call(member, "get", key)
        return found

    def _call(self, member: Member, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except Exception as error:
            reason = f"the store {type(self._store).__name__} failed in {method}: {error}"
            raise refused(member, f"{reason}. Fix: see whether the process that keeps it still runs") from error
