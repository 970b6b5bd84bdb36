# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ranks meet through files: between processes, over what earlier runs left, and with every mistake."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from xpuruntime.distributed.rendezvous.file import FileRendezvous
from xpuruntime.distributed.rendezvous.member import Member
from xpuruntime.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

ID = bytes(range(128))

WORKER = """
import sys
from xpuruntime.distributed.rendezvous.member import Member
from xpuruntime.distributed.rendezvous.file import FileRendezvous
member = Member(rank=int(sys.argv[1]), world_size=3)
print(FileRendezvous(sys.argv[2]).exchange(member, lambda: bytes(range(128)), 60).hex())
"""


def meet(
    members: list[Member], path: Path, timeout: float = 20.0, others: float | None = None
) -> list[bytes | EngineError]:
    def run(member: Member) -> bytes | EngineError:
        try:
            seconds = timeout if member.rank == 0 or others is None else others
            return FileRendezvous(path).exchange(member, lambda: ID, seconds)
        except EngineError as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(run, members))


def ranks(count: int) -> list[Member]:
    return [Member(rank=rank, world_size=count) for rank in range(count)]


def test_processes_meet_and_leave_nothing(tmp_path: Path):
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path / "meet")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (1, 2, 0)
    ]  # fmt: skip
    try:
        said = [worker.communicate(timeout=90) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [out.strip() for out, _ in said] == [ID.hex()] * 3, said
    assert list(tmp_path.iterdir()) == []


def test_the_same_path_serves_again(tmp_path: Path):
    for _ in range(4):
        assert meet(ranks(3), tmp_path / "meet") == [ID] * 3
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_run_that_failed_do_no_harm(tmp_path: Path):
    """Every file that a run can leave is there, and the new ranks come in the order that hurts most: rank 0 last."""
    path = tmp_path / "meet"
    meet([Member(rank=0, world_size=3), Member(rank=1, world_size=3)], path, timeout=0.4)
    assert (tmp_path / "meet.session").exists()
    assert (tmp_path / "meet.result").exists()
    (tmp_path / "meet.rank-2").write_bytes(b'{"session": "old", "name": "x", "member": {"rank": 2, "world_size": 9}}')
    (tmp_path / "meet.rank-1").write_bytes(b"half a fi")
    found: list[bytes | EngineError] = []
    others = threading.Thread(target=lambda: found.extend(meet(ranks(3)[1:], path)))
    others.start()
    time.sleep(0.15)
    found.extend(meet(ranks(3)[:1], path))
    others.join(20)
    assert found == [ID] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_an_earlier_run_left_is_not_taken(tmp_path: Path):
    """As after a rank 0 that was killed between writing the result and taking it away."""
    (tmp_path / "meet.session").write_bytes(b'"0123"')
    (tmp_path / "meet.result").write_bytes(b'{"session": "0123", "names": {"1": "gone"}, "id": "00"}')
    (error,) = meet([Member(rank=1, world_size=2)], tmp_path / "meet", timeout=0.3)
    assert "where it took another process for rank 1" in str(error)
    assert meet(ranks(2), tmp_path / "meet") == [ID] * 2


def test_rank_0_names_who_did_not_come(tmp_path: Path):
    found = meet([Member(rank=0, world_size=3), Member(rank=2, world_size=3)], tmp_path / "meet", timeout=2, others=20)
    assert "rank 1 did not come to" in str(found[0])
    assert "rank 2 of 3 cannot make a communicator" in str(found[1])


def test_without_rank_0_the_others_say_so(tmp_path: Path):
    (error,) = meet([Member(rank=1, world_size=2)], tmp_path / "meet", timeout=0.3)
    assert isinstance(error, EngineError)
    assert "rank 0 did not come to" in str(error)
    assert "Fix:" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_another_world_size(tmp_path: Path):
    found = meet([Member(rank=0, world_size=2), Member(rank=1, world_size=4)], tmp_path / "meet")
    for error in found:
        assert "says world_size 4, and rank 0" in str(error)


def test_two_processes_of_one_rank(tmp_path: Path):
    """One of the two at least is told, before the time is up; which one is left to chance."""
    members = [Member(rank=0, world_size=3), Member(rank=1, world_size=3, pid=11), Member(rank=1, world_size=3, pid=12)]
    found = meet(members, tmp_path / "meet", timeout=1.5)
    told = [str(error) for error in found[1:] if isinstance(error, EngineError)]
    assert any("two processes say they are rank 1" in text or "another process for rank 1" in text for text in told), (
        found
    )


def test_two_processes_of_rank_0(tmp_path: Path):
    found = meet([Member(rank=0, world_size=2), Member(rank=0, world_size=2)], tmp_path / "meet", timeout=1.5)
    assert any("two processes say they are rank 0" in str(error) for error in found), found


def test_a_folder_that_is_not_there(tmp_path: Path):
    for member in ranks(2)[:1]:
        with pytest.raises(EngineError, match=r"cannot be used: No such file.*folder that exists"):
            FileRendezvous(tmp_path / "no" / "meet").exchange(member, lambda: ID, 5)
