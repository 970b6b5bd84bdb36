# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ranks meet through a store of PyTorch, the one of torchrun among them."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from xpuruntime.distributed.rendezvous.member import Member
from xpuruntime.distributed.rendezvous.store import StoreRendezvous
from xpuruntime.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch
distributed = pytest.importorskip("torch.distributed")

ID = bytes(range(128))

WORKER = """
import os
from xpuruntime.distributed.init_methods import environment_number, rendezvous
from xpuruntime.distributed.rendezvous.member import Member
member = Member(rank=environment_number("RANK"), world_size=environment_number("WORLD_SIZE"))
for turn in range(2):
    found = rendezvous("env://", 60).exchange(member, lambda: bytes([turn]) * 128, 60)
    assert found == bytes([turn]) * 128, found
open(os.environ["SAID"] + str(member.rank), "w").write("met")
"""


def meet(
    members: list[Member], store: object, timeout: float = 20.0, others: float | None = None
) -> list[bytes | EngineError]:
    def run(member: Member) -> bytes | EngineError:
        try:
            seconds = timeout if member.rank == 0 or others is None else others
            return StoreRendezvous(store).exchange(member, lambda: ID, seconds)
        except EngineError as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(run, members))


def test_they_meet_again_and_again():
    store = distributed.HashStore()
    for _ in range(3):
        assert meet([Member(rank=rank, world_size=3) for rank in range(3)], store) == [ID] * 3


def test_each_with_a_store_of_its_own_on_one_file(tmp_path: Path):
    def run(rank: int) -> bytes:
        store = distributed.FileStore(str(tmp_path / "store"), 2)
        return StoreRendezvous(store).exchange(Member(rank=rank, world_size=2), lambda: ID, 20)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [ID] * 2


def test_both_sides_hear_why_they_do_not_fit():
    found = meet(
        [Member(rank=0, world_size=2, policy="a"), Member(rank=1, world_size=2, policy="b")], distributed.HashStore()
    )
    for error in found:
        assert "asks for b, and rank 0" in str(error)


def test_who_did_not_come():
    found = meet(
        [Member(rank=0, world_size=3), Member(rank=1, world_size=3)], distributed.HashStore(), timeout=1, others=20
    )
    assert "rank 2 did not come to xpuruntime/nccl/1" in str(found[0])
    assert isinstance(found[1], EngineError)


def test_a_store_that_fails(tmp_path: Path):
    class Broken(distributed.Store):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection reset")

    with pytest.raises(EngineError, match="the store Broken failed in add: connection reset"):
        StoreRendezvous(Broken()).exchange(Member(rank=0, world_size=2), lambda: ID, 5)


@pytest.mark.slow
def test_processes_that_torchrun_started_meet_in_its_store(tmp_path: Path):
    (tmp_path / "worker.py").write_text(WORKER)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1",
         "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "worker.py"],
        cwd=tmp_path, env={**os.environ, "SAID": str(tmp_path / "said")}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said0").read_text() == (tmp_path / "said1").read_text() == "met"
