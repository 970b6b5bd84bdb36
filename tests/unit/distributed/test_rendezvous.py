# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ranks meet in a store of PyTorch: late, early, again, and with every mistake that can be made."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from xpuruntime.distributed.rendezvous import (
    MeetingPlace,
    Member,
    environment_number,
    local_rank,
    meet,
    meeting_place,
)
from xpuruntime.errors import EngineError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.torch
distributed = pytest.importorskip("torch.distributed")

ID = bytes(range(128))
ENV = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}

WORKER = """
import sys
from xpuruntime.distributed.rendezvous import Member, meet, meeting_place
rank, world, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
for turn in range(3):
    print(meet(meeting_place(where), Member(rank=rank, world_size=world), lambda: bytes([turn]) * 4, 60).hex())
"""
TORCHRUN_WORKER = """
import os
from xpuruntime.distributed.rendezvous import Member, environment_number, meet, meeting_place
member = Member(rank=environment_number("RANK"), world_size=environment_number("WORLD_SIZE"))
for turn in range(2):
    unique_id = meet(meeting_place("env://"), member, lambda: bytes([turn]) * 128, 60)
    assert unique_id == bytes([turn]) * 128, unique_id
open(os.environ["SAID"] + str(member.rank), "w").write("met")
"""


def free_place() -> MeetingPlace:
    """Return an address of this machine with a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return meeting_place(f"tcp://127.0.0.1:{probe.getsockname()[1]}")


def store() -> MeetingPlace:
    return MeetingPlace(store=distributed.HashStore())


def meet_all(
    members: list[Member],
    place: MeetingPlace,
    timeout: float = 20.0,
    others: float | None = None,
    make_id: Callable[[], bytes] = lambda: ID,
) -> list[bytes | EngineError]:
    """Let each member run in a thread of its own; return what it got, or its error."""

    def run(member: Member) -> bytes | EngineError:
        try:
            return meet(place, member, make_id, timeout if member.rank == 0 or others is None else others)
        except EngineError as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(run, members))


def test_each_kind_of_place():
    tcp = meeting_place("tcp://127.0.0.1:29400")
    assert (tcp.host, tcp.port, tcp.kept) == ("127.0.0.1", 29400, False)
    from_environment = meeting_place("env://", ENV)
    assert (str(from_environment), from_environment.kept) == ("10.0.0.1:29500", False)
    torchrun = meeting_place(
        "env://",
        {**ENV, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "2"},
    )
    assert (torchrun.kept, torchrun.prefix) == (True, "xpuruntime/nccl/a/2")

    class Store:
        add = set = get = check = print

    assert str(meeting_place(Store())) == "the store Store"


@pytest.mark.parametrize(
    "method",
    ["", "tcp://127.0.0.1", "tcp://:29400", "tcp://host:0", "tcp://host:99999", "tcp://host:1/path", "tcp://host:x",
     "file:///tmp/meet", "http://host:1", "env://something", None, 3],
)  # fmt: skip
def test_places_that_are_refused(method: object):
    with pytest.raises(InputError, match=r"init_method is .*Fix: give"):
        meeting_place(method, ENV)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "no MASTER_ADDR. Fix: start the program with torchrun"),
        ({"MASTER_ADDR": "a"}, "no MASTER_PORT. Fix:"),
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "http"},
            "MASTER_PORT is 'http' in the environment; expected a whole number",
        ),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
    ],
)
def test_variables_that_are_missing_or_wrong(env: dict[str, str], words: str):
    with pytest.raises(InputError, match=words):
        meeting_place("env://", env)


def test_numbers_of_the_environment():
    assert environment_number("RANK", {"RANK": "12"}) == 12
    assert local_rank({"LOCAL_RANK": "3"}) == 3
    assert local_rank({}) is None
    for text in ("-1", "1.0", "", "²"):
        with pytest.raises(InputError, match="RANK is"):
            environment_number("RANK", {"RANK": text})


@pytest.mark.parametrize("make_place", [free_place, store])
def test_they_meet_again_and_again(make_place: Callable[[], MeetingPlace]):
    place = make_place()
    for turn in range(4):
        members = [Member(rank=rank, world_size=5) for rank in range(5)]
        unique_id = bytes([turn]) * 128
        assert meet_all(members, place, make_id=lambda unique_id=unique_id: unique_id) == [unique_id] * 5


def test_processes_meet_again_and_again():
    """No rank takes the answer of the meeting before, though it comes back at once."""
    where = f"tcp://{free_place()}"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), "3", where],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (2, 0, 1)
    ]  # fmt: skip
    try:
        said = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0, 0], said
    assert [out.split() for out, _ in said] == [["00000000", "01010101", "02020202"]] * 3


def test_each_with_a_store_of_its_own_on_one_file(tmp_path: Path):
    def run(rank: int) -> bytes:
        place = MeetingPlace(store=distributed.FileStore(str(tmp_path / "store"), 2))
        return meet(place, Member(rank=rank, world_size=2), lambda: ID, 20)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [ID] * 2


@pytest.mark.parametrize("make_place", [free_place, store])
def test_rank_0_names_who_did_not_come_and_tells_those_who_did(make_place: Callable[[], MeetingPlace]):
    place = make_place()
    errors = meet_all([Member(rank=0, world_size=4), Member(rank=2, world_size=4)], place, timeout=2, others=20)
    assert all(isinstance(error, EngineError) for error in errors)
    assert f"within 2 s: rank 1, 3 did not come to {place}" in str(errors[0])
    assert "rank 2 of 4" in str(errors[1])
    assert "rank 1, 3 did not come" in str(errors[1])
    assert "Fix: start every rank" in str(errors[0])


def test_without_rank_0_the_others_say_where_they_looked():
    place = free_place()
    (error,) = meet_all([Member(rank=1, world_size=2)], place, timeout=0.3)
    assert isinstance(error, EngineError)
    assert f"rank 0 at {place}" in str(error)
    assert "refused" in str(error).lower()
    assert error.engine == "nccl"


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (Member(rank=1, world_size=3), r"rank 1 \(process \d+ on .+\) says world_size 3, and rank 0 .* says 2"),
        (Member(rank=1, world_size=2, library="2.27.7"), r"has NCCL 2\.27\.7, and rank 0"),
        (Member(rank=1, world_size=2, library="2.28.9", policy="tree"), "asks for tree, and rank 0 .* for ring"),
        (Member(rank=1, world_size=2, library="2.28.9", policy="ring", gpu="here/0"), "use the same GPU"),
    ],
)
@pytest.mark.parametrize("make_place", [free_place, store])
def test_both_sides_hear_why_they_do_not_fit(second: Member, words: str, make_place: Callable[[], MeetingPlace]):
    first = Member(rank=0, world_size=2, library="2.28.9", policy="ring", gpu="here/0")
    for rank, error in enumerate(meet_all([first, second], make_place())):
        assert isinstance(error, EngineError)
        assert str(error).startswith(f"rank {rank} of ")
        with pytest.raises(EngineError, match=words):
            raise error
        assert "Fix:" in str(error)


def test_two_processes_of_one_rank():
    members = [Member(rank=0, world_size=3), Member(rank=1, world_size=3, pid=11), Member(rank=1, world_size=3, pid=12)]
    for error in meet_all(members, free_place()):
        assert isinstance(error, EngineError)
        assert "two processes say they are rank 1" in str(error)
        assert "11 on " in str(error)
        assert "12 on " in str(error)


def test_a_rank_that_gave_up_may_come_again():
    place = free_place()
    unique_ids: list[bytes] = []
    rank_0 = threading.Thread(
        target=lambda: unique_ids.append(meet(place, Member(rank=0, world_size=3), lambda: ID, 30))
    )
    rank_0.start()
    (error,) = meet_all([Member(rank=1, world_size=3)], place, timeout=2)  # it joins, waits, and gives up
    assert "did not answer" in str(error)
    later = meet_all([Member(rank=1, world_size=3), Member(rank=2, world_size=3)], place)
    rank_0.join(30)
    assert [*later, *unique_ids] == [ID] * 3


def test_an_answer_of_the_meeting_before_is_not_taken():
    """A rank that heard why it does not fit comes back with what does, while rank 0 still has the store of before."""
    place = free_place()
    heard: list[bytes | EngineError] = []

    def run(rank: int, *policies: str) -> None:
        for policy in policies:
            heard.extend(meet_all([Member(rank=rank, world_size=2, policy=policy)], place))

    threads = [threading.Thread(target=run, args=(rank, first, "tree")) for rank, first in enumerate(("ring", "tree"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [type(result) for result in heard].count(EngineError) == 2
    assert heard[2:] == [ID, ID]


def test_what_listens_there_may_be_something_else():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        (error,) = meet_all([Member(rank=1, world_size=2)], meeting_place(f"tcp://127.0.0.1:{port}"), timeout=0.5)
        server.shutdown(socket.SHUT_RDWR)
    assert isinstance(error, EngineError)
    assert "127.0.0.1" in str(error)


def test_a_port_in_use_and_an_address_of_another_machine():
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = meeting_place(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(EngineError, match=r"cannot listen on 127\.0\.0\.1.*free port"):
            meet(place, Member(rank=0, world_size=2), lambda: ID, 5)
    with pytest.raises(EngineError, match=r"cannot listen on 192\.0\.2\.1.*Fix:"):
        meet(meeting_place("tcp://192.0.2.1:4321"), Member(rank=0, world_size=2), lambda: ID, 5)


def test_rank_0_that_cannot_make_the_id_tells_the_others():
    def fail() -> bytes:
        raise EngineError("no network interface")

    errors = meet_all([Member(rank=0, world_size=2), Member(rank=1, world_size=2)], free_place(), make_id=fail)
    assert "no network interface" in str(errors[0])
    assert "rank 0 gave up: no network interface" in str(errors[1])


def test_it_listens_on_that_address_only_and_the_port_is_free_afterwards():
    place = free_place()
    listening: list[str] = []

    def make_id() -> bytes:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        listening.extend(line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{place.port:04X}"))
        return ID

    meet_all([Member(rank=0, world_size=2), Member(rank=1, world_size=2)], place, make_id=make_id)
    assert listening == [f"0100007F:{place.port:04X}"]
    socket.create_server((place.host, place.port)).close()


def test_a_store_that_fails():
    class Broken(distributed.Store):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection reset")

    with pytest.raises(EngineError, match="the store Broken failed in add: connection reset"):
        meet(MeetingPlace(store=Broken()), Member(rank=0, world_size=2), lambda: ID, 5)


def test_a_store_of_another_library():
    """Four methods suffice."""
    inner: Any = distributed.HashStore()
    inner.set_timeout(timedelta(seconds=20))

    class Other:
        add, set, get, check = inner.add, inner.set, inner.get, inner.check

    members = [Member(rank=rank, world_size=2) for rank in range(2)]
    assert meet_all(members, meeting_place(Other())) == [ID] * 2


@pytest.mark.slow
def test_processes_that_torchrun_started_meet_in_its_store(tmp_path: Path):
    (tmp_path / "worker.py").write_text(TORCHRUN_WORKER)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1",
         "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "worker.py"],
        cwd=tmp_path, env={**os.environ, "SAID": str(tmp_path / "said")}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said0").read_text() == (tmp_path / "said1").read_text() == "met"
